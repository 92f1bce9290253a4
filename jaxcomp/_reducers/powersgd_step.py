"""One update of PowerSGD, from the gradients' tree to outputs and the new state.

`Step` has the arithmetic on the leaves of a tree, and reads from top to bottom: add the residual,
agree on factors (`powersgd_factors`), rebuild, keep what was not sent.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._lowrank.grouped import Grouped
from jaxcomp._lowrank.stacks import Stacks
from jaxcomp._mesh.axes import axis_tuple, compiler_found, mapped_mesh_axes, other_axes
from jaxcomp._mesh.collectives import reduce_mean
from jaxcomp._mesh.per_replica import this_replica
from jaxcomp._mesh.weights import Weight, weighted_mean
from jaxcomp._reducers.buckets import in_buckets
from jaxcomp._reducers.contract import CountBytes, Reducer, Reduction
from jaxcomp._reducers.opening import all_finite, nan_unless, open_step
from jaxcomp._reducers.powersgd_factors import (
    Agreed,
    Agreement,
    Factors,
    Given,
    Leaves,
    agree,
    places,
    reweighed,
    sorted_by,
)
from jaxcomp._reducers.powersgd_state import (
    Memory,
    Options,
    Phase,
    PowerSGDState,
    Turn,
    fitted_memory,
    initial_state,
    state_of,
)


def reducer(options: Options, made_by: str, count_bytes: CountBytes) -> Reducer:
    """The transformation with these arguments."""
    init = functools.partial(initial_state, options)

    def update(
        updates: PyTree,
        state: PowerSGDState,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PowerSGDState]:
        del params, extra_args
        result = _reduce(options, updates, state, weight, want_sent=False)
        return result.updates, result.state

    def reduce(
        updates: PyTree,
        state: PowerSGDState,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> Reduction:
        del params, extra_args
        return _reduce(options, updates, state, weight, want_sent=True)

    return Reducer(
        init, reduce, options.axis_name, update=update, made_by=made_by, count_bytes=count_bytes
    )


def _reduce(
    options: Options,
    updates: PyTree,
    state: PowerSGDState,
    weight: Any,
    *,
    want_sent: bool,
) -> Reduction:
    opened = open_step(updates, options.axis_name, options.reduce_first, weight)
    gradients = opened.tree(opened.arrays)
    plans = options.plan(gradients)
    memory = fitted_memory(options, plans, gradients, state)
    leaves = Leaves(
        options,
        plans,
        [i for i in opened.positions if plans[i].view is not None],
        [i for i in opened.positions if plans[i].view is None],
        options.wire_dtype(x.dtype for x in opened.arrays),
    )
    step = Step(
        leaves,
        want_sent,
        jnp.array(True),
        [] if options.buckets is None else in_buckets(gradients, options.buckets),
        None,
    )
    result = step.run(opened.leaves, memory, state.count, opened.weight)
    count = jnp.where(result.finite, optax.safe_increment(state.count), state.count)
    commit = result.finite & (state.count >= options.start_step)
    kept = isinstance(state.owner, tuple)  # of a state that was made without
    owner = () if kept else jnp.where(commit, this_replica(options.axis_name), state.owner)
    new = state_of(options, opened.treedef, count, result.memory, owner)
    return opened.close(result.outputs, new, result.finite, sent=result.sent if want_sent else None)


class Result(NamedTuple):
    """One update of the leaves that are averaged."""

    outputs: list[Array]  # of the leaves that are averaged, in their order
    memory: Memory
    finite: Array  # bool scalar
    sent: list[Array]  # like outputs: this replica's own part of them; empty unless wanted


class _Rebuilt(NamedTuple):
    outputs: list[Array]
    sent: list[Array]
    finite: Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One update of a given tree.

    Only two things depend on the count through a conditional: the factors and, built from them, the
    outputs. Whatever passes through a conditional is copied, so that the sums of gradient and
    residual only go in, and the residual stays outside and is updated in place (but for that of a
    stack, which is a copy).
    """

    leaves: Leaves
    want_sent: bool
    ours: Array  # bool scalar: whether the residual is this replica's; if not, it is left out
    buckets: list[list[int]]  # positions of what is sent together, in this order; []: of all
    turn: Turn | None = None  # None: the count decides, in a conditional

    @property
    def options(self) -> Options:
        """The reducer's arguments."""
        return self.leaves.options

    def run(
        self, values: list[Array], memory: Memory, count: Array, weight: Weight | None
    ) -> Result:
        """An exact average before `start_step`, a compressed one from then on.

        Args:
          values: Gradients, of all leaves.
          memory: Of all leaves.
          count: Updates before this one; int32 scalar.
          weight: Of this replica in the mean; None for equal ones.
        """
        arguments = values, memory, count, weight
        # Both forms for GPUs take arrays whole, not such as may be sharded along an automatic axis.
        if not (self.leaves.chosen and compiler_found()) or other_axes():
            return self._run(*arguments)
        on_gpus = self._run_stacked
        # The kernels have no rule for a `jax.vmap` over replicas.
        mapped = set(axis_tuple(self.options.axis_name)) <= set(mapped_mesh_axes())
        if self.options.gpu_kernels and mapped:
            on_gpus = self.with_kernels(Grouped())._run
        return lax.platform_dependent(*arguments, cuda=on_gpus, default=self._run)

    def with_kernels(self, kernels: Grouped) -> Step:
        """The same update with the kernels for GPUs."""
        leaves = dataclasses.replace(self.leaves, kernels=kernels)
        return dataclasses.replace(self, leaves=leaves)

    def _run_stacked(
        self, values: list[Array], memory: Memory, count: Array, weight: Weight | None
    ) -> Result:
        """`_run` with the small leaves of one shape as one leaf."""
        leaves = self.leaves
        apart = [[bucket[k] for k in places(bucket, leaves.chosen)] for bucket in self.buckets]
        stacks = Stacks.of(leaves.plans, apart or [leaves.chosen], memory.residual)
        fewer = dataclasses.replace(
            leaves,
            stacks=stacks,
            plans=stacks.plans(leaves.plans),
            chosen=stacks.left(leaves.chosen),
        )
        buckets = [stacks.left(bucket) for bucket in self.buckets]
        step = dataclasses.replace(self, leaves=fewer, buckets=buckets)
        stacked = Memory(*map(stacks.stack, memory))
        result = step._run(stacks.stack(values), stacked, count, weight)

        def averaged(found: list[Array]) -> list[Array]:
            at = dict(zip(sorted(fewer.chosen + fewer.dense), found, strict=True))
            each = stacks.unstack([at.get(i) for i in range(len(values))])
            return [each[i] for i in sorted(leaves.chosen + leaves.dense)]

        return result._replace(
            outputs=averaged(result.outputs),
            memory=Memory(*map(stacks.unstack, result.memory)),
            sent=averaged(result.sent) if result.sent else [],
        )

    def _run(
        self, values: list[Array], memory: Memory, count: Array, weight: Weight | None
    ) -> Result:
        leaves, options, phase = self.leaves, self.options, Phase(self.options, self.turn, count)
        totals, left = self._totals_and_left(values, memory, phase)
        dense = [values[i] for i in leaves.dense]
        gradients = [values[i] for i in leaves.chosen]
        evenly = options.repays_evenly(weight)
        told = evenly and options.warm_start  # by the length of the factors
        last = _norm([memory.q[i] for i in leaves.chosen]) if told else None
        given = Given(totals, gradients, left, dense, memory, phase, weight, last)
        agreed = phase.exact_or(
            lambda: Agreement(leaves).nothing(dense), lambda: agree(leaves, self.buckets, given)
        )
        outputs, sent, finite = phase.exact_or(
            lambda: self._plain(totals, dense, weight), lambda: self._rebuilt(agreed, weight)
        )
        started = phase.started
        commit = finite if started is None else finite & started
        new = Memory(*(list(field) for field in memory))
        if options.alternating:
            is_left = phase.is_left
            self._replace(new.p, commit & is_left, agreed.means.p)
            self._replace(new.q, commit & ~is_left, agreed.means.q)
        elif options.warm_start:
            q = agreed.means.q
            if evenly:  # the length is free: of factors only the span is used again
                scale = agreed.mean_weight / _norm(q)
                q = [x * jnp.where(jnp.isfinite(scale), scale, 1).astype(x.dtype) for x in q]
            self._replace(new.q, commit, q)
        if options.error_feedback:
            if evenly:
                totals = reweighed(totals, gradients, weight.own / agreed.mean_weight)
            residual = self._unsent(agreed.own, totals, memory.residual, commit, phase)
            for i, x in zip(leaves.chosen, residual, strict=True):
                new.residual[i] = x
        return Result(leaves.in_order(outputs), new, finite, leaves.in_order(sent))

    def _totals_and_left(
        self, values: list[Array], memory: Memory, phase: Phase
    ) -> tuple[list[Array], list[Array] | None]:
        """Gradients plus residuals; where one kernel makes both, left factors from them too.

        Those kernels run before `start_step` as well, for nothing: a conditional around them would
        copy the sums, which are as large as the gradients.
        """
        leaves, options = self.leaves, self.options
        if not (leaves.kernels and options.error_feedback) or options.alternating:
            return self._totals(values, memory.residual, phase), None
        added, _ = phase.feedback(self.ours)
        scale = jnp.asarray(1 if added is None else added, jnp.float32)
        scale = jnp.where(self._adds(phase), scale, 0)
        bases, views = leaves.right_bases(memory, phase), leaves.views
        order: list[int] = []
        totals: list[Array] = []
        left: list[Array] = []
        # A kernel takes many leaves, and waits for the last of their gradients.
        for bucket in self.buckets or [leaves.chosen]:
            own = places(leaves.chosen, bucket)
            sums, products = leaves.kernels.add_and_multiply(
                [views[k] for k in own],
                [values[leaves.chosen[k]] for k in own],
                [memory.residual[leaves.chosen[k]] for k in own],
                scale,
                [bases[k] for k in own],
            )
            order, totals, left = order + own, totals + sums, left + products
        return sorted_by(order, totals), sorted_by(order, left)

    def _totals(self, values: list[Array], residual: list[Any], phase: Phase) -> list[Array]:
        """Gradient plus what the residual adds, in the leaf's shape and the compute dtype."""
        (added, _), adds = phase.feedback(self.ours), self._adds(phase)
        totals = []
        for i in self.leaves.chosen:
            value = values[i].astype(compute_dtype(values[i].dtype))
            if self.options.error_feedback:
                extra = residual[i].astype(value.dtype)
                extra = extra if added is None else jnp.asarray(added, value.dtype) * extra
                value += jnp.where(adds, extra, 0)
            totals.append(value)
        return totals

    def _adds(self, phase: Phase) -> Array:
        """Bool scalar: whether the residual is added."""
        return self.ours if phase.started is None else phase.started & self.ours

    def _plain(self, totals: list[Array], dense: list[Array], weight: Weight | None) -> _Rebuilt:
        """Exact averages, in one all-reduce. Before `start_step` the sums are the gradients."""
        gradients = [x.astype(dtype) for x, dtype in zip(totals, self.leaves.dtypes, strict=True)]
        axis_name, wire = self.options.axis_name, self.leaves.wire
        exact = functools.partial(reduce_mean, axis_name=axis_name, wire_dtype=wire)
        parts = [*gradients, *dense]
        if weight is None:
            reduced = exact(parts)
        else:
            reduced, _ = weighted_mean(exact, parts, weight, axis_name, wire)
        sent = reduced.sent if self.want_sent else []
        return _Rebuilt(nan_unless(reduced.finite, reduced.means), sent, reduced.finite)

    def _rebuilt(self, agreed: Agreed, weight: Weight | None) -> _Rebuilt:
        """Outputs from the factors."""
        means, finite = agreed.means, agreed.finite
        half = jnp.dtype(jnp.float16) in self.leaves.dtypes
        # A float16 output can overflow where its factors did not.
        outputs = self._products(means, None if half else finite)
        if half:
            finite &= all_finite([x for x in outputs if x.dtype == jnp.float16])
            outputs = nan_unless(finite, outputs)
        sent = []
        if self.want_sent:
            own = agreed.own
            if self.options.repays_evenly(weight):  # as before it was weighed
                scale = jnp.where(weight.own > 0, agreed.mean_weight / weight.own, 0)
                own = own._replace(q=[x * scale.astype(x.dtype) for x in own.q])
            sent = [*self._products(own), *agreed.dense_sent]
        dense = self.leaves.arithmetic.where(finite, agreed.dense, None)
        return _Rebuilt([*outputs, *dense], sent, finite)

    def _products(self, factors: Factors, finite: Array | None = None) -> list[Array]:
        """``P Q^T`` in the shape and dtype of every compressed leaf; NaN unless `finite`."""
        leaves = self.leaves
        return leaves.arithmetic.outer(leaves.views, *factors, leaves.dtypes, finite)

    def _replace(self, olds: list[Any], flag: Array, news: list[Array]) -> None:
        """Puts the factors of the compressed leaves into a list for all leaves, if `flag`."""
        before = [olds[i] for i in self.leaves.chosen]
        news = [x.astype(old.dtype) for x, old in zip(news, before, strict=True)]
        after = self.leaves.arithmetic.where(flag, news, before)
        for i, x in zip(self.leaves.chosen, after, strict=True):
            olds[i] = x

    def _unsent(
        self, own: Factors, totals: list[Array], residual: list[Any], commit: Array, phase: Phase
    ) -> list[Array]:
        """The new residuals: what was not sent, in the place of the old ones."""
        _, kept = phase.feedback(self.ours)

        def unsent(product: Array, total: Array, old: Array) -> Array:
            lost = total - product
            if kept is not None:
                lost = lost + kept.astype(lost.dtype) * old.astype(lost.dtype)
            return jnp.where(commit, lost.astype(old.dtype), old)

        leaves, olds = self.leaves, [residual[i] for i in self.leaves.chosen]
        return leaves.arithmetic.unsent(leaves.views, *own, totals, olds, commit, kept, unsent)


def _norm(factors: list[Array]) -> Array:
    """Of all values together; float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in factors]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.ones([], jnp.float32)
