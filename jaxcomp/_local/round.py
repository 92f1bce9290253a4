"""Runs a round of local SGD as one call: local steps in scans, averages between the scans.

A round knows its parameters before and after, so it sets them to the average exactly, where
`local_sgd` can only return an update towards it. Between rounds the parameters are equal on all
replicas and serve as the anchor. With several fragments the round is cut into scans at the steps
where a fragment is averaged; replicas then differ after the round, and the state keeps each one's
own parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._base.checks import answers_other_names
from jaxcomp._base.leaves import floating_leaves, leaf_name, named_dtype, with_leaves
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, KeyPath, PyTree, Shape
from jaxcomp._local.fragments import Streaming, numbered, part_of, put_back
from jaxcomp._local.sync import InnerInit, LocalSGDState, Sync, payload
from jaxcomp._mesh.collectives import as_local, axis_tuple, is_bound, owner_id
from jaxcomp._mesh.meshes import explicit_inside, replicas_on, typed_specs
from jaxcomp._mesh.per_replica import has_replica_axis, with_replica_axis, without_replica_axis
from jaxcomp._reducers.transformation import Counted
from jaxcomp._states.place import shard_state
from jaxcomp._training.arguments import check_keys, is_raw_key, is_shared, split_spec
from jaxcomp._training.on_mesh import call_on_replicas, check_params, the_mesh
from jaxcomp._training.outputs import as_array, one_level

# (params, inner state, batch) -> (params, inner state, auxiliary)
StepFn: TypeAlias = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]


@dataclasses.dataclass(frozen=True, repr=False)
class LocalSGDRound(Counted):
    """Runs a round of local SGD when it is called; `local_sgd_round` makes such an object."""

    step_fn: StepFn
    sync_every: int  # local steps in a round
    axis_name: AxisName
    streaming: Streaming
    syncs: tuple[Sync, ...]  # one for each fragment
    inner_init: InnerInit | None
    mesh: Mesh | None = None
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    @answers_other_names
    def init(self, params: PyTree, inner_state: PyTree = None) -> LocalSGDState:
        """Makes the state before the first round.

        Args:
          params: The parameters.
          inner_state: The second argument of `step_fn`; None takes ``inner_init(params)``.

        Raises:
          ValueError: If there is neither `inner_state` nor `inner_init`, or a leaf is complex.
        """
        if inner_state is None:
            if self.inner_init is None:
                raise ValueError(
                    "There is no inner state. Pass run.init(params, optimizer.init(params)), with "
                    "() for a step that keeps none, or make the round with "
                    "inner_init=optimizer.init."
                )
            inner_state = self.inner_init(params)
        numbers = numbered(params, self.streaming.split)
        states = []
        for number, sync in enumerate(self.syncs):
            states.append(sync.init(part_of(params, numbers, number)))
        outer, reducer = zip(*states, strict=True)
        local = ()
        if self.streaming.keeps_local:
            local = part_of(params, numbers)
        # No anchor in the state: between rounds the parameters are the anchor.
        state = LocalSGDState.first(
            self.axis_name, inner_state, local, anchor=(), outer=outer, reducer=reducer
        )
        if self.mesh is None or is_bound(self.axis_name):
            return state
        check_params(params, self.mesh, axis_tuple(self.axis_name))
        return shard_state(state, self.mesh, self.axis_name)

    @answers_other_names
    def __call__(
        self, params: PyTree, state: LocalSGDState, batches: Any, *, weight: Any = None
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """Runs one round; call it inside the mapped function, or on a mesh inside `jax.jit`.

        Args:
          params: The parameters, equal on every replica.
          state: The state from `init` or from the last round.
          batches: This replica's batches, each leaf with a leading axis of `sync_every`. With a
            `mesh`, the batches of all replicas: the second axis is split between the replicas.
          weight: This replica's weight in the averages, a number; with 0 the replica is ignored.
            With a `mesh`, an array of all replicas' weights, of shape (replicas,). None if all
            replicas have the same weight.

        Returns:
          ``(params, state, auxiliary)``: the parameters, equal on every replica; the state; and
          this replica's auxiliary outputs of `step_fn`, stacked over the steps. With a `mesh`,
          auxiliary outputs have a leading axis of replicas.

        Raises:
          ValueError: If a leaf of `batches` has another leading axis, `step_fn` does not return
            three values, or the axis is not bound.
        """
        if not isinstance(state, LocalSGDState):
            raise ValueError(
                "Call a round as (params, state, batches), with the LocalSGDState that init or the "
                f"last round returned. The second argument is a {type(state).__name__}."
            )
        # Refuses other objects than arrays.
        jax.tree.map_with_path(named_dtype, {"params": params, "batches": batches})
        for path, leaf in jax.tree.leaves_with_path(batches):
            if np.shape(leaf)[:1] != (self.sync_every,):
                raise ValueError(
                    f"The batches' leaf {leaf_name(path)} has shape {np.shape(leaf)}; a round of "
                    f"sync_every={self.sync_every} steps needs a leading axis of that length, one "
                    "batch for each step."
                )
        if is_bound(self.axis_name):
            return self._on_replica(params, state, batches, weight)
        mesh = the_mesh(self.mesh, self.axis_name, state)
        return self._on_mesh(mesh, params, state, batches, weight)

    def _on_mesh(
        self, mesh: Any, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """Runs the round on every replica of a mesh."""
        axis_name = self.axis_name
        axes = axis_tuple(axis_name)
        # Arrays of NumPy have no types to read specs from.
        params, state, batches = jax.tree.map(jnp.asarray, (params, state, batches))
        # A step gets one replica's state without the replica axis, and one batch.
        rows = typed_specs((state.inner, batches))
        of_a_step = jax.tree.map(lambda spec: P(*spec[1:]), rows)
        step_specs = (typed_specs(params), *of_a_step)

        keys: dict[str, Any] = {}
        lengths: set[int] = set()  # numbers of examples in a step

        def batch_spec(path: KeyPath, leaf: Any) -> P:
            name = f"{leaf_name(path)} of the batches"
            of_step = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            if is_raw_key(of_step):
                keys[name] = of_step
            if is_shared(of_step):  # one value or key for each step, the same on all replicas
                return P()
            lengths.add(leaf.shape[1])
            return split_spec(name, leaf, P(None, axis_name), axis_name, replicas_on(mesh, axes))

        specs = jax.tree.map_with_path(batch_spec, batches)
        check_keys(keys, lengths)

        step = explicit_inside(lambda arrays: self.step_fn(*arrays), step_specs, mesh, axes)
        inside = dataclasses.replace(self, step_fn=lambda *arrays: step(arrays))

        def on_replica(state: PyTree, arrays: Any, weight: Any) -> Any:
            params, state, auxiliary = inside._on_replica(arrays[0], state, arrays[1], weight)
            auxiliary = as_local(jax.tree.map(jnp.asarray, auxiliary), axis_name)
            return None, jax.tree.map(lambda leaf: leaf[None], auxiliary), params, state

        _, auxiliary, params, state = call_on_replicas(
            on_replica,
            state,
            (params, batches),
            weight,
            specs=(P(), specs),
            examples={},
            params=params,
            mesh=mesh,
            axis_name=axis_name,
            state_axis=axis_name,
            compiled=self.compiled,
            static=(),
        )
        return params, state, auxiliary

    def _on_replica(
        self, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """Runs the round of one replica; its state may have the axis that shard_map leaves."""
        has_axis = has_replica_axis(state)
        if has_axis:
            state = without_replica_axis(state)
        streaming = self.streaming
        numbers = numbered(params, streaming.split)
        auxiliary: list[Any] = []  # auxiliary outputs of the steps, in pieces
        averages: list[PyTree] = []
        outer: list[PyTree] = []  # outer state of each fragment
        reducers: list[PyTree] = []

        def steps(carry: Any, begin: int, end: int, *, unroll: bool = False) -> Any:
            if begin == end:  # without a delay no step lies between an average and its use
                return carry
            piece = jax.tree.map(lambda leaf: leaf[begin:end], batches)
            carry = self._marked(*carry)
            carry, others = lax.scan(self._step, carry, piece, end - begin, unroll=unroll)
            auxiliary.append(others)
            return carry

        local = params
        if streaming.keeps_local:
            local = put_back(state.local, params)
        inner = state.inner
        begin = 0
        for number, end in enumerate(streaming.ends):
            sent = end - streaming.delay
            local, inner = steps((local, inner), begin, sent)
            before = state._replace(
                inner=inner,
                anchor=part_of(params, numbers, number),
                outer=state.outer[number],
                reducer=state.reducer[number],
            )
            part = part_of(local, numbers, number)
            average, after = self.syncs[number].step(
                part, before, self.inner_init, local, weight, self.axis_name
            )
            # With a delay these steps may run during the collective, because they do not depend on
            # it. They are unrolled: XLA does not know how long a loop takes, and may wait before
            # it.
            local, inner = steps((local, after.inner), sent, end, unroll=True)
            kept = streaming.mix(average, part_of(local, numbers, number))
            local = put_back(kept, local)
            averages.append(average)
            outer.append(after.outer)
            reducers.append(after.reducer)
            begin = end
        # With a fraction of their own, replicas went on from mixtures; what all share is the
        # averages.
        shared = local
        for average in averages:
            shared = put_back(average, shared)

        kept = ()
        if streaming.keeps_local:
            kept = part_of(local, numbers)
        inner, kept = as_local((inner, kept), self.axis_name)
        count = state.count + self.sync_every
        state = state._replace(
            count=count,
            last_sync=count,
            inner=inner,
            outer=tuple(outer),
            reducer=tuple(reducers),
            local=kept,
            owner=owner_id(self.axis_name),
        )
        auxiliary = jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *auxiliary)
        if has_axis:
            state = with_replica_axis(state)
        return shared, state, auxiliary

    def _step(self, carry: Any, batch: Any) -> tuple[Any, Any]:
        """Takes one local step, as the body of a scan that carries parameters and inner state."""
        params, inner = carry
        result = self.step_fn(params, inner, batch)
        in_three = isinstance(result, tuple) and len(result) == 3
        if not in_three or _types_of(result[:2]) != _types_of(carry):
            raise ValueError(
                "`step_fn` must return a tuple (params, inner_state, auxiliary). The first two "
                "must have the structure and shapes of its arguments. Return None as the third if "
                f"there are no auxiliary outputs. It got {one_level(carry)} and returned "
                f"{one_level(result)}."
            )
        params, inner, auxiliary = result
        auxiliary = jax.tree.map_with_path(as_array, auxiliary)
        # A step may return a constant, whose replicated type would change the type of the carry.
        return self._marked(params, inner), auxiliary

    def _marked(self, params: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
        """Marks floating parameters and the inner state as this replica's own."""
        # Other parameters are not averaged, so they stay replicated.
        floating, inner = as_local((floating_leaves(params), inner), self.axis_name)
        return with_leaves(params, floating), inner

    def count_bytes(
        self, params: PyTree, replicas: int | None, step: int | None
    ) -> CompressionStats:
        """Counts the bytes of a local step, numbered over all rounds; see ``bytes``."""
        numbers = numbered(params, self.streaming.split)
        nth = place = None
        if step is not None:
            nth, place = divmod(step, self.sync_every)
        parts = []
        for number, end in enumerate(self.streaming.ends):
            # Sent after the step that is `delay` before the end; steps are counted from 0.
            if place in (None, end - self.streaming.delay - 1):
                part = part_of(params, numbers, number)
                sync = self.syncs[number]
                parts.append(sync.bytes(part, replicas, nth, self.inner_init, params))
        sent = payload(params, parts)
        if step is None:
            return sent.scaled(1 / self.sync_every)
        return sent


def _types_of(tree: PyTree) -> tuple[Any, list[Shape]]:
    shapes = list(map(np.shape, jax.tree.leaves(tree)))
    return jax.tree.structure(tree), shapes
