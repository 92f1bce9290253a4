"""The arithmetic of one PowerSGD update, on the leaves of a tree.

`Step.compressed` reads from top to bottom: add the residual, left factors, one all-reduce,
orthogonalise, right factors, one all-reduce, rebuild, keep what was not sent. `Step.one_sided` does
half of it, with one factor and one all-reduce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._collectives import Reduced, axis_size, reduce_mean
from jaxcomp._dtypes import compute_dtype, widest
from jaxcomp._factors import outer, times_q, transposed_times_p
from jaxcomp._matricize import LeafPlan, MatrixView, plan_leaves
from jaxcomp._orthogonalize import map_by_shape, orthogonalize
from jaxcomp._reduction import all_finite
from jaxcomp._typing import Array, AxisName, MatrixDimsFn, PyTree, RankFn


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

    def wire_dtype(self, leaves: list[Array]) -> Any:
        """What goes on the wire for gradients of these dtypes."""
        if self.comm_dtype is not None:
            return self.comm_dtype
        return widest(leaf.dtype for leaf in leaves)


class Memory(NamedTuple):
    """What is remembered of every leaf, in flattening order; a masked node where nothing is."""

    residual: list[Any]
    q: list[Any]
    p: list[Any]  # all masked unless alternating


class Result(NamedTuple):
    """One update of the leaves that are averaged."""

    outputs: list[Array]  # of the compressed leaves, then of the others
    memory: Memory
    finite: Array  # bool scalar
    sent: list[Array]  # like outputs: this replica's own part of them; empty unless wanted


class _Factors(NamedTuple):
    """Left and right factors of the compressed leaves: their products are the leaves' values."""

    p: Sequence[Array]
    q: Sequence[Array]


class _Sides(NamedTuple):
    """What one compressed update agreed on, before anything is rebuilt from it."""

    means: _Factors  # of the outputs
    own: _Factors  # of what this replica sent
    kept: dict[str, Sequence[Array]]  # field of `Memory` -> its new factors
    finite: Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One update of a given tree: which leaves take which way."""

    options: Options
    chosen: list[int]  # positions of the compressed leaves
    dense: list[int]  # positions of the leaves that are averaged as they are
    plans: list[LeafPlan]
    wire: Any
    want_sent: bool

    def plain(self, leaves: list[Array], memory: Memory) -> Result:
        """The update before `start_step`: one all-reduce, no state touched."""
        parts = [leaves[i] for i in self.chosen + self.dense]
        reduced = reduce_mean(parts, self.options.axis_name, self.wire)
        sent = reduced.sent if self.want_sent else []
        means = [jnp.where(reduced.finite, x, jnp.nan) for x in reduced.means]
        return Result(means, memory, reduced.finite, sent)

    def compressed(self, leaves: list[Array], memory: Memory, count: Array) -> Result:
        """The update from `start_step` on: two all-reduces."""
        options, views = self.options, self._views()
        totals = self._totals(leaves, memory.residual, count)
        starts = [
            memory.q[i] if options.warm_start else random_q(options, self.plans[i], i, count)
            for i in self.chosen
        ]
        bases = self._bases(starts, options.eps)
        left = [times_q(v, m, b) for v, m, b in zip(views, totals, bases, strict=True)]
        first = self._reduce([*left, *(leaves[i] for i in self.dense)], thin=len(left))

        # The mean stands in for torch's sum; dividing eps too leaves the quotient unchanged.
        mean_left = _zero_unless(first.finite, first.means[: len(left)])
        p = self._bases(mean_left, options.eps / axis_size(options.axis_name))
        right = [transposed_times_p(v, m, x) for v, m, x in zip(views, totals, p, strict=True)]
        second = self._reduce(right, thin=len(right))
        sides = _Sides(
            means=_Factors(p, second.means),
            own=_Factors(p, second.sent),
            kept={"q": second.means} if options.warm_start else {},
            finite=first.finite & second.finite,
        )
        return self._rebuilt(totals, memory, count, sides, first)

    def one_sided(self, leaves: list[Array], memory: Memory, count: Array) -> Result:
        """The update from `start_step` on if alternating: left factors, then right ones."""

        def left() -> Result:
            return self._one_side(leaves, memory, count, times_q, "p")

        def right() -> Result:
            return self._one_side(leaves, memory, count, transposed_times_p, "q")

        return lax.cond((count - self.options.start_step) % 2 == 0, left, right)

    def _one_side(
        self, leaves: list[Array], memory: Memory, count: Array, product: Any, new: str
    ) -> Result:
        """`product` of the leaves and the other side's factors, in one all-reduce."""
        totals = self._totals(leaves, memory.residual, count)
        others = memory.q if new == "p" else memory.p
        bases = self._bases([others[i] for i in self.chosen], self.options.eps)
        factors = [product(v, m, b) for v, m, b in zip(self._views(), totals, bases, strict=True)]
        n = len(factors)
        reduced = self._reduce([*factors, *(leaves[i] for i in self.dense)], thin=n)
        means, own = reduced.means[:n], reduced.sent[:n]
        pairs = ((means, bases), (own, bases)) if new == "p" else ((bases, means), (bases, own))
        sides = _Sides(_Factors(*pairs[0]), _Factors(*pairs[1]), {new: means}, reduced.finite)
        return self._rebuilt(totals, memory, count, sides, reduced)

    def _rebuilt(
        self, totals: list[Array], memory: Memory, count: Array, sides: _Sides, first: Reduced
    ) -> Result:
        """Outputs and new memory from the factors; the other leaves' averages from `first`."""
        outputs = [x.astype(self.plans[i].dtype) for i, x in self._products(sides.means)]
        # A float16 output can overflow where its factors did not.
        finite = sides.finite & all_finite([x for x in outputs if x.dtype == jnp.float16])
        outputs += first.means[len(self.chosen) :]
        new = Memory(*(list(field) for field in memory))
        for name, factors in sides.kept.items():
            field = getattr(new, name)
            for i, x in zip(self.chosen, factors, strict=True):
                field[i] = jnp.where(finite, x, field[i])
        own = self._products(sides.own)
        if self.options.error_feedback:
            _, kept = self._feedback(count)
            for total, (i, product) in zip(totals, own, strict=True):
                old, lost = memory.residual[i], total - product
                if kept is not None:
                    lost = lost + kept.astype(lost.dtype) * old.astype(lost.dtype)
                new.residual[i] = jnp.where(finite, lost.astype(old.dtype), old)
        sent = []
        if self.want_sent:
            sent = [product.astype(self.plans[i].dtype) for i, product in own]
            sent += first.sent[len(self.chosen) :]
        return Result([jnp.where(finite, x, jnp.nan) for x in outputs], new, finite, sent)

    def _totals(self, leaves: list[Array], residual: list[Any], count: Array) -> list[Array]:
        """Gradient plus what the residual adds, in the leaf's shape and the compute dtype."""
        added, _ = self._feedback(count)
        totals = []
        for i in self.chosen:
            value = leaves[i].astype(compute_dtype(leaves[i].dtype))
            if self.options.error_feedback:
                extra = residual[i].astype(value.dtype)
                value += extra if added is None else jnp.asarray(added, value.dtype) * extra
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
        return reduce_mean(parts, self.options.axis_name, self.wire, thin=thin)

    def _bases(self, factors: Sequence[Array], eps: Any) -> list[Array]:
        return map_by_shape(lambda x: orthogonalize(x, eps), factors)

    def _products(self, factors: _Factors) -> list[tuple[int, Array]]:
        """Position and ``P Q^T``, in the leaf's shape, of every compressed leaf."""
        products = map(outer, self._views(), *factors)
        return list(zip(self.chosen, products, strict=True))

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


def _zero_unless(finite: Array, factors: Sequence[Array]) -> list[Array]:
    """Zeros for what is not finite: no decomposition need be trusted with NaN."""
    return [jnp.where(finite, x, 0) for x in factors]
