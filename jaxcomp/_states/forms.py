"""The forms that a state has: one copy to save, or what the replicas of a running loop hold.

The marks beside the residuals tell them apart: (1,) in a consolidated state, (n, 1) where replicas
have an axis of their own, (n,) where `jax.shard_map` lays them along axis 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._mesh.per_replica import map_leaves
from jaxcomp._states.replicas import shard_state
from jaxcomp._states.stacked import mean_of_replicas, place_stacked, stack_replicas


@dataclasses.dataclass(frozen=True)
class Form:
    """How a state holds what each replica has of its own.

    Attributes:
      replicas: How many lie in it; 1 for a consolidated state.
      stacked: Whether they have an axis of their own, in front; else they lie along axis 0.
      sharding: Of a mark over the mesh of the replicas; None for arrays of one device.
    """

    replicas: int
    stacked: bool
    sharding: NamedSharding | None

    def of(self, state: PyTree) -> PyTree:
        """A consolidated state in this form, where the replicas' arrays lie."""
        if self.sharding is None:
            return self._repeated(state)
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        place = place_stacked if self.stacked else shard_state
        return place(state, mesh, self.sharding.spec[0])

    def shapes(self, state: PyTree) -> PyTree:
        """What `of` would give, without its arrays."""
        return jax.eval_shape(self._repeated, state)

    def _repeated(self, state: PyTree) -> PyTree:
        if self.stacked:
            return stack_replicas(state, self.replicas)
        if self.replicas == 1:
            return state

        def along_rows(path: KeyPath, leaf: Any, local: bool) -> Any:
            return jnp.concatenate([leaf] * self.replicas) if local else leaf

        return map_leaves(along_rows, state)


CONSOLIDATED = Form(1, stacked=False, sharding=None)


def form_of(state: PyTree) -> Form:
    """The form of a state, as its marks tell; without any, that of a consolidated one.

    Raises:
      ValueError: If it is the state of one replica only, of a traced function, of several forms, or
        everything has an axis of replicas, also what they share.
    """
    marks: list[Any] = []
    shared: list[Any] = []

    def collect(path: KeyPath, leaf: Any, local: bool) -> None:
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                "The state is traced, and ranks are numbers that a program is compiled for. Call "
                "this between two steps, outside of jax.jit and of mapped functions."
            )
        name = getattr(path[-1], "name", None) if path else None
        if local and name == "mark":
            marks.append(leaf)
        elif name == "count":
            shared.append(leaf)

    map_leaves(collect, state)
    if not marks:
        return CONSOLIDATED
    forms = {np.shape(mark) for mark in marks}
    if len(forms) > 1:
        raise ValueError(
            f"The marks of the state have several shapes, {sorted(forms)}: its parts come from "
            "different mappings. Pass the state as one training step returned it."
        )
    (shape,) = forms
    if len(shape) == 2 and any(np.ndim(count) for count in shared):
        raise ValueError(
            "The whole state has an axis of replicas, also what they share, as jax.pmap returns "
            "it. Pass jaxcomp.consolidate(state) and one copy of the parameters; or map with "
            "in_axes and out_axes of jaxcomp.state_axes(state)."
        )
    if shape == (1,):
        mean_of_replicas(state)  # refuses the residual of one replica
    sharding = getattr(marks[0], "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and any(sharding.spec[:1])
    return Form(math.prod(shape), len(shape) == 2, sharding if on_mesh else None)
