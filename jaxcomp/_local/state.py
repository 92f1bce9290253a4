"""The state that `local_sgd` and `local_sgd_round` share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import local_if_bound
from jaxcomp._mesh.per_replica import no_owner


class LocalSGDState(NamedTuple):
    """State of `local_sgd` and `local_sgd_round`; a checkpoint holds one, consolidated."""

    # int32 scalar: optimizer steps taken; replicated. Named as in every Optax state, although a
    # tuple has a method of that name.
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    last_sync: Array  # int32 scalar: `count` after the last step that replicas share; replicated
    inner: PyTree  # inner state; per replica
    # Of `local_sgd` with a reducer or an outer optimizer: parameters after the last outer step;
    # otherwise (). Replicated.
    anchor: PyTree
    outer: PyTree  # the outer optimizer's state, in rounds one for each fragment, or (); replicated
    reducer: PyTree  # the reducer's state, in rounds one for each fragment; declares its own fields
    # In rounds after which replicas differ: this replica's floating parameters; otherwise (). Per
    # replica.
    local: PyTree = ()
    # float32 scalar: whose inner state it is, 0 for everybody's; per replica.
    owner: PyTree = ()

    # Read by consolidate, state_specs and shard_state. Not a field: it has no annotation.
    per_replica = ("inner", "local", "owner")

    @property
    def synced(self) -> Array:
        """Whether the last step set parameters to an average; bool scalar, equal on replicas."""
        return (self.count == self.last_sync) & (self.count > 0)

    @classmethod
    def first(cls, axis_name: AxisName, inner: PyTree, local: PyTree = (), **shared: PyTree):
        """The state before the first step; `shared` are the fields anchor, outer and reducer."""
        # Two arrays: a training step that donates its state must not see one buffer twice.
        count, last_sync = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        arrays = jax.tree.map(jnp.asarray, (inner, local))
        inner, local = local_if_bound(arrays, axis_name)
        owner = no_owner(axis_name)
        return cls(count, last_sync, inner, local=local, owner=owner, **shared)
