"""A round of local SGD as one call: local steps in scans, and exact averages between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import KeyPath, PyTree
from jaxcomp._local.fragments import Streaming, make_fragments
from jaxcomp._local.state import LocalSGDState
from jaxcomp._local.sync import InnerInit, Part, Sync, total
from jaxcomp._mesh.collectives import as_local, axis_tuple, is_bound, owner_id
from jaxcomp._mesh.explicit import resharded
from jaxcomp._mesh.per_replica import has_rows, with_row, without_row
from jaxcomp._states.place import shard_state, state_specs
from jaxcomp._training.arguments import split_spec
from jaxcomp._training.on_mesh import check_params, check_replica_axis, weight_spec

# (params, inner state, batch) -> (params, inner state, whatever else)
StepFn: TypeAlias = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]


@dataclasses.dataclass(frozen=True, repr=False)
class LocalSGDRound:
    """What `local_sgd_round` returns: `init`, and the round itself as a call."""

    step_fn: StepFn
    sync_every: int  # local steps in a round
    streaming: Streaming
    sync: Sync
    inner_init: InnerInit | None
    mesh: Mesh | None = None
    made_by: str = ""

    def __repr__(self) -> str:
        return self.made_by

    def init(self, params: PyTree, inner_state: PyTree = None) -> LocalSGDState:
        """The state before the first round.

        Args:
          params: The parameters.
          inner_state: What `step_fn` gets as its second argument; by default
            ``inner_init(params)``.

        Raises:
          ValueError: If there is neither an `inner_state` nor an `inner_init`, or a leaf is
            complex.
        """
        if inner_state is None:
            if self.inner_init is None:
                raise ValueError(
                    "There is no inner state. Pass run.init(params, optimizer.init(params)), with "
                    "() for a step that keeps none, or make the round with "
                    "inner_init=optimizer.init."
                )
            inner_state = self.inner_init(params)
        fragments, sync = make_fragments(params, self.streaming.split), self.sync
        states = [sync.init(fragments.take(params, k)) for k in range(len(self.streaming.ends))]
        state = LocalSGDState.first(
            sync.axis_name,
            inner_state,
            fragments.take(params) if self.streaming.keeps_local else (),
            anchor=(),  # between rounds the parameters are the anchor
            outer=tuple(outer for outer, _ in states) if sync.outer else (),
            reducer=tuple(reducer for _, reducer in states),
        )
        if self.mesh is None or is_bound(sync.axis_name):
            return state
        check_params(params, self.mesh, axis_tuple(sync.axis_name))
        return shard_state(state, self.mesh, sync.axis_name)

    def __call__(
        self, params: PyTree, state: LocalSGDState, batches: Any, *, weight: Any = None
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """One round; call it inside the mapped function, or with a `mesh` inside `jax.jit`.

        Args:
          params: The parameters, the same on every replica.
          state: From `init`, or the last round.
          batches: This replica's batches, each leaf with a leading axis of `sync_every`. With a
            `mesh` those of all replicas: the second axis is split between them.
          weight: How much this replica counts in the averages, a number, 0 to sit the round out.
            With a `mesh` an array of all replicas' weights, of shape (replicas,). None if all count
            the same.

        Returns:
          ``(params, state, auxiliary)``: what all replicas agree on, equal on each; the state; and
          what `step_fn` returned besides, stacked over the steps, this replica's own. With a `mesh`
          the latter has a leading axis of replicas.

        Raises:
          ValueError: If a leaf of `batches` has another leading axis, `step_fn` does not return
            three values, or the axis is not bound.
        """
        self._check_batches(batches)
        if self.mesh is None or is_bound(self.sync.axis_name):
            return self._on_replica(params, state, batches, weight)
        return self._on_mesh(self.mesh, params, state, batches, weight)

    def _on_mesh(
        self, mesh: Mesh, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """The round as a `shard_map` over the replicas."""
        axis_name = self.sync.axis_name
        axes = axis_tuple(axis_name)
        replicas = math.prod(mesh.shape[name] for name in axes)
        check_replica_axis(state, replicas)
        check_params(params, mesh, axes)

        def rows(path: KeyPath, x: Any) -> P:
            along = P(None, axis_name) if np.ndim(x) > 1 else P()
            return split_spec(f"{leaf_name(path)} of the batches", x, along, axis_name, replicas)

        specs = (
            P(),
            state_specs(state, axis_name),
            jax.tree_util.tree_map_with_path(rows, batches),
            weight_spec(weight, {}, axis_name, replicas),
        )
        given = jax.tree.map(
            lambda x, spec: resharded(jnp.asarray(x), mesh, spec, axes),
            (state, batches, weight),
            specs[1:],
        )

        def on_replica(params: PyTree, state: LocalSGDState, batches: Any, weight: Any) -> Any:
            params, state, auxiliary = self._on_replica(params, state, batches, weight)
            rows = jax.tree.map(lambda x: as_local(jnp.asarray(x), axis_name)[None], auxiliary)
            return params, state, rows

        mapped = jax.shard_map(
            on_replica,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), specs[1], P(axis_name)),
            axis_names=set(axes),
        )
        return mapped(params, *given)

    def _on_replica(
        self, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """The round of one replica, whose state may have the row that shard_map leaves."""
        if has_rows(state):
            params, state, auxiliary = self._on_replica(params, without_row(state), batches, weight)
            return params, with_row(state), auxiliary
        streaming, fragments = self.streaming, make_fragments(params, self.streaming.split)
        here = fragments.put(params, state.local) if streaming.keeps_local else params
        inner, seen, averages = state.inner, list[Any](), list[Part]()

        def average(k: int, here: PyTree, inner: PyTree) -> Part:
            outer = state.outer[k] if state.outer else ()
            part = Part(fragments.take(here, k), inner, outer, state.reducer[k])
            init = self.inner_init or (lambda params: inner)
            begin = lambda new: init(fragments.put(here, new, k))  # noqa: E731
            return self.sync.step(fragments.take(params, k), part, begin, weight)

        for k, end in enumerate(streaming.ends):
            begin, sent = (0, *streaming.ends)[k], end - streaming.delay
            here, inner = self._steps(here, inner, batches, begin, sent, seen)
            new = average(k, here, inner)
            # With a delay these steps are the collective's time: they do not depend on it. Not as a
            # loop, because XLA does not know how long that takes, and may wait before it.
            here, inner = self._steps(here, new.inner, batches, sent, end, seen, unroll=True)
            own = streaming.mix(new.params, fragments.take(here, k))
            here = fragments.put(here, own, k)
            averages.append(new)
        shared = here
        for k, new in enumerate(averages):
            shared = fragments.put(shared, new.params, k)
        count = state.count + self.sync_every
        local = fragments.take(here) if streaming.keeps_local else ()
        inner, local = as_local((inner, local), self.sync.axis_name)
        state = state._replace(
            count=count,
            last_sync=count,
            inner=inner,
            outer=tuple(new.outer for new in averages) if state.outer else (),
            reducer=tuple(new.reducer for new in averages),
            local=local,
            owner=owner_id(self.sync.axis_name),
        )
        if len(seen) > 1:
            seen = [jax.tree.map(lambda *parts: jnp.concatenate(parts), *seen)]
        return shared, state, seen[0]

    def _steps(
        self,
        params: PyTree,
        inner: PyTree,
        batches: Any,
        begin: int,
        end: int,
        seen: list[Any],
        *,
        unroll: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """Local steps `begin` up to `end` of the round; what they return besides joins `seen`."""
        if begin == end:
            return params, inner
        axis_name = self.sync.axis_name

        def local(params: PyTree, inner: PyTree) -> tuple[PyTree, PyTree]:
            # Floating ones only: others are not averaged, so they stay replicated.
            floats = jax.tree.map(
                lambda x: as_local(x, axis_name) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                params,
            )
            return floats, as_local(inner, axis_name)

        def step(carry: Any, batch: Any) -> Any:
            params, inner = carry
            result = self.step_fn(params, inner, batch)
            if not (isinstance(result, tuple) and len(result) == 3):
                raise ValueError(
                    "`step_fn` must return a tuple (params, inner_state, auxiliary), got "
                    f"{jax.tree.structure(result)}. With nothing besides, return None third."
                )
            params, inner, auxiliary = result
            # What a step sets anew, a constant say, would change the type of the carry.
            return local(params, inner), auxiliary

        if end - begin < self.sync_every:
            batches = jax.tree.map(lambda x: x[begin:end], batches)
        carry, auxiliary = lax.scan(
            step, local(params, inner), batches, length=end - begin, unroll=unroll
        )
        seen.append(auxiliary)
        return carry

    def bytes(
        self, params: PyTree, *, replicas: int | None = None, step: int | None = None
    ) -> CompressionStats:
        """What each replica sends in a local step, as `Reducer.bytes`: a round ends in an average.

        Args:
          params: Parameters: arrays, or anything with ``shape`` and ``dtype``.
          replicas: Number of replicas, where the reducer needs it.
          step: Which local step, counted from 0 over all rounds; None for the mean over a round.

        Returns:
          The payload per replica in bytes.

        Raises:
          ValueError: If the reducer does not know what it sends, or the inner state is averaged and
            not known.
        """
        inner_state = None
        if self.sync.average_inner is True:
            if self.inner_init is None:
                raise ValueError(
                    "The inner state is averaged too, and its size is not known. Make the round "
                    "with inner_init=optimizer.init."
                )
            inner_state = jax.eval_shape(self.inner_init, params)
        fragments = make_fragments(params, self.streaming.split)
        nth, place = (None, None) if step is None else divmod(step, self.sync_every)
        parts = [
            self.sync.bytes(fragments.take(params, k), inner_state, replicas, nth)
            for k, end in enumerate(self.streaming.ends)
            if place is None or end - self.streaming.delay == place + 1
        ]
        sent = total(params, parts)
        return sent.scaled(1 / self.sync_every) if step is None else sent

    def _check_batches(self, batches: Any) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batches)[0]:
            if np.shape(leaf)[:1] != (self.sync_every,):
                raise ValueError(
                    f"The batches' leaf {leaf_name(path)} has shape {np.shape(leaf)}; a round of "
                    f"sync_every={self.sync_every} steps needs a leading axis of that length, one "
                    "batch for each step."
                )
