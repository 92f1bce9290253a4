"""The arithmetic of one PowerSGD update, on the leaves of a tree.

`Step.run` reads from top to bottom: add the residual, agree on factors, rebuild, keep what was not
sent. The factors take two all-reduces with an orthogonalisation in between, or one if alternating.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._base.leaves import compute_dtype, widest
from jaxcomp._base.typing import Array, AxisName, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matricize import LeafPlan, MatrixView, plan_leaves
from jaxcomp._lowrank.orthogonalize import map_by_shape, orthogonalize
from jaxcomp._lowrank.products import outer, replace_by_product, times_q, transposed_times_p
from jaxcomp._mesh.axes import as_local, axis_size, from_step
from jaxcomp._mesh.collectives import Reduced, reduce_mean
from jaxcomp._reducers.contract import all_finite
from jaxcomp._reducers.int8_factors import reduce_int8
from jaxcomp._reducers.opening import nan_unless


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked arguments of `powersgd`, which documents them."""

    rank: int | RankFn
    axis_name: AxisName
    start_step: int
    min_compression_rate: float
    error_feedback: bool
    warm_start: bool
    eps: Any
    seed: Any
    comm_dtype: Any
    residual_dtype: Any
    matrix_dims: MatrixDimsFn | None
    error_decay: Any
    feedback_every: int
    reduce_first: AxisName | None
    alternating: bool

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        """What happens to each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    @property
    def int8_factors(self) -> bool:
        """Whether factors travel as integers; the rest then goes as without a `comm_dtype`."""
        return self.comm_dtype == jnp.dtype(jnp.int8)

    def wire_dtype(self, dtypes: Iterable[Any]) -> Any:
        """What goes on the wire for gradients of these dtypes, in an all-reduce."""
        if self.comm_dtype is None or self.int8_factors:
            return widest(dtypes)
        return self.comm_dtype


class Memory(NamedTuple):
    """What is remembered of every leaf, in flattening order; a masked node where nothing is."""

    residual: list[Any]
    q: list[Any]
    p: list[Any]  # all masked unless alternating


class Result(NamedTuple):
    """One update of the leaves that are averaged."""

    outputs: list[Array]  # of the leaves that are averaged, in their order
    memory: Memory
    finite: Array  # bool scalar
    sent: list[Array]  # like outputs: this replica's own part of them; empty unless wanted


class _Factors(NamedTuple):
    """Left and right factors of the compressed leaves: their products are the leaves' values."""

    p: list[Array]
    q: list[Array]


class _Agreed(NamedTuple):
    """What the replicas agreed on in a compressed update; no array of it is as large as a leaf."""

    means: _Factors  # of the outputs
    own: _Factors  # of what this replica sent
    dense: list[Array]  # averages of the leaves that are not compressed
    dense_sent: list[Array]
    finite: Array  # bool scalar


class _Rebuilt(NamedTuple):
    outputs: list[Array]
    sent: list[Array]
    finite: Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One update of a given tree: which leaves take which way.

    Only two things depend on the count through a conditional: the factors and, built from them, the
    outputs. Whatever passes through a conditional is copied, so that the sums of gradient and
    residual only go in, and the residual stays outside and is updated in place.
    """

    options: Options
    chosen: list[int]  # positions of the compressed leaves
    dense: list[int]  # positions of the leaves that are averaged as they are
    plans: list[LeafPlan]
    wire: Any
    want_sent: bool

    def run(self, leaves: list[Array], memory: Memory, count: Array) -> Result:
        """An exact average before `start_step`, a compressed one from then on."""
        options = self.options
        started = None if options.start_step == 0 else count >= options.start_step
        totals = self._totals(leaves, memory.residual, count, started)
        dense = [leaves[i] for i in self.dense]
        left_turn = (count - options.start_step) % 2 == 0

        def factors() -> _Agreed:
            if not options.alternating:
                return self._two_sided(totals, dense, memory, count)
            return lax.cond(
                left_turn,
                lambda: self._one_sided(totals, dense, memory.q, left=True),
                lambda: self._one_sided(totals, dense, memory.p, left=False),
            )

        switch = functools.partial(from_step, count, options.start_step)
        agreed = switch(lambda: self._nothing(dense), factors)
        outputs, sent, finite = switch(
            lambda: self._plain(totals, dense), lambda: self._rebuilt(agreed)
        )
        commit = finite if started is None else finite & started
        new = Memory(*(list(field) for field in memory))
        for k, i in enumerate(self.chosen):
            if options.alternating:
                new.p[i] = _replaced_if(commit & left_turn, memory.p[i], agreed.means.p[k])
                new.q[i] = _replaced_if(commit & ~left_turn, memory.q[i], agreed.means.q[k])
            elif options.warm_start:
                new.q[i] = _replaced_if(commit, memory.q[i], agreed.means.q[k])
        if options.error_feedback:
            _, kept = self._feedback(count)

            def unsent(own: Array, total: Array, old: Array) -> Array:
                lost = total - own
                if kept is not None:
                    lost = lost + kept.astype(lost.dtype) * old.astype(lost.dtype)
                return _replaced_if(commit, old, lost)

            zipped = zip(self.chosen, self._views(), *agreed.own, totals, strict=True)
            for i, view, p, q, total in zipped:
                new.residual[i] = replace_by_product(view, p, q, total, memory.residual[i], unsent)
        return Result(self._in_order(outputs), new, finite, self._in_order(sent))

    def _two_sided(
        self, totals: list[Array], dense: list[Array], memory: Memory, count: Array
    ) -> _Agreed:
        """Left factors, an all-reduce, right factors, another one."""
        options, views, n = self.options, self._views(), len(totals)
        starts = memory.q
        if not options.warm_start:
            starts = {i: random_q(options, self.plans[i], i, count) for i in self.chosen}
        bases = self._bases(self._beside(totals, starts), options.eps)
        left = [times_q(v, m, b) for v, m, b in zip(views, totals, bases, strict=True)]
        first = self._reduce([*left, *dense], thin=n)

        # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands
        # in for torch's sum; dividing eps too leaves the quotient unchanged.
        mean_left = [jnp.where(first.finite, x, 0) for x in first.means[:n]]
        p = self._bases(mean_left, options.eps / axis_size(options.axis_name))
        right = [transposed_times_p(v, m, x) for v, m, x in zip(views, totals, p, strict=True)]
        second = self._reduce(right, thin=n)
        return self._agreed(
            _Factors(p, second.means),
            _Factors(p, second.sent),
            first,
            first.finite & second.finite,
        )

    def _one_sided(
        self, totals: list[Array], dense: list[Array], others: list[Any], left: bool
    ) -> _Agreed:
        """Factors of one side from those of the other, in one all-reduce."""
        product, n = times_q if left else transposed_times_p, len(totals)
        bases = self._bases(self._beside(totals, others), self.options.eps)
        own = [product(v, m, b) for v, m, b in zip(self._views(), totals, bases, strict=True)]
        reduced = self._reduce([*own, *dense], thin=n)
        pairs = [(x, bases) if left else (bases, x) for x in (reduced.means[:n], reduced.sent[:n])]
        means, sent = (_Factors(*pair) for pair in pairs)
        return self._agreed(means, sent, reduced, reduced.finite)

    def _nothing(self, dense: list[Array]) -> _Agreed:
        """Zeros in the place of what a compressed update would agree on."""
        plans = [self.plans[i] for i in self.chosen]
        zeros = _Factors(
            [jnp.zeros(plan.p_shape, compute_dtype(plan.dtype)) for plan in plans],
            [jnp.zeros(plan.q_shape, compute_dtype(plan.dtype)) for plan in plans],
        )
        blank = [jnp.zeros(x.shape, x.dtype) for x in dense]
        return self._agreed(zeros, zeros, Reduced(blank, blank, jnp.array(True)), jnp.array(True))

    def _agreed(self, means: _Factors, own: _Factors, first: Reduced, finite: Array) -> _Agreed:
        n = len(self.dense)
        # One type for all branches, also for a factor that is the same on every replica.
        own, sent = as_local((own, first.sent[len(first.sent) - n :]), self.options.axis_name)
        return _Agreed(means, own, first.means[len(first.means) - n :], sent, finite)

    def _rebuilt(self, agreed: _Agreed) -> _Rebuilt:
        """Outputs from the factors."""
        dtypes = [self.plans[i].dtype for i in self.chosen]
        means, finite = agreed.means, agreed.finite
        half = jnp.dtype(jnp.float16) in dtypes
        if not half:
            # One NaN in a row of a factor is NaN in the whole row of the product: no second look
            # at what is as large as the gradients.
            means = means._replace(p=nan_unless(finite, means.p))
        products = zip(self._products(means), dtypes, strict=True)
        outputs = [x.astype(dtype) for x, dtype in products]
        if half:
            # A float16 output can overflow where its factors did not.
            finite &= all_finite([x for x in outputs if x.dtype == jnp.float16])
            outputs = nan_unless(finite, outputs)
        sent = []
        if self.want_sent:
            products = zip(self._products(agreed.own), dtypes, strict=True)
            sent = [*(x.astype(dtype) for x, dtype in products), *agreed.dense_sent]
        return _Rebuilt([*outputs, *nan_unless(finite, agreed.dense)], sent, finite)

    def _plain(self, totals: list[Array], dense: list[Array]) -> _Rebuilt:
        """Exact averages, in one all-reduce. Before `start_step` the sums are the gradients."""
        gradients = [
            x.astype(self.plans[i].dtype) for i, x in zip(self.chosen, totals, strict=True)
        ]
        reduced = reduce_mean([*gradients, *dense], self.options.axis_name, self.wire)
        sent = reduced.sent if self.want_sent else []
        return _Rebuilt(nan_unless(reduced.finite, reduced.means), sent, reduced.finite)

    def _totals(
        self, leaves: list[Array], residual: list[Any], count: Array, started: Array | None
    ) -> list[Array]:
        """Gradient plus what the residual adds, in the leaf's shape and the compute dtype."""
        added, _ = self._feedback(count)
        totals = []
        for i in self.chosen:
            value = leaves[i].astype(compute_dtype(leaves[i].dtype))
            if self.options.error_feedback:
                extra = residual[i].astype(value.dtype)
                extra = extra if added is None else jnp.asarray(added, value.dtype) * extra
                value += extra if started is None else jnp.where(started, extra, 0)
            totals.append(value)
        return totals

    def _feedback(self, count: Array) -> tuple[Any, Any]:
        """By what the residual is multiplied as it is added, and as it is kept; None: 1 and 0."""
        decay, every = self.options.error_decay, self.options.feedback_every
        added: Any = decay(count) if callable(decay) else decay
        if every > 1:
            due = (count + 1) % every == 0
            return jnp.where(due, added, 0.0), jnp.where(due, 0.0, 1.0)
        return (None if isinstance(added, (int, float)) and added == 1 else added), None

    def _reduce(self, parts: list[Array], *, thin: int) -> Reduced:
        if self.options.int8_factors:
            return reduce_int8(parts, self.options.axis_name, thin=thin)
        return reduce_mean(parts, self.options.axis_name, self.wire, thin=thin)

    def _bases(self, factors: Sequence[Array], eps: Any) -> list[Array]:
        return map_by_shape(lambda x: orthogonalize(x, eps), factors)

    def _beside(self, totals: list[Array], factors: Any) -> list[Array]:
        """The remembered factors of the compressed leaves, by position, in the compute dtype."""
        return [factors[i].astype(x.dtype) for i, x in zip(self.chosen, totals, strict=True)]

    def _products(self, factors: _Factors) -> list[Array]:
        """``P Q^T`` in the leaf's shape, of every compressed leaf."""
        return [outer(v, p, q) for v, p, q in zip(self._views(), *factors, strict=True)]

    def _in_order(self, values: Sequence[Array]) -> list[Array]:
        """From the compressed leaves and then the others to the order of the leaves."""
        pairs = zip(self.chosen + self.dense, values, strict=True) if values else ()
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]

    def _views(self) -> list[MatrixView]:
        return [view for i in self.chosen if (view := self.plans[i].view) is not None]


def random_q(options: Options, plan: LeafPlan, index: int, count: Array | int) -> Array:
    """A right factor to start from: the same on every replica, another for every leaf and count."""
    return _random(options, plan, plan.q_shape, (index, count))


def random_p(options: Options, plan: LeafPlan, index: int) -> Array:
    """A left factor for alternating steps to hold until the first of them replaces it."""
    return _random(options, plan, plan.p_shape, (index, 0, 1))


def _random(
    options: Options, plan: LeafPlan, shape: tuple[int, ...], path: tuple[Array | int, ...]
) -> Array:
    # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
    key = jax.random.key(options.seed, impl="threefry2x32")
    for number in path:
        key = jax.random.fold_in(key, number)
    return jax.random.normal(key, shape, compute_dtype(plan.dtype))


def _replaced_if(flag: Array, old: Array, new: Array) -> Array:
    return jnp.where(flag, new.astype(old.dtype), old)
