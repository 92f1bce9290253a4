"""Local SGD as an Optax transformation: an inner optimizer on each replica, averages now and then.

`periods` says when replicas synchronise, `sync` what they do then; this file is the step between.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.leaves import widest
from jaxcomp._base.stats import CompressionStats, LeafStats, dense_leaves
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import Fragments, make_fragments
from jaxcomp._local.periods import Periods, SyncEvery, check_known, check_periods
from jaxcomp._local.state import LocalSGDState
from jaxcomp._local.sync import (
    AverageInnerState,
    Part,
    Sync,
    average,
    check_sync,
    is_transformation,
    total,
    wide_leaves,
)
from jaxcomp._mesh.collectives import as_local, owner_id, switch
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.reducer import check_gradients, takes_rows
from jaxcomp._reducers.transformation import Transformation, bytes_of, call_text


def local_sgd(
    inner: optax.GradientTransformation,
    *,
    sync_every: SyncEvery,
    axis_name: AxisName,
    start_step: int = 0,
    reducer: optax.GradientTransformation | None = None,
    outer: optax.GradientTransformation | None = None,
    average_inner_state: AverageInnerState = False,
    offset: int | None = None,
    local_axis_name: AxisName | None = None,
) -> Transformation:
    r"""Steps of each replica by itself, and an average of the parameters every `sync_every` steps.

    With local gradient :math:`g_w` and the inner optimizer's update :math:`u_w`, replica :math:`w`
    of :math:`W` takes :math:`p_w \leftarrow p_w + u_w(g_w)`, and after every :math:`H` =
    `sync_every` steps

    .. math::
        p_w &\leftarrow \frac{1}{W} \sum_v p_v && \text{(local SGD, Stich 2019)} \\
        p_w, a &\leftarrow a + \mathrm{outer}\Big(\frac{1}{W} \sum_v (a - p_v)\Big)
            && \text{(with an outer optimizer: DiLoCo, Algorithm 1)}

    where the anchor :math:`a` is what the last outer step gave and :math:`a - p_v` is the
    pseudo-gradient. The steps in between contain no collective. ``outer=optax.sgd(0.7,
    momentum=0.9, nesterov=True)`` is DiLoCo; with ``outer=None`` and a reducer the anchor takes the
    whole step.

    Parameters differ between replicas until they are averaged: under `jax.pmap` and `jax.vmap`
    nothing need be done; under `jax.shard_map` give them a leading axis of replicas and
    ``P(axis_name)``. As an Optax update, an average leaves the parameters within one unit in the
    last place of the mean, because ``p + (mean - p)`` is rounded. `local_sgd_round` sets them
    exactly, takes and returns replicated parameters, has Streaming DiLoCo, and is the better choice
    wherever a whole round can be one call.

    Args:
      inner: The inner optimizer: any Optax transformation. For Adam see `scale_by_local_adam`.
      sync_every: Steps between averages; or an Optax schedule: the length of the round that begins
        after so many steps (rounded, at least 1); or a hierarchy such as ``{"device": 4, ("device",
        "node"): 16}``, where the widest level that is due is averaged.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Steps before this one average the *gradients*, with `reducer`: post-local SGD.
      reducer: A jaxcomp reducer, made for the same `axis_name`: applied to the pseudo-gradients,
        and to the gradients before `start_step`. None averages exactly. Its state begins anew at
        `start_step`, because gradients and pseudo-gradients have different scales; and its own
        ``start_step`` counts averages, so give ``start_step=0`` to compress from the first.
      outer: An Optax optimizer of the pseudo-gradients, with its state in this one's. In a
        hierarchy it and the reducer act at the widest level; narrower ones average parameters.
      average_inner_state: What happens to momenta at an average. False: each replica keeps its
        momenta, as in torch and DiLoCo. True: averaged too. "reset": begun anew; schedules go on.
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
        period does not divide the next; at tracing time, if `params` is missing, the axis is not
        bound, or a gradient was already reduced.

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

    References:
      Stich: Local SGD Converges Fast and Communicates Little. ICLR 2019.
      Lin, Stich, Patel, Jaggi: Don't Use Large Mini-Batches, Use Local SGD. ICLR 2020.
      Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models. 2023.
    """
    made_by = call_text("local_sgd", locals())
    periods = check_periods(sync_every, axis_name, start_step, offset)
    sync = check_sync(axis_name, reducer, outer, average_inner_state)
    if local_axis_name is not None:
        check_known("local_axis_name", local_axis_name, axis_name)
    if not is_transformation(inner):
        raise ValueError(f"`inner` must be an Optax gradient transformation, got {inner!r}.")
    run = _LocalSGD(optax.with_extra_args_support(inner), periods, sync, local_axis_name)
    update = takes_rows(run.update, run.init)
    return Transformation(run.init, update, made_by=made_by, count_bytes=run.count_bytes)


@dataclasses.dataclass(frozen=True)
class _LocalSGD:
    """Checked arguments of `local_sgd`, and its functions."""

    inner: optax.GradientTransformationExtraArgs
    periods: Periods
    sync: Sync
    local_axis_name: AxisName | None

    def init(self, params: PyTree) -> LocalSGDState:
        # A copy, because a training step that donates its state must not see one buffer twice.
        anchor = () if self.sync.plain else jax.tree.map(jnp.copy, params)
        outer, reducer = self.sync.init(make_fragments(params).take(params))
        inner = self.inner.init(params)
        return LocalSGDState.first(
            self.sync.axis_name, inner, anchor=anchor, outer=outer, reducer=reducer
        )

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
        axis_name, start = self.sync.axis_name, self.periods.start_step
        check_gradients(updates, axis_name)
        floating = make_fragments(params)
        gradients, reducer = self._gradients(updates, state, floating, weight)
        inner = as_local(state.inner, axis_name)
        step, inner = self.inner.update(gradients, inner, params, **extra)
        step, inner = as_local((jax.tree.map(_widen, step, params), inner), axis_name)
        state = state._replace(reducer=reducer, inner=inner, owner=owner_id(axis_name))

        count = jnp.asarray(optax.safe_increment(state.count))
        due = self.periods.due(count, state.last_sync)
        last_sync = jnp.where((due > 0) | (count <= start), count, state.last_sync)
        branches = self._branches(floating, params, step, state, weight)
        if start and not self.sync.plain:
            due = jnp.where(count == start, len(branches) - 1, due)
        step, state = switch(due, branches)
        return step, state._replace(count=count, last_sync=last_sync)

    def _gradients(
        self, updates: PyTree, state: LocalSGDState, floating: Fragments, weight: Any
    ) -> tuple[PyTree, PyTree]:
        """The gradients that the inner optimizer sees, and the reducer's state."""
        given = {} if weight is None else {"weight": weight}

        def local() -> tuple[PyTree, PyTree]:
            if self.local_axis_name is None:
                return updates, state.reducer
            mean = allreduce(axis_name=self.local_axis_name)
            return mean.update(updates, optax.EmptyState(), **given)[0], state.reducer

        def everywhere() -> tuple[PyTree, PyTree]:
            gradients = floating.take(updates)
            reduced, reducer = self.sync.reducer.update(gradients, state.reducer, **given)
            return floating.put(updates, reduced), reducer

        if not self.periods.start_step:
            return local()
        started = state.count >= self.periods.start_step
        return switch(started.astype(jnp.int32), [everywhere, local])

    def _branches(
        self, floating: Fragments, params: PyTree, step: PyTree, state: LocalSGDState, weight: Any
    ) -> list[Callable[[], tuple[PyTree, LocalSGDState]]]:
        """What may follow the inner optimizer's step: nothing, each level, the rounds' beginning.

        Args:
          floating: The parameters that are averaged.
          params: All, before the step.
          step: The inner optimizer's.
          state: After it.
          weight: Of this replica; None if all count the same.
        """
        sync, here, moved = self.sync, floating.take(params), floating.take(step)

        def towards(new: PyTree) -> PyTree:
            """The update that leads to `new`; the inner optimizer's for what is not averaged."""
            difference = lambda u, p, q: q.astype(u.dtype) - p.astype(u.dtype)  # noqa: E731
            return floating.put(step, jax.tree.map(difference, moved, here, new))

        def synchronised(axes: AxisName | None) -> tuple[PyTree, LocalSGDState]:
            narrow = sync.plain or axes is not None
            anchor = () if narrow else floating.take(state.anchor)
            own = optax.apply_updates(here, moved)
            new = sync.step(
                anchor,
                Part(own, state.inner, state.outer, state.reducer),
                lambda part: self.inner.init(floating.put(params, part)),
                weight,
                axes=axes,
            )
            after = state._replace(inner=new.inner, outer=new.outer, reducer=new.reducer)
            if not narrow:
                after = after._replace(anchor=floating.put(state.anchor, new.params))
            return towards(new.params), after

        def rounds_begin() -> tuple[PyTree, LocalSGDState]:
            # Replicas are equal here, in all but what the type checker knows: the average proves
            # it. Their result is the anchor, and the reducer begins anew.
            anchor = average(optax.apply_updates(params, step), sync.axis_name)
            part = floating.take(anchor)
            return towards(part), state._replace(anchor=anchor, reducer=sync.init(part)[1])

        narrow = [functools.partial(synchronised, x.axes) for x in self.periods.levels[:-1]]
        branches = [lambda: (step, state), *narrow, lambda: synchronised(None)]
        begins = self.periods.start_step and not sync.plain
        return [*branches, rounds_begin] if begins else branches

    def count_bytes(
        self, params: PyTree, replicas: int | None, step: int | None
    ) -> CompressionStats:
        """What a replica sends in a step, `local_axis_name` left out; see ``bytes``."""
        periods, start = self.periods, self.periods.start_step
        if step is None:
            if periods.schedule is not None:
                raise ValueError(
                    "`sync_every` is a schedule, so there is no cycle of fixed length to average "
                    "over. Pass `step`."
                )
            begin, cycle = max(start, periods.offset), periods.levels[-1].period
            due = periods.between(begin, begin + cycle)
            parts = [self._level_bytes(params, int(level), replicas, None) for level in due]
            return total(params, parts).scaled(1 / cycle)
        if step >= start:
            due = periods.between(start, step + 1)
            nth = int((due[:-1] == due[-1]).sum())
            return total(params, [self._level_bytes(params, int(due[-1]), replicas, nth)])
        parts = [dense_leaves(params)]
        if not self.sync.exact:
            parts = [list(bytes_of(self.sync.reducer, params, replicas, step).leaves)]
        if step == start - 1 and not self.sync.plain:
            parts.append(wide_leaves(params))  # the anchor, of the rounds' beginning
        return total(params, parts)

    def _level_bytes(
        self, params: PyTree, level: int, replicas: int | None, nth: int | None
    ) -> list[LeafStats]:
        """What the average of a level sends; nothing for 0."""
        if not level:
            return []
        averaged = self.sync.average_inner is True
        inner = jax.eval_shape(self.inner.init, params) if averaged else ()
        part, narrow = make_fragments(params).take(params), level < len(self.periods.levels)
        return self.sync.bytes(part, inner, replicas, nth, plain=narrow)


def _widen(step: Array, param: Array) -> Array:
    """An update in the wider of its and its parameter's dtype, as an average gives it."""
    if not jnp.issubdtype(step.dtype, jnp.floating):
        return step
    return step.astype(widest([jnp.asarray(param).dtype], step.dtype))
