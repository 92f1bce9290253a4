"""How the replicas agree on the factors of their leaves.

Two all-reduces with an orthogonalisation in between, or one if alternating; of all leaves at once
or bucket by bucket. `powersgd_step` makes what goes in, and outputs and residuals from it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import Array
from jaxcomp._lowrank.cholesky_qr import ROUNDS_TO_SPAN
from jaxcomp._lowrank.grouped import Grouped
from jaxcomp._lowrank.leafwise import Leafwise
from jaxcomp._lowrank.matricize import LeafPlan, MatrixView
from jaxcomp._lowrank.stacks import Stacks
from jaxcomp._mesh.axes import as_local, axis_size
from jaxcomp._mesh.collectives import Reduced, reduce_mean
from jaxcomp._mesh.weights import Weight, WeightedMeans, weighted_mean
from jaxcomp._reducers.integer_factors import reduce_integers
from jaxcomp._reducers.opening import nan_unless
from jaxcomp._reducers.powersgd_state import Memory, Options, Phase


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Which leaves of a tree take which way, by their positions in it."""

    options: Options
    plans: list[LeafPlan]  # of all leaves
    chosen: list[int]  # the compressed ones
    dense: list[int]  # those that are averaged as they are
    wire: Any  # in an all-reduce
    # Which of the chosen leaves, as they are given here, are stacks of leaves.
    stacks: Stacks = dataclasses.field(default_factory=Stacks)
    kernels: Grouped | None = None  # None: plain JAX, one leaf after the other

    @property
    def arithmetic(self) -> Leafwise:
        """What multiplies them."""
        return self.kernels or Leafwise()

    @property
    def views(self) -> list[MatrixView]:
        """How each of the compressed ones is a matrix."""
        return [view for i in self.chosen if (view := self.plans[i].view) is not None]

    @property
    def dtypes(self) -> list[Any]:
        """Of the compressed ones."""
        return [self.plans[i].dtype for i in self.chosen]

    def in_order(self, values: Sequence[Array]) -> list[Array]:
        """From the compressed leaves and then the others to the order of the tree."""
        return sorted_by(self.chosen + self.dense, values) if values else []

    def right_bases(self, memory: Memory, phase: Phase) -> list[Array]:
        """Orthonormal right factors to begin a power iteration with."""
        starts: Any = memory.q
        if not self.options.warm_start:
            starts = {i: self._random_start(i, phase.count) for i in self.chosen}
        # They only have to span the space: another basis of it gives the same left factors.
        return self.arithmetic.bases(self.beside(starts), self.options.eps, ROUNDS_TO_SPAN)

    def _random_start(self, i: int, count: Array) -> Array:
        plan, stack = self.plans[i], self.stacks.members.get(i)
        if stack is None:
            return self.options.random_q(plan, i, count)
        return self.options.random_stack(plan, stack, count)

    def beside(self, factors: Any) -> list[Array]:
        """The remembered factors of the compressed leaves, by position, in the compute dtype."""
        return [factors[i].astype(compute_dtype(self.plans[i].dtype)) for i in self.chosen]


class Factors(NamedTuple):
    """Left and right factors of the compressed leaves: their products are the leaves' values."""

    p: list[Array]
    q: list[Array]


@dataclasses.dataclass(frozen=True)
class Given:
    """What the replicas begin to agree from."""

    totals: list[Array]  # of the compressed leaves: gradient plus residual
    gradients: list[Array]  # of the compressed leaves
    left: list[Array] | None  # their left factors, where the sums came with them
    dense: list[Array]  # the other leaves
    memory: Memory
    phase: Phase
    weight: Weight | None
    last_weight: Array | None  # mean of the replicas' weights in the last step, where known


class Agreed(NamedTuple):
    """What the replicas agreed on in a compressed update; no array of it is as large as a leaf."""

    means: Factors  # of the outputs
    own: Factors  # of what this replica sent
    dense: list[Array]  # averages of the leaves that are not compressed
    dense_sent: list[Array]
    finite: Array  # bool scalar
    mean_weight: Array  # float32 scalar; 1 where it is not known


def agree(leaves: Leaves, buckets: Sequence[Sequence[int]], given: Given) -> Agreed:
    """What the replicas agree on, bucket by bucket.

    Args:
      leaves: All of them.
      buckets: Positions of what is sent together, in this order; none: all at once.
      given: Of all leaves.
    """
    if len(buckets) < 2:
        return Agreement(leaves).of(given)
    parts: list[Leaves] = []
    found: list[Agreed] = []
    after = None
    for bucket in buckets:
        own, rest = places(leaves.chosen, bucket), places(leaves.dense, bucket)
        part = dataclasses.replace(
            leaves,
            chosen=[leaves.chosen[k] for k in own],
            dense=[leaves.dense[k] for k in rest],
        )
        # Each needs to know of the one before that it is finite. Otherwise XLA would merge their
        # all-reduces into one, which waits for the last gradient.
        agreed = Agreement(part, after).of(
            dataclasses.replace(
                given,
                totals=[given.totals[k] for k in own],
                gradients=[given.gradients[k] for k in own],
                left=None if given.left is None else [given.left[k] for k in own],
                dense=[given.dense[k] for k in rest],
            )
        )
        after = agreed.finite if after is None else after & agreed.finite
        parts.append(part)
        found.append(agreed)
    assert after is not None  # there are buckets
    return _joined(parts, found, after)


def _joined(parts: Sequence[Leaves], found: Sequence[Agreed], finite: Array) -> Agreed:
    """What the buckets agreed on, in the order of all leaves."""
    order = [i for part in parts for i in part.chosen]
    order_dense = [i for part in parts for i in part.dense]

    def factors(each: list[Factors]) -> Factors:
        p, q = ([x for factors in each for x in factors[side]] for side in (0, 1))
        return Factors(sorted_by(order, p), sorted_by(order, q))

    return Agreed(
        factors([agreed.means for agreed in found]),
        factors([agreed.own for agreed in found]),
        sorted_by(order_dense, [x for agreed in found for x in agreed.dense]),
        sorted_by(order_dense, [x for agreed in found for x in agreed.dense_sent]),
        finite,
        found[0].mean_weight,
    )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How the replicas agree on the leaves that are sent together."""

    leaves: Leaves
    after: Array | None = None  # bool scalar: whether what was sent before this is finite

    def of(self, given: Given) -> Agreed:
        """Both factors, or the one whose turn it is."""
        if not self.leaves.options.alternating:
            return self._two_sided(given)
        left = functools.partial(self._one_sided, given, given.memory.q, left=True)
        right = functools.partial(self._one_sided, given, given.memory.p, left=False)
        return given.phase.left_or_right(left, right)

    def nothing(self, dense: list[Array]) -> Agreed:
        """Zeros in the place of what a compressed update would agree on."""
        plans = [self.leaves.plans[i] for i in self.leaves.chosen]
        zeros = Factors(
            [jnp.zeros(plan.p_shape, compute_dtype(plan.dtype)) for plan in plans],
            [jnp.zeros(plan.q_shape, compute_dtype(plan.dtype)) for plan in plans],
        )
        blank = [jnp.zeros(x.shape, x.dtype) for x in dense]
        return self._agreed(zeros, zeros, Reduced(blank, blank, jnp.array(True)), jnp.array(True))

    def _two_sided(self, given: Given) -> Agreed:
        """Left factors, an all-reduce, right factors, another one."""
        leaves, options, arithmetic = self.leaves, self.leaves.options, self.leaves.arithmetic
        totals, n = given.totals, len(given.totals)
        left, own = given.left, None
        if options.repays_evenly(given.weight):
            left, own = None, given.weight.own
            last = own if given.last_weight is None else given.last_weight
            totals = reweighed(totals, given.gradients, own, last)
        if left is None:
            bases = leaves.right_bases(given.memory, given.phase)
            left = arithmetic.multiply(leaves.views, totals, bases, transposed=False)
        first, weight = self._reduce(
            [*left, *given.dense], given.weight, thin=n, weighed=0 if own is None else n
        )

        # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands
        # in for torch's sum; dividing eps too leaves the quotient unchanged.
        mean_left = first.means[:n]
        if not self._gives_zeros(given.weight):
            mean_left = [jnp.where(first.finite, x, 0) for x in mean_left]
        p = arithmetic.bases(mean_left, options.eps / axis_size(options.axis_name))
        mean_weight = None
        if own is not None and weight is not None and weight.mean is not None:
            mean_weight, weight = weight.mean, None
            totals = reweighed(given.totals, given.gradients, own / mean_weight)
        right = arithmetic.multiply(leaves.views, totals, p, transposed=True)
        second, _ = self._reduce(right, weight, thin=n)
        return self._agreed(
            Factors(p, second.means),
            Factors(p, second.sent),
            first,
            first.finite & second.finite,
            mean_weight,
        )

    def _one_sided(self, given: Given, others: list[Any], *, left: bool) -> Agreed:
        """Factors of one side from those of the other, in one all-reduce."""
        leaves, n = self.leaves, len(given.totals)
        bases = leaves.arithmetic.bases(leaves.beside(others), leaves.options.eps)
        own = leaves.arithmetic.multiply(leaves.views, given.totals, bases, transposed=not left)
        reduced, _ = self._reduce([*own, *given.dense], given.weight, thin=n)
        pairs = [(x, bases) if left else (bases, x) for x in (reduced.means[:n], reduced.sent[:n])]
        means, sent = (Factors(*pair) for pair in pairs)
        return self._agreed(means, sent, reduced, reduced.finite)

    def _agreed(
        self,
        means: Factors,
        own: Factors,
        first: Reduced,
        finite: Array,
        mean_weight: Array | None = None,
    ) -> Agreed:
        n = len(self.leaves.dense)
        # One type for all branches, also for a factor that is the same on every replica.
        own, sent = as_local(
            (own, first.sent[len(first.sent) - n :]), self.leaves.options.axis_name
        )
        mean_weight = jnp.ones([], jnp.float32) if mean_weight is None else mean_weight
        return Agreed(means, own, first.means[len(first.means) - n :], sent, finite, mean_weight)

    def _reduce(
        self, parts: list[Array], weight: Weight | None, *, thin: int, weighed: int = 0
    ) -> WeightedMeans:
        if self.after is not None:
            parts = nan_unless(self.after, parts)
        leaves, options = self.leaves, self.leaves.options
        axis_name, integers = options.axis_name, options.integers
        if integers is not None:
            mean = functools.partial(
                reduce_integers,
                axis_name=axis_name,
                thin=thin,
                bits=integers.bits,
                # Each of their leaves is sent as it would be without the others.
                stacked={k for k, i in enumerate(leaves.chosen) if i in leaves.stacks.members},
            )
        else:
            mean = functools.partial(
                reduce_mean,
                axis_name=axis_name,
                wire_dtype=leaves.wire,
                thin=thin,
                zeroed_whole=leaves.kernels is not None,
            )
        if weight is None:  # nothing rides along
            return WeightedMeans(mean(parts), None)
        wire = jnp.float32 if integers is not None else leaves.wire
        return weighted_mean(mean, parts, weight, axis_name, wire, weighed=weighed)

    def _gives_zeros(self, weight: Weight | None) -> bool:
        """Whether `_reduce` gives zeros for factors that are not finite.

        Integers do, and the kernels' vector; weights are divided by after either.
        """
        whole = self.leaves.options.integers is not None or self.leaves.kernels is not None
        return weight is None and whole


def reweighed(
    totals: list[Array], gradients: list[Array], share: Array, repaid: Array | None = None
) -> list[Array]:
    """Gradients times `share`, plus residuals times `repaid`, from the sums of both; None: 1."""
    result = []
    for total, gradient in zip(totals, gradients, strict=True):
        gradient = gradient.astype(total.dtype)
        residual = total - gradient
        if repaid is not None:
            residual *= repaid.astype(total.dtype)
        result.append(share.astype(total.dtype) * gradient + residual)
    return result


def places(positions: Sequence[int], bucket: Sequence[int]) -> list[int]:
    """Which of these positions of leaves are in the bucket, by their places here."""
    inside = set(bucket)
    return [k for k, i in enumerate(positions) if i in inside]


def sorted_by(keys: Sequence[int], values: Sequence[Array]) -> list[Array]:
    """The values in the order of their keys."""
    pairs = sorted(zip(keys, values, strict=True), key=lambda pair: pair[0])
    return [value for _, value in pairs]
