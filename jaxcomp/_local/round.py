"""A whole round of local SGD as one call: local steps in scans, and exact averages between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._base.checks import check_int
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._local.fragments import Fragments, make_fragments
from jaxcomp._local.meeting import (
    AverageInnerState,
    InnerInit,
    Meeting,
    Outer,
    Part,
    check_meeting,
)
from jaxcomp._local.periods import Periods, check_periods
from jaxcomp._local.state import LocalSGDState, box, init_state, unbox
from jaxcomp._mesh.axes import as_local, axis_tuple, is_bound
from jaxcomp._mesh.explicit import check_mesh_axes, resharded
from jaxcomp._reducers.contract import call_text
from jaxcomp._states.replicas import state_specs
from jaxcomp._states.stacked import place_stacked, stack, unstack
from jaxcomp._training.on_mesh import (
    batch_spec,
    check_params,
    check_replica_axis,
    replica_weights,
)

# (params, inner state, batch) -> (params, inner state, whatever else)
StepFn: TypeAlias = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]]


class _Local(NamedTuple):
    """A replica in a round."""

    params: PyTree
    inner: PyTree
    auxiliary: list[Any]  # of each scan so far


@dataclasses.dataclass(frozen=True, repr=False)
class LocalSGDRound:
    """What `local_sgd_round` returns: `init`, and the round itself as a call."""

    step_fn: StepFn
    periods: Periods
    meeting: Meeting
    inner_init: InnerInit | None
    mesh: Mesh | None = None
    made_by: str = ""

    def __repr__(self) -> str:
        return self.made_by

    @property
    def sync_every(self) -> int:
        """Local steps in a round."""
        return self.periods.levels[0].period

    @property
    def keeps_local(self) -> bool:
        """Whether replicas differ after a round, so that the state has their parameters."""
        return self.periods.fragments > 1 or self.meeting.alpha > 0

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
        state = init_state(self.meeting, params, inner_state, self.periods.split)
        # Between rounds the parameters are the anchor.
        state = state._replace(anchor=())
        if self.keeps_local:
            floating = make_fragments(params, self.periods.split).take(params)
            local = box(jax.tree.map(jnp.asarray, floating))
            bound = is_bound(self.meeting.axis_name)
            state = state._replace(
                local=as_local(local, self.meeting.axis_name) if bound else local
            )
        if self.mesh is None or is_bound(self.meeting.axis_name):
            return state
        check_params(params, self.mesh, axis_tuple(self.meeting.axis_name))
        return place_stacked(state, self.mesh, self.meeting.axis_name)

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
        if self.mesh is None or is_bound(self.meeting.axis_name):
            return self._on_replica(params, state, batches, weight)
        return self._on_mesh(self.mesh, params, state, batches, weight)

    def _on_mesh(
        self, mesh: Mesh, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
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
            None if weight is None else P(axis_name),
        )
        weight = replica_weights(weight, replicas)

        def on_replica(params: PyTree, state: LocalSGDState, batches: Any, weight: Any) -> Any:
            params, state, auxiliary = self._on_replica(params, unstack(state), batches, weight)
            rows = jax.tree.map(lambda x: as_local(jnp.asarray(x), axis_name)[None], auxiliary)
            return params, stack(state), rows

        mapped = jax.shard_map(
            on_replica,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), specs[1], P(axis_name)),
            axis_names=set(axes),
        )
        state, batches, weight = (
            jax.tree.map(lambda x, spec: resharded(x, mesh, spec, axes), tree, spec)
            for tree, spec in zip((state, batches, weight), specs[1:], strict=True)
        )
        return mapped(params, state, batches, weight)

    def _on_replica(
        self, params: PyTree, state: LocalSGDState, batches: Any, weight: Any
    ) -> tuple[PyTree, LocalSGDState, Any]:
        """The round of one replica."""
        periods, meeting = self.periods, self.meeting
        fragments = make_fragments(params, periods.split)
        local = fragments.put(params, unbox(state.local)) if self.keeps_local else params
        run = _Local(local, unbox(state.inner), [])
        averages: list[Part] = []
        for k, turn in enumerate(periods.ends):
            since = periods.ends[k - 1] if k else 0
            run = self._steps(run, batches, since, turn - periods.delay)
            averages.append(self._average(k, params, run, state, fragments, weight))
            run = run._replace(inner=averages[k].inner)
            # With a delay these steps are the collective's time: they do not depend on it. Not as a
            # loop, because XLA does not know how long that takes, and may wait before it.
            run = self._steps(run, batches, turn - periods.delay, turn, unroll=True)
            new = meeting.mix(averages[k].params, fragments.take(run.params, k))
            run = run._replace(params=fragments.put(run.params, new, k))
        shared = run.params
        for k, averaged in enumerate(averages):
            shared = fragments.put(shared, averaged.params, k)
        count = state.count + self.sync_every
        own = box((run.inner, fragments.take(run.params) if self.keeps_local else ()))
        inner, local = as_local(own, meeting.axis_name)
        state = LocalSGDState(
            count=count,
            last_sync=count,
            inner=inner,
            anchor=state.anchor,
            outer=tuple(averaged.outer for averaged in averages) if state.outer else (),
            reducer=tuple(averaged.reducer for averaged in averages),
            local=local,
        )
        return shared, state, _joined(run.auxiliary)

    def _average(
        self,
        k: int,
        params: PyTree,
        run: _Local,
        state: LocalSGDState,
        fragments: Fragments,
        weight: Any,
    ) -> Part:
        """Fragment `k` averaged."""
        outer = state.outer[k] if state.outer else ()
        local = Part(fragments.take(run.params, k), run.inner, outer, state.reducer[k])

        def begin(part: PyTree) -> PyTree:
            if self.inner_init is None:
                return run.inner
            return self.inner_init(fragments.put(run.params, part, k))

        return self.meeting.meet(k, fragments.take(params, k), local, begin, weight)

    def _steps(
        self, run: _Local, batches: Any, begin: int, end: int, unroll: bool = False
    ) -> _Local:
        """The local steps from number `begin` up to `end` of the round."""
        if begin == end:
            return run
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

        if end - begin < self.sync_every:
            batches = jax.tree.map(lambda x: x[begin:end], batches)
        start = (_local_floats(run.params, axis_name), as_local(run.inner, axis_name))
        (params, inner), auxiliary = lax.scan(
            step, start, batches, length=end - begin, unroll=unroll
        )
        return _Local(params, inner, [*run.auxiliary, auxiliary])

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
        sent = self.meeting.sent(self.periods, self.inner_init, replicas)
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
    outer: Outer | None = None,
    average_inner_state: AverageInnerState = False,
    fragments: int | Sequence[str] = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    drop_non_finite: bool = False,
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

    With a delay the round is one program in which an average and the steps until its use share no
    data, so that the compiler runs them side by side. It takes longer to compile: the step is
    compiled once for the loop before each average, and for each of the `fragment_sync_delay` steps
    beside it. Where not all parameters meet at the end (with fragments, or a share that replicas
    keep), `params` are what the replicas agree on, the anchor of Streaming DiLoCo, and the state
    has each replica's own.

    Args:
      step_fn: ``(params, inner_state, batch) -> (params, inner_state, auxiliary)``.
      sync_every: Local steps in a round.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      reducer: A jaxcomp reducer for the pseudo-gradients, as in `local_sgd`.
      outer: An Optax optimizer of the pseudo-gradients, as in `local_sgd`.
      average_inner_state: As in `local_sgd`. BatchNorm statistics, or anything else floating that
        shall always be averaged, can be a part of `params` where there is no outer optimizer.
      fragments: As in `local_sgd`.
      fragment_sync_delay: As in `local_sgd`.
      fragment_update_alpha: As in `local_sgd`.
      drop_non_finite: A replica with a value in what it would give to an average that is not
        finite does not count in it. It goes on with the others' mean, and its inner state begins
        anew, for which `inner_init` is needed. If nobody is left, the mean is NaN.
      inner_init: ``params -> inner_state``, the inner optimizer's ``init``: needed where an inner
        state may begin anew, and a convenience for `LocalSGDRound.init`.
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

      Streaming DiLoCo: what a replica has done after the first step is sent and averaged beside the
      second.

      >>> run = jaxcomp.local_sgd_round(
      ...     step, sync_every=2, axis_name="data", fragment_sync_delay=1)
      >>> params, state, losses = jax.vmap(run, in_axes=(None, None, 0), axis_name="data")(
      ...     jnp.zeros(3), run.init(jnp.zeros(3), optimizer.init(jnp.zeros(3))), batches)
      >>> params[0].tolist()
      [4.0, 4.0, 4.0]

    References:
      Those of `local_sgd`.
    """
    made_by = call_text("local_sgd_round", locals())
    length = check_int("sync_every", sync_every, 1)
    periods = check_periods(length, axis_name, 0, 0, fragments, fragment_sync_delay)
    meeting = check_meeting(
        axis_name,
        periods,
        reducer,
        outer,
        average_inner_state,
        fragment_update_alpha,
        drop_non_finite,
    )
    if not callable(step_fn):
        raise ValueError(f"`step_fn` must be a function, got {step_fn!r}.")
    if inner_init is not None and not callable(inner_init):
        raise ValueError(
            f"`inner_init` must be a function such as optimizer.init, got {inner_init!r}."
        )
    if (average_inner_state == "reset" or drop_non_finite) and inner_init is None:
        asked = "drop_non_finite=True" if drop_non_finite else "average_inner_state='reset'"
        raise ValueError(
            f"{asked} needs `inner_init`, the inner optimizer's init: inner_init=optimizer.init."
        )
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    return LocalSGDRound(step_fn, periods, meeting, inner_init, mesh, made_by)


def _joined(auxiliary: list[Any]) -> Any:
    """What the steps returned besides, stacked over all of them."""
    if len(auxiliary) == 1:
        return auxiliary[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *auxiliary)


def _local_floats(params: PyTree, axis_name: AxisName) -> PyTree:
    """Floating leaves marked as local. Others are not averaged, so they stay replicated."""
    return jax.tree.map(
        lambda x: as_local(x, axis_name) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )
