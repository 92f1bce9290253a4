"""A whole round of local SGD as one call: local steps in a scan, then one exact average."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._local.fragments import make_fragments
from jaxcomp._local.meeting import AverageInnerState, InnerInit, Meeting, Part, check_meeting
from jaxcomp._local.periods import Level, Periods
from jaxcomp._local.state import LocalSGDState, box, init_state, unbox
from jaxcomp._mesh.axes import as_local, axis_tuple, is_bound
from jaxcomp._mesh.explicit import check_mesh_axes, resharded
from jaxcomp._states.replicas import state_specs
from jaxcomp._states.stacked import place_stacked, stack, unstack
from jaxcomp._training.on_mesh import batch_spec, check_params, check_replica_axis

# (params, inner state, batch) -> (params, inner state, whatever else)
StepFn: TypeAlias = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]


@dataclasses.dataclass(frozen=True)
class LocalSGDRound:
    """What `local_sgd_round` returns: `init`, and the round itself as a call."""

    step_fn: StepFn
    sync_every: int
    meeting: Meeting
    inner_init: InnerInit | None
    mesh: Mesh | None = None

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
        state = init_state(self.meeting, params, inner_state, 1)
        # Between rounds the parameters are the anchor.
        state = state._replace(anchor=())
        if self.mesh is None or is_bound(self.meeting.axis_name):
            return state
        check_params(params, self.mesh, axis_tuple(self.meeting.axis_name))
        return place_stacked(state, self.mesh, self.meeting.axis_name)

    def __call__(
        self, params: PyTree, state: LocalSGDState, batches: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """One round; call it inside the mapped function, or with a `mesh` inside `jax.jit`.

        Args:
          params: The parameters, the same on every replica.
          state: From `init`, or the last round.
          batches: This replica's batches, each leaf with a leading axis of `sync_every`. With a
            `mesh` those of all replicas: the second axis is split between them.

        Returns:
          ``(params, state, auxiliary)``: the parameters, equal on every replica; the state; and
          what `step_fn` returned besides, stacked over the steps, this replica's own. With a `mesh`
          the latter has a leading axis of replicas.

        Raises:
          ValueError: If a leaf of `batches` has another leading axis, `step_fn` does not return
            three values, or the axis is not bound.
        """
        self._check_batches(batches)
        if self.mesh is None or is_bound(self.meeting.axis_name):
            return self._on_replica(params, state, batches)
        return self._on_mesh(self.mesh, params, state, batches)

    def _on_mesh(
        self, mesh: Mesh, params: PyTree, state: LocalSGDState, batches: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """The round as a `shard_map` over the replicas."""
        axis_name = self.meeting.axis_name
        axes = axis_tuple(axis_name)
        replicas = math.prod(mesh.shape[name] for name in axes)
        check_replica_axis(state, replicas)
        check_params(params, mesh, axes)
        rows = jax.tree.map(lambda x: P(None, axis_name) if np.ndim(x) > 1 else P(), batches)
        specs = (
            P(),
            state_specs(state, axis_name),
            batch_spec(rows, batches, 2, axis_name, replicas),
        )

        def on_replica(params: PyTree, state: LocalSGDState, batches: Any) -> Any:
            params, state, auxiliary = self._on_replica(params, unstack(state), batches)
            rows = jax.tree.map(lambda x: as_local(jnp.asarray(x), axis_name)[None], auxiliary)
            return params, stack(state), rows

        mapped = jax.shard_map(
            on_replica,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), specs[1], P(axis_name)),
            axis_names=set(axes),
        )
        state, batches = (
            jax.tree.map(lambda x, spec: resharded(x, mesh, spec, axes), tree, spec)
            for tree, spec in zip((state, batches), specs[1:], strict=True)
        )
        return mapped(params, state, batches)

    def _on_replica(
        self, params: PyTree, state: LocalSGDState, batches: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """The round of one replica."""
        axis_name = self.meeting.axis_name

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
            return (_local_floats(params, axis_name), as_local(inner, axis_name)), auxiliary

        start = (_local_floats(params, axis_name), as_local(unbox(state.inner), axis_name))
        (local_params, inner), auxiliary = lax.scan(step, start, batches, length=self.sync_every)

        fragments = make_fragments(params, 1)
        outer = state.outer[0] if state.outer else ()
        local = Part(fragments.take(local_params, 0), inner, outer, state.reducer[0])

        def begin(part: PyTree) -> PyTree:
            return (
                self.inner_init(fragments.put(local_params, part, 0)) if self.inner_init else inner
            )

        averaged = self.meeting.meet(fragments.take(params, 0), local, begin)
        count = state.count + self.sync_every
        state = state._replace(
            count=count,
            last_sync=count,
            inner=as_local(box(averaged.inner), axis_name),
            outer=(averaged.outer,) if state.outer else (),
            reducer=(averaged.reducer,),
        )
        return fragments.put(local_params, averaged.params, 0), state, auxiliary

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
          ValueError: If the reducer does not know what it sends.
        """
        axes = axis_tuple(self.meeting.axis_name)
        periods = Periods((Level(axes, self.sync_every),), None, 0, 0, 1)
        sent = self.meeting.sent(periods, self.inner_init, replicas)
        return sent.count_bytes(params, step)

    def _check_batches(self, batches: Any) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batches)[0]:
            if np.shape(leaf)[:1] != (self.sync_every,):
                raise ValueError(
                    f"The batches' leaf {leaf_name(path)} has shape {np.shape(leaf)}; a round of "
                    f"sync_every={self.sync_every} steps needs a leading axis of that length, one "
                    "batch for each step."
                )


def local_sgd_round(
    step_fn: StepFn,
    *,
    sync_every: int,
    axis_name: AxisName,
    reducer: optax.GradientTransformation | None = None,
    outer: optax.GradientTransformation | None = None,
    average_inner_state: AverageInnerState = False,
    inner_init: InnerInit | None = None,
    mesh: Mesh | None = None,
) -> LocalSGDRound:
    r"""A round of local SGD or DiLoCo around an ordinary single-device training step.

    .. math::
        p_w^{0} = p, \qquad p_w^{h+1} = \mathrm{step}(p_w^{h}), \qquad
        p \leftarrow \frac{1}{W} \sum_w p_w^{H}
        \quad\text{or}\quad p + \mathrm{outer}\Big(\frac{1}{W} \sum_w (p - p_w^{H})\Big)

    `step_fn` is the step that one writes for one device: ``jax.grad``, ``optimizer.update``,
    ``optax.apply_updates``, no collective. The average at the end *sets* the parameters, so they
    are equal on all replicas bit for bit; under ``shard_map(check_vma=True)`` they come in and go
    out as ``P()``. Between rounds there is one copy to evaluate and to save. Nothing else of a
    round depends on `sync_every`: rounds of several lengths can share a state, for periods that
    change.

    Args:
      step_fn: ``(params, inner_state, batch) -> (params, inner_state, auxiliary)``.
      sync_every: Local steps in a round.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      reducer: A jaxcomp reducer for the pseudo-gradients, as in `local_sgd`.
      outer: An Optax optimizer of the pseudo-gradients, as in `local_sgd`.
      average_inner_state: As in `local_sgd`. BatchNorm statistics, or anything else floating that
        shall always be averaged, can be a part of `params` where there is no outer optimizer.
      inner_init: ``params -> inner_state``, the inner optimizer's ``init``: needed for "reset", and
        a convenience for `LocalSGDRound.init`.
      mesh: For a loop in `jax.jit` over sharded arrays: the mesh that the replicas are on. The
        round then maps itself over `axis_name`, with Auto or Explicit axes, and what each replica
        has of its own is a global array with a leading axis of replicas.

    Returns:
      A `LocalSGDRound`: ``init(params, inner_state)`` gives a `LocalSGDState`, and a call
      ``(params, state, batches)``, inside the mapped function, gives ``(params, state,
      auxiliary)``. With a `mesh` it is called inside `jax.jit` instead.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> optimizer = optax.sgd(0.5)
      >>> def step(params, opt_state, batch):  # nothing here knows of replicas
      ...     loss, grads = jax.value_and_grad(lambda p: ((p - batch) ** 2 / 2).sum())(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, loss
      >>> run = jaxcomp.local_sgd_round(step, sync_every=2, axis_name="data")
      >>> params = jnp.zeros(3)
      >>> state = run.init(params, optimizer.init(params))
      >>> batches = jnp.array([[0.0, 0.0], [16.0, 16.0]])  # two replicas, two steps
      >>> params, state, losses = jax.vmap(run, in_axes=(None, None, 0), axis_name="data")(
      ...     params, state, batches)
      >>> params.tolist()
      [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]

    References:
      Those of `local_sgd`.
    """
    check_axis_name(axis_name)
    length = check_int("sync_every", sync_every, 1)
    meeting = check_meeting(axis_name, reducer, outer, average_inner_state)
    if not callable(step_fn):
        raise ValueError(f"`step_fn` must be a function, got {step_fn!r}.")
    if inner_init is not None and not callable(inner_init):
        raise ValueError(
            f"`inner_init` must be a function such as optimizer.init, got {inner_init!r}."
        )
    if average_inner_state == "reset" and inner_init is None:
        raise ValueError(
            "average_inner_state='reset' needs `inner_init`, the inner optimizer's init: "
            "inner_init=optimizer.init."
        )
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    return LocalSGDRound(step_fn, length, meeting, inner_init, mesh)


def _local_floats(params: PyTree, axis_name: AxisName) -> PyTree:
    """Floating leaves marked as local. Others are not averaged, so they stay replicated."""
    return jax.tree.map(
        lambda x: as_local(x, axis_name) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )
