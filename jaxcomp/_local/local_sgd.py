"""Local SGD as an Optax transformation: local steps with an inner optimizer, averages now and then.

`periods` decides when replicas synchronise, `sync` does it, and this file makes the steps between.
An Optax transformation returns updates and never sees the parameters that come of them. So an
average is written as the update that leads to it, and which kind of step an update is (local,
synchronised at some level, the first of the rounds) is chosen by a conditional on the count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_transformation
from jaxcomp._base.leaves import is_floating, widest
from jaxcomp._base.stats import CompressionStats, dense_stats
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import numbered, part_of, put_back
from jaxcomp._local.periods import Periods, SyncEvery, check_known, check_periods
from jaxcomp._local.sync import (
    AverageInnerState,
    LocalSGDState,
    Sync,
    average,
    check_sync,
    payload,
    wide_stats,
)
from jaxcomp._mesh.collectives import (
    as_local,
    axis_tuple,
    branch_at_step,
    owner_id,
    switch,
    unbound_axis,
)
from jaxcomp._mesh.weights import refuse_misspelt_weight
from jaxcomp._reducers.allreduce import allreduce
from jaxcomp._reducers.reducer import check_averaged, check_class, check_gradients
from jaxcomp._reducers.transformation import Transformation, shows_its_call


@shows_its_call
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
    r"""Takes local steps on each replica, and averages parameters every `sync_every` steps.

    With local gradient :math:`g_w` and the inner optimizer's update :math:`u_w`, replica :math:`w`
    of :math:`W` takes :math:`p_w \leftarrow p_w + u_w(g_w)`, and after every :math:`H` =
    `sync_every` steps

    .. math::
        p_w &\leftarrow \frac{1}{W} \sum_v p_v && \text{(local SGD, Stich 2019)} \\
        p_w, a &\leftarrow a + \mathrm{outer}\Big(\frac{1}{W} \sum_v (a - p_v)\Big)
            && \text{(with an outer optimizer: DiLoCo, Algorithm 1)}

    where the anchor :math:`a` is the result of the last outer step and :math:`a - p_v` is the
    pseudo-gradient. The steps in between have no collective. DiLoCo is
    ``outer=optax.sgd(0.7, momentum=0.9, nesterov=True)``. With ``outer=None`` and a reducer the
    anchor moves by the mean pseudo-gradient.

    Parameters differ between replicas until they are averaged. Under `jax.shard_map` give them a
    leading axis of replicas and ``P(axis_name)``; under `jax.pmap` and `jax.vmap` nothing changes.
    As an Optax update, an average leaves the parameters within one unit in the last place of the
    mean, because ``p + (mean - p)`` is rounded. `local_sgd_round` sets them exactly, takes and
    returns replicated parameters, and has Streaming DiLoCo. It is the better choice if a whole
    round can be one call.

    Args:
      inner: The inner optimizer: any Optax transformation. For Adam see `scale_by_local_adam`.
      sync_every: Number of steps between averages. Or an Optax schedule, which maps the number of
        steps taken to the length of the next round (rounded, at least 1). Or a hierarchy such as
        ``{"device": 4, ("device", "node"): 16}``, in which the widest level that is due is
        averaged.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Number of steps that first average the *gradients* with `reducer` (post-local
        SGD).
      reducer: A jaxcomp reducer with the same `axis_name`. It averages the pseudo-gradients, and
        before `start_step` the gradients. None averages exactly. Its state is reset at
        `start_step`, because gradients and pseudo-gradients have different scales. The reducer's
        own ``start_step`` counts averages; 0 compresses from the first average on.
      outer: An Optax optimizer of the pseudo-gradients; its state is part of this state. In a
        hierarchy, `outer` and `reducer` act at the widest level; narrower levels average
        parameters.
      average_inner_state: What an average does to momenta. False: each replica keeps its momenta,
        as in torch and DiLoCo. True: momenta are averaged too. "reset": momenta start from their
        initial values; the counts of schedules are kept.
      offset: After `start_step`, updates number ``offset + k * sync_every`` (counted from 1) end
        with an average. None takes ``offset=start_step``, so that a whole round precedes the first
        average. For torch's ``PeriodicModelAverager``, which averages on the first step after its
        warm-up, pass ``offset=start_step + 1``; for its ``HierarchicalModelAverager``,
        ``offset=1``.
      local_axis_name: Axes along which gradients are averaged in every step, also after
        `start_step`, as with torch's ``PostLocalSGDState(subgroup=...)``: for a fast network inside
        a node.

    Returns:
      A transformation from local gradients to this replica's updates. ``update`` needs `params`.
      ``update(..., weight=w)`` sets this replica's weight in all averages of that step; with 0 the
      replica is ignored in them. The state is a `LocalSGDState`.

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
    periods = check_periods(sync_every, axis_name, start_step, offset)
    sync = check_sync(axis_name, reducer, outer, average_inner_state)
    if local_axis_name is not None:
        check_known("local_axis_name", local_axis_name, axis_name)
    check_transformation("inner", inner)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> LocalSGDState:
        """Makes the state before the first step."""
        # Leaves that are not floating are not averaged, so neither reducer nor anchor has them.
        part = part_of(params, numbered(params))
        anchor = ()
        if not sync.plain:
            # A copy, because a training step that donates its state must not get one buffer twice.
            anchor = jax.tree.map(jnp.copy, part)
        outer, reducer = sync.init(part)
        inner = optimizer.init(params)
        return LocalSGDState.first(axis_name, inner, anchor=anchor, outer=outer, reducer=reducer)

    def averaged_at_first(
        updates: PyTree, state: LocalSGDState, numbers: PyTree, weight: Any
    ) -> tuple[PyTree, PyTree]:
        """Returns the gradients for the inner optimizer, and the reducer's state."""

        def local() -> tuple[PyTree, PyTree]:
            if local_axis_name is None:
                return updates, state.reducer
            mean = allreduce(axis_name=local_axis_name)
            means, _ = mean.update(updates, optax.EmptyState(), weight=weight)
            return means, state.reducer

        def everywhere() -> tuple[PyTree, PyTree]:
            floating = part_of(updates, numbers)
            means, reducer = sync.reducer.update(floating, state.reducer, weight=weight)
            check_averaged(means, axis_name)
            return put_back(means, updates), reducer

        return branch_at_step(state.count, periods.start_step, everywhere, local)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, LocalSGDState]:
        """Takes the inner optimizer's step, and the average that is due after it."""
        if params is None:
            raise ValueError(
                "local_sgd averages parameters, so its update needs them: "
                "tx.update(grads, state, params)."
            )
        check_class(state, LocalSGDState)
        refuse_misspelt_weight(extra)
        check_gradients(updates, params, axis_name)
        numbers = numbered(params)
        gradients, reducer = averaged_at_first(updates, state, numbers, weight)
        # Local before and after, because a loop under check_vma=True must carry a constant type.
        inner = as_local(state.inner, axis_name)
        updates, inner = optimizer.update(gradients, inner, params, **extra)
        updates = jax.tree.map(_widened, updates, params)
        updates, inner = as_local((updates, inner), axis_name)
        state = state._replace(reducer=reducer, inner=inner, owner=owner_id(axis_name))

        before = part_of(params, numbers)
        floating = part_of(updates, numbers)
        after = optax.apply_updates(before, floating)

        def towards(new: PyTree) -> PyTree:
            """Returns the update that leads to `new`; other leaves keep the inner update."""
            return put_back(jax.tree.map(_difference, floating, before, new), updates)

        def synchronised(axes: AxisName) -> tuple[PyTree, LocalSGDState]:
            new, changed = sync.step(after, state, optimizer.init, params, weight, axes)
            return towards(new), changed

        def rounds_begun() -> tuple[PyTree, LocalSGDState]:
            # Parameters are equal on all replicas here, but JAX does not know it; the average gives
            # them a replicated type. They are the first anchor, and the reducer's state is reset.
            anchor = average(after, axis_name)
            return towards(anchor), state._replace(anchor=anchor, reducer=sync.init(anchor)[1])

        count = jnp.asarray(optax.safe_increment(state.count))
        due = periods.due(count, state.last_sync)
        # Before `start_step` the gradients are averaged, and so the parameters stay equal.
        shared = (due > 0) | (count <= periods.start_step)
        last_sync = jnp.where(shared, count, state.last_sync)
        branches: list[Callable[[], tuple[PyTree, LocalSGDState]]] = [lambda: (updates, state)]
        for level in periods.levels:
            branches.append(functools.partial(synchronised, level.axes))
        if periods.start_step and not sync.plain:
            due = jnp.where(count == periods.start_step, len(branches), due)
            branches.append(rounds_begun)
        updates, state = switch(due, branches)
        return updates, state._replace(count=count, last_sync=last_sync)

    sends = functools.partial(_count_bytes, optimizer, sync, periods)
    return Transformation(init, update, count_bytes=sends)


def _count_bytes(
    optimizer: optax.GradientTransformationExtraArgs,
    sync: Sync,
    periods: Periods,
    params: PyTree,
    replicas: int | None,
    step: int | None,
) -> CompressionStats:
    """Counts the bytes of a step of `local_sgd`, without those over its `local_axis_name`.

    Raises:
      ValueError: If the bytes are not known.
    """
    shapes, treedef = jax.tree.flatten(jax.eval_shape(optax.tree.zeros_like, params))
    if _sends_something(optimizer, sync.axis_name, treedef, tuple(shapes)):
        raise ValueError(
            "`inner` sends something in every step, which is not counted here: the inner "
            "optimizer should take local steps. Take the reducer out of its chain and pass it "
            "as reducer=, or the axis that it averages over as local_axis_name=."
        )
    start = periods.start_step
    part = part_of(params, numbered(params))

    def averages(level: int, nth: int | None) -> CompressionStats:
        if not level:
            return CompressionStats(())
        narrow = level < len(periods.levels)
        return sync.bytes(part, replicas, nth, optimizer.init, params, plain=narrow)

    if step is None:
        if periods.schedule is not None:
            raise ValueError(
                "`sync_every` is a schedule, so there is no cycle of fixed length to average "
                "over. Pass `step`."
            )
        cycle = periods.levels[-1].period  # a multiple of all other periods
        sent = [averages(level, None) for level in periods.between(start, start + cycle)]
        return payload(params, sent).scaled(1 / cycle)
    if step >= start:
        *earlier, level = periods.between(start, step + 1)
        return payload(params, [averages(level, earlier.count(level))])
    if sync.uncompressed:
        sent = [dense_stats(params)]
    else:
        sent = [sync.reducer.bytes(params, replicas=replicas, step=step)]
    if step == start - 1 and not sync.plain:
        sent.append(wide_stats(params))  # the first anchor
    return payload(params, sent)


@functools.lru_cache  # called for every step of a run
def _sends_something(
    inner: Any, axis_name: AxisName, treedef: Any, shapes: tuple[Any, ...]
) -> bool:
    """Returns whether an inner optimizer has collectives over these axes, as a reducer has.

    Raises:
      ValueError: If the optimizer does not run on gradients, state and parameters alone.
    """
    params = treedef.unflatten(shapes)
    state = jax.eval_shape(inner.init, params)
    axes = list(axis_tuple(axis_name))
    step = None
    while step is None:
        # The length of an axis does not matter for whether there is a collective.
        trace = jax.make_jaxpr(inner.update, axis_env=[(name, 2) for name in axes])
        try:
            # Adam does not run under strict promotion, and dtypes do not matter here.
            with jax.numpy_dtype_promotion("standard"):
                step = trace(params, state, params)
        except (NameError, TypeError, ValueError) as error:
            other = unbound_axis(error)
            if other is None or other in axes:
                raise ValueError(
                    "`bytes` cannot find out what `inner` sends, because `inner` fails with "
                    f"gradients, state and parameters as its only arguments: {error}"
                ) from error
            axes.append(other)  # collectives over it are not counted
    for equation in _equations(step):
        names = equation.params.get("axes", equation.params.get("axis_name", ()))
        # These name an axis, but send nothing.
        asks = equation.primitive.name in ("axis_index", "pvary")
        if not asks and not set(axis_tuple(axis_name)).isdisjoint(axis_tuple(names)):
            return True
    return False


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and those of the jaxprs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params):
            if hasattr(value, "eqns"):
                yield from _equations(value)


def _difference(update: Array, param: Array, new: Array) -> Array:
    return new.astype(update.dtype) - jnp.asarray(param, update.dtype)


def _widened(update: Array, param: Array) -> Array:
    """Casts an update to the wider dtype of the update and its parameter, like an average."""
    if not is_floating(update):
        return update
    return update.astype(widest([jnp.asarray(param).dtype], update.dtype))
