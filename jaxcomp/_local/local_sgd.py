"""Local SGD as an Optax transformation: an inner optimizer on each replica, averages now and then.

`periods` says when replicas meet, `meeting` what they do then; this file is the step between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import wider
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import Fragments, make_fragments
from jaxcomp._local.meeting import (
    AverageInnerState,
    Meeting,
    Outer,
    Part,
    average,
    check_meeting,
)
from jaxcomp._local.periods import Periods, SyncEvery, check_known, check_periods
from jaxcomp._local.state import LocalSGDState, box, init_state, unbox
from jaxcomp._mesh.axes import as_local, switch
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.contract import Transformation, call_text, reducible


def local_sgd(
    inner: optax.GradientTransformation,
    *,
    sync_every: SyncEvery,
    axis_name: AxisName,
    start_step: int = 0,
    reducer: optax.GradientTransformation | None = None,
    outer: Outer | None = None,
    average_inner_state: AverageInnerState = False,
    fragments: int | Sequence[str] = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    offset: int | None = None,
    local_axis_name: AxisName | None = None,
) -> Transformation:
    r"""Steps of each replica on its own, and an average of the parameters every `sync_every` steps.

    With local gradient :math:`g_w` and the inner optimizer's update :math:`u_w`, replica :math:`w`
    of :math:`W` takes :math:`p_w \leftarrow p_w + u_w(g_w)`, and after every :math:`H` =
    `sync_every` steps

    .. math::
        p_w &\leftarrow \frac{1}{W} \sum_v p_v && \text{(local SGD, Stich 2019)} \\
        p_w, a &\leftarrow a + \mathrm{outer}\Big(\frac{1}{W} \sum_v (a - p_v)\Big)
            && \text{(with an outer optimizer: DiLoCo, Algorithm 1)}

    where the anchor :math:`a` is what the replicas last agreed on and :math:`a - p_v` is the
    pseudo-gradient. The steps in between contain no collective. ``outer=optax.sgd(0.7,
    momentum=0.9, nesterov=True)`` is DiLoCo; with ``outer=None`` and a reducer the anchor takes the
    whole step.

    Streaming DiLoCo averages a fragment of the parameters at a time. With a delay :math:`\tau` and
    a share :math:`\alpha`, for a fragment whose turn is after step :math:`t`,

    .. math::
        a &\leftarrow a + \mathrm{outer}\Big(\frac{1}{W} \sum_v (a - p_v^{t - \tau})\Big)
            && \text{(after step } t - \tau \text{)} \\
        p_w^t &\leftarrow (1 - \alpha)\, a + \alpha\, p_w^t && \text{(after step } t \text{)}

    Parameters differ between replicas until they are averaged: under `jax.pmap` and `jax.vmap`
    nothing need be done; under `jax.shard_map` give them a leading axis of replicas and
    ``P(axis_name)``. As an Optax update, an average leaves the parameters within one unit in the
    last place of the mean, because ``p + (mean - p)`` is rounded. `local_sgd_round` sets them
    exactly, takes and returns replicated parameters, and is the better choice wherever a whole
    round can be one call.

    Args:
      inner: The local optimizer: any Optax transformation.
      sync_every: Steps between averages; or an Optax schedule: the length of the round that begins
        after so many steps (rounded, at least 1); or a hierarchy such as ``{"device": 4, ("device",
        "node"): 16}``, where the widest level that is due is averaged.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Steps before this one average the *gradients*, with `reducer`: post-local SGD.
      reducer: A jaxcomp reducer, made for the same `axis_name`: applied to the pseudo-gradients,
        and to the gradients before `start_step`. None averages exactly. Its state begins anew at
        `start_step`, because gradients and pseudo-gradients have different scales; and its own
        ``start_step`` counts averages, so give ``start_step=0`` to compress from the first.
      outer: An Optax optimizer of the pseudo-gradients, with its state in this one's; or a list of
        them, one for each fragment. In a hierarchy it, the reducer and `fragment_update_alpha` act
        at the widest level; narrower ones average parameters.
      average_inner_state: What happens to momenta at an average. False: each replica keeps its own,
        as in torch and DiLoCo. True: averaged too. "reset": begun anew; schedules go on.
      fragments: Average one such part of the leaves at a time (streaming DiLoCo): the same bytes in
        total, peaks that many times lower. A number, for parts of about equal size; or a list of
        regular expressions, where a leaf belongs to the first that is found in its path, written
        ``blocks/0/kernel``. The turn of fragment ``k`` of ``n``, from 1, is after
        ``k * sync_every // n`` steps of each period, rounded down where ``n`` does not divide it.
      fragment_sync_delay: Steps between the average of a fragment and its use: less than
        ``sync_every // fragments``. Nothing in between depends on it. The average is sent so many
        steps before the fragment's turn, and the anchor holds it until then. Time is hidden where
        one program has all of these steps: by `local_sgd_round`.
      fragment_update_alpha: Share of its own parameters, from 0 to 1, that a replica keeps at the
        fragment's turn. Replicas then stay different; what they agree on is `anchor`, where there
        is one.
      offset: Averages follow the updates number ``offset + k * sync_every`` (from 1) that come
        after `start_step`; by default ``offset=start_step``, so that a round precedes the first
        average. torch's ``PeriodicModelAverager`` averages on the first step after its warm-up:
        ``offset=start_step + 1``. Its ``HierarchicalModelAverager``: ``offset=1``.
      local_axis_name: Axes along which gradients are averaged in every step also after
        `start_step`: torch's ``PostLocalSGDState(subgroup=...)``, for a fast network inside a node.

    Returns:
      A transformation from local gradients to this replica's updates. ``update`` needs `params`;
      ``update(..., weight=w)`` says how much this replica counts wherever gradients or parameters
      are averaged in that step, 0 to sit an average out. Its state is a `LocalSGDState`.

    Raises:
      ValueError: If an argument is unusable, an axis of a hierarchy is not in `axis_name`, or a
        period does not divide the next; in ``init``, if a fragment has no leaf or a leaf no
        fragment; at tracing time, if `params` is missing, the axis is not bound, or a gradient was
        already reduced.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> tx = jaxcomp.local_sgd(optax.sgd(0.5), sync_every=2, axis_name="data")
      >>> def train(target):  # one replica: four steps on |params - target|^2 / 2
      ...     params = jnp.zeros(())
      ...     state = tx.init(params)
      ...     for _ in range(4):
      ...         updates, state = tx.update(params - target, state, params)
      ...         params = optax.apply_updates(params, updates)
      ...     return params
      >>> jax.vmap(train, axis_name="data")(jnp.array([0.0, 16.0])).tolist()
      [7.5, 7.5]

      Streaming DiLoCo: the embedding and the rest take turns after 3 and 6 steps, and what each
      replica sends is on its way during one step.

      >>> tx = jaxcomp.local_sgd(
      ...     optax.adamw(1e-3), sync_every=6, axis_name="data", fragments=["embedding", ".*"],
      ...     outer=optax.sgd(0.7, momentum=0.9, nesterov=True), fragment_sync_delay=1,
      ...     fragment_update_alpha=0.5)
      >>> params = {"embedding": jnp.zeros((8, 4)), "head": jnp.zeros(8)}
      >>> [tx.bytes(params, step=step).bytes_after for step in range(6)]
      [0, 128, 0, 0, 32, 0]

    References:
      Stich: Local SGD Converges Fast and Communicates Little. ICLR 2019.
      Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD. ICLR 2020.
      Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models. 2023.
      Douillard et al.: Streaming DiLoCo with Overlapping Communication. 2025.
    """
    made_by = call_text("local_sgd", locals())
    periods = check_periods(
        sync_every, axis_name, start_step, offset, fragments, fragment_sync_delay
    )
    meeting = check_meeting(
        axis_name, periods, reducer, outer, average_inner_state, fragment_update_alpha
    )
    if local_axis_name is not None:
        check_known("local_axis_name", local_axis_name, axis_name)
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise ValueError(f"`inner` must be an Optax gradient transformation, got {inner!r}.")
    run = _LocalSGD(optax.with_extra_args_support(inner), periods, meeting, local_axis_name)
    return Transformation(run.init, run.update, made_by=made_by, count_bytes=run.count_bytes)


@dataclasses.dataclass(frozen=True)
class _LocalSGD:
    """Checked arguments of `local_sgd`, and its two functions."""

    inner: optax.GradientTransformationExtraArgs
    periods: Periods
    meeting: Meeting
    local_axis_name: AxisName | None

    def init(self, params: PyTree) -> LocalSGDState:
        return init_state(self.meeting, params, self.inner.init(params), self.periods.split)

    def count_bytes(
        self, params: PyTree, replicas: int | None, step: int | None
    ) -> CompressionStats:
        """What a replica sends in a step, `local_axis_name` left out; see ``bytes``."""
        sent = self.meeting.sent(self.periods, self.inner.init, replicas)
        return sent.count_bytes(params, step)

    def update(
        self,
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, LocalSGDState]:
        if params is None:
            raise ValueError(
                "local_sgd averages parameters, so its update needs them: "
                "tx.update(grads, state, params)."
            )
        axis_name = self.meeting.axis_name
        reducible(updates, axis_name)
        fragments = make_fragments(params, self.periods.split)
        given = {} if weight is None else {"weight": weight}
        gradients, reducer = self._gradients(updates, state, fragments, given)
        before = as_local(unbox(state.inner), axis_name)
        step, inner = self.inner.update(gradients, before, params, **extra)
        step, inner = as_local((jax.tree.map(_widen, step, params), inner), axis_name)

        count = jnp.asarray(optax.safe_increment(state.count))
        event = self.periods.due(count, state.last_sync)
        last_sync = jnp.where(
            self.periods.meets(event) | (count <= self.periods.start_step), count, state.last_sync
        )
        state = state._replace(reducer=reducer)
        after = _AfterStep(self, fragments, params, step, inner, state, weight)
        branches = [after.stay, *after.events()]
        if self.periods.start_step and not self.meeting.plain:
            branches.append(after.share)
            event = jnp.where(count == self.periods.start_step, len(branches) - 1, event)
        step, state = switch(event, branches)
        return step, state._replace(count=count, last_sync=last_sync)

    def _gradients(
        self, updates: PyTree, state: LocalSGDState, fragments: Fragments, given: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """The gradients that the inner optimizer sees, and the reducer's states."""

        def local() -> tuple[PyTree, PyTree]:
            if self.local_axis_name is None:
                return updates, state.reducer
            mean = allreduce(axis_name=self.local_axis_name)
            return mean.update(updates, optax.EmptyState(), **given)[0], state.reducer

        def everywhere() -> tuple[PyTree, PyTree]:
            reduced, states = updates, []
            for k, old in enumerate(state.reducer):
                part, new = self.meeting.reducer.update(fragments.take(updates, k), old, **given)
                reduced = fragments.put(reduced, part, k)
                states.append(new)
            return reduced, tuple(states)

        if not self.periods.start_step:
            return local()
        started = state.count >= self.periods.start_step
        return switch(started.astype(jnp.int32), [everywhere, local])


@dataclasses.dataclass(frozen=True)
class _AfterStep:
    """A replica after its local step: it stays as it is, or meets the others."""

    run: _LocalSGD
    fragments: Fragments
    params: PyTree  # before the step
    step: PyTree
    inner: PyTree  # inner state after the step
    state: LocalSGDState  # inner state not yet in it
    weight: Any  # of this replica; None if all count the same

    def stay(self) -> tuple[PyTree, LocalSGDState]:
        """No average: the inner optimizer's step, exactly."""
        return self.step, self.state._replace(inner=box(self.inner))

    def events(self) -> list[Any]:
        """A branch for each event of `Periods.due`, in its order."""
        numbers = range(self.fragments.count)
        if self.run.periods.delay:
            sent = [lambda k=k: self._send(k) for k in numbers]
            return [*sent, *[lambda k=k: self._receive(k) for k in numbers]]
        narrow = [
            lambda axes=level.axes: self._mean(axes) for level in self.run.periods.levels[:-1]
        ]
        return [*narrow, *[lambda k=k: self._meet(k) for k in numbers]]

    def share(self) -> tuple[PyTree, LocalSGDState]:
        """The end of the shared steps: their result is the anchor, the reducer begins anew.

        Replicas are equal here, in all but what the type checker knows: the average proves it.
        """
        meeting = self.run.meeting
        anchor = average(optax.apply_updates(self.params, self.step), meeting.axis_name)
        _, _, reducer = meeting.init(anchor, self.fragments)
        state = self.state._replace(anchor=anchor, reducer=reducer, inner=box(self.inner))
        return self._towards(anchor), state

    def _meet(self, k: int) -> tuple[PyTree, LocalSGDState]:
        """All replicas, on fragment `k`."""
        averaged, state = self._average(k)
        return self._mixed(averaged.params, k), state

    def _send(self, k: int) -> tuple[PyTree, LocalSGDState]:
        """The average of fragment `k` into the anchor; the replica goes on by itself."""
        return self.step, self._average(k)[1]

    def _receive(self, k: int) -> tuple[PyTree, LocalSGDState]:
        """What was sent of fragment `k` some steps ago."""
        shared = self.fragments.take(self.state.anchor, k)
        return self._mixed(shared, k), self.state._replace(inner=box(self.inner))

    def _average(self, k: int) -> tuple[Part, LocalSGDState]:
        """Fragment `k` averaged, and the state with it."""
        state, meeting = self.state, self.run.meeting
        anchor = self.fragments.take(state.anchor, k) if meeting.anchored else ()
        averaged = meeting.meet(k, anchor, self._local(k), self._begin, self.weight)
        state = state._replace(inner=box(averaged.inner))
        if not meeting.anchored:
            return averaged, state
        return averaged, state._replace(
            anchor=self.fragments.put(state.anchor, averaged.params, k),
            reducer=_with(state.reducer, k, averaged.reducer),
            outer=_with(state.outer, k, averaged.outer) if state.outer else (),
        )

    def _mixed(self, shared: PyTree, k: int) -> PyTree:
        """The update to what the replica goes on with in fragment `k`."""
        new = self.run.meeting.mix(shared, self._local(k).params)
        return self._towards(self.fragments.put(self.params, new, k), k)

    def _mean(self, axes: tuple[str, ...]) -> tuple[PyTree, LocalSGDState]:
        """The replicas along some of the axes."""
        averaged = self.run.meeting.mean(self._local(0), axes, self._begin, self.weight)
        new = self.fragments.put(self.params, averaged.params, 0)
        return self._towards(new), self.state._replace(inner=box(averaged.inner))

    def _local(self, k: int) -> Part:
        params = optax.apply_updates(
            self.fragments.take(self.params, k), self.fragments.take(self.step, k)
        )
        outer = self.state.outer[k] if self.state.outer else ()
        return Part(params, self.inner, outer, self.state.reducer[k])

    def _begin(self, part: PyTree) -> PyTree:
        return self.run.inner.init(self.fragments.put(self.params, part, 0))

    def _towards(self, new: PyTree, k: int | None = None) -> PyTree:
        """The update that leads to `new`; the inner optimizer's for what is not averaged."""
        step = self.step
        for j in range(self.fragments.count) if k is None else [k]:
            here, there = self.fragments.take(self.params, j), self.fragments.take(new, j)
            step = self.fragments.put(
                step, jax.tree.map(_difference, self.fragments.take(step, j), here, there), j
            )
        return step


def _widen(step: Array, param: Array) -> Array:
    """An update in the wider of its own and its parameter's dtype, as a meeting gives it."""
    if not jnp.issubdtype(step.dtype, jnp.floating):
        return step
    return step.astype(wider(step.dtype, jnp.asarray(param).dtype))


def _difference(step: Array, here: Array, there: Array) -> Array:
    return there.astype(step.dtype) - here.astype(step.dtype)


def _with(states: tuple[Any, ...], k: int, state: Any) -> tuple[Any, ...]:
    return (*states[:k], state, *states[k + 1 :])
