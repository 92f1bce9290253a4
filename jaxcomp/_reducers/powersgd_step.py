"""The arithmetic of one PowerSGD update, on the leaves of a tree.

`Step.run` reads from top to bottom: add the residual, agree on factors, rebuild, keep what was not
sent. The factors take two all-reduces with an orthogonalisation in between, or one if alternating.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._base.leaves import Integers, compute_dtype, widest
from jaxcomp._base.typing import Array, AxisName, BucketFn, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank import grouped
from jaxcomp._lowrank.cholesky_qr import ROUNDS, ROUNDS_TO_SPAN
from jaxcomp._lowrank.kernels import compiler_found
from jaxcomp._lowrank.matricize import LeafPlan, MatrixView, plan_leaves
from jaxcomp._lowrank.orthogonalize import orthonormal_bases
from jaxcomp._lowrank.products import outer, replace_by_product, times_q, transposed_times_p
from jaxcomp._lowrank.stacks import Stacks
from jaxcomp._mesh.axes import (
    as_local,
    axis_size,
    axis_tuple,
    from_step,
    mapped_mesh_axes,
    other_axes,
)
from jaxcomp._mesh.collectives import Reduced, reduce_mean
from jaxcomp._mesh.weights import Weight, WeightedMeans, weighted_mean
from jaxcomp._reducers.contract import all_finite
from jaxcomp._reducers.integer_factors import reduce_integers
from jaxcomp._reducers.opening import nan_unless

# An exact average; left and right factors; or, alternating, one of the two.
Turn = Literal["exact", "both", "left", "right"]
T = TypeVar("T")


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
    buckets: int | BucketFn | None
    gpu_kernels: bool

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The forms that a step may have."""
        compressed = ("left", "right") if self.alternating else ("both",)
        return ("exact", *compressed) if self.start_step else compressed

    def turn_of(self, count: Array) -> Array:
        """The place in `turns` of the step with this count; int32 scalar."""
        side = (count - self.start_step) % 2 if self.alternating else jnp.zeros_like(count)
        return jnp.where(count < self.start_step, 0, side + 1) if self.start_step else side

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        """What happens to each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    @property
    def integers(self) -> Integers | None:
        """As which integers factors travel; the rest then goes as without a `comm_dtype`."""
        return self.comm_dtype if isinstance(self.comm_dtype, Integers) else None

    def wire_dtype(self, dtypes: Iterable[Any]) -> Any:
        """What goes on the wire for gradients of these dtypes, in an all-reduce."""
        if self.comm_dtype is None or self.integers is not None:
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


@dataclasses.dataclass(frozen=True)
class _Given:
    """What the replicas begin to agree from, in one update."""

    totals: list[Array]  # of the compressed leaves: gradient plus residual
    gradients: list[Array]  # of the compressed leaves
    left: list[Array] | None  # their left factors, where the sums came with them
    dense: list[Array]  # the other leaves
    memory: Memory
    count: Array
    weight: Weight | None
    last_weight: Array | None  # mean of the replicas' weights in the last step, where it matters


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
    mean_weight: Array  # float32 scalar; 1 where it is not known


class _Rebuilt(NamedTuple):
    outputs: list[Array]
    sent: list[Array]
    finite: Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One update of a given tree: which leaves take which way.

    Only two things depend on the count through a conditional: the factors and, built from them, the
    outputs. Whatever passes through a conditional is copied, so that the sums of gradient and
    residual only go in, and the residual stays outside and is updated in place (but for that of a
    stack, which is a copy).
    """

    options: Options
    chosen: list[int]  # positions of the compressed leaves
    dense: list[int]  # positions of the leaves that are averaged as they are
    plans: list[LeafPlan]
    wire: Any
    want_sent: bool
    ours: Array  # bool scalar: whether the residual is this replica's; if not, it is left out
    buckets: list[list[int]]  # positions of what is sent together, in this order; []: of all
    kernels: grouped.Kernels | None = None  # None: plain JAX, one leaf after the other
    # Which of the chosen leaves, as they are given here, are stacks of leaves.
    stacks: Stacks = dataclasses.field(default_factory=Stacks)
    after: Array | None = None  # bool scalar: whether what was sent before this is finite
    turn: Turn | None = None  # None: the count decides, in a conditional

    def run(
        self, leaves: list[Array], memory: Memory, count: Array, weight: Weight | None
    ) -> Result:
        """An exact average before `start_step`, a compressed one from then on."""
        arguments = leaves, memory, count, weight
        # Both forms for GPUs take arrays whole, not such as may be sharded along an automatic axis.
        if not (self.chosen and compiler_found()) or other_axes():
            return self._run(*arguments)
        on_gpus = self._run_stacked
        # The kernels have no rule for a `jax.vmap` over replicas.
        mapped = set(axis_tuple(self.options.axis_name)) <= set(mapped_mesh_axes())
        if self.options.gpu_kernels and mapped:
            on_gpus = dataclasses.replace(self, kernels=grouped.Kernels())._run
        return lax.platform_dependent(*arguments, cuda=on_gpus, default=self._run)

    def _run_stacked(
        self, leaves: list[Array], memory: Memory, count: Array, weight: Weight | None
    ) -> Result:
        """`_run` with the small leaves of one shape as one leaf."""
        compressed = set(self.chosen)
        apart = [[i for i in bucket if i in compressed] for bucket in self.buckets]
        stacks = Stacks.of(self.plans, apart or [self.chosen], memory.residual)
        step = dataclasses.replace(
            self,
            stacks=stacks,
            plans=stacks.plans(self.plans),
            chosen=stacks.left(self.chosen),
            buckets=[stacks.left(bucket) for bucket in self.buckets],
        )
        stacked = Memory(*map(stacks.stack, memory))
        result = step._run(stacks.stack(leaves), stacked, count, weight)

        def averaged(values: list[Array]) -> list[Array]:
            found = dict(zip(sorted(step.chosen + step.dense), values, strict=True))
            each = stacks.unstack([found.get(i) for i in range(len(leaves))])
            return [each[i] for i in sorted(self.chosen + self.dense)]

        return result._replace(
            outputs=averaged(result.outputs),
            memory=Memory(*map(stacks.unstack, result.memory)),
            sent=averaged(result.sent) if result.sent else [],
        )

    def _run(
        self, leaves: list[Array], memory: Memory, count: Array, weight: Weight | None
    ) -> Result:
        options = self.options
        started = self._has_started(count)
        totals, left = self._totals_and_left(leaves, memory, count, started)
        dense = [leaves[i] for i in self.dense]
        gradients = [leaves[i] for i in self.chosen]
        evenly = self._repays_evenly(weight)
        last = _norm([memory.q[i] for i in self.chosen]) if evenly else None
        given = _Given(totals, gradients, left, dense, memory, count, weight, last)
        switch = functools.partial(self._exact_before, count)
        agreed = switch(lambda: self._nothing(dense), lambda: self._in_buckets(given))
        outputs, sent, finite = switch(
            lambda: self._plain(totals, dense, weight), lambda: self._rebuilt(agreed, weight)
        )
        commit = finite if started is None else finite & started
        new = Memory(*(list(field) for field in memory))
        if options.alternating:
            left_turn = self._is_left_turn(count)
            self._replace(new.p, commit & left_turn, agreed.means.p)
            self._replace(new.q, commit & ~left_turn, agreed.means.q)
        elif options.warm_start:
            q = agreed.means.q
            if evenly:  # the length is free: of factors only the span is used again
                scale = agreed.mean_weight / _norm(q)
                q = [x * jnp.where(jnp.isfinite(scale), scale, 1).astype(x.dtype) for x in q]
            self._replace(new.q, commit, q)
        if options.error_feedback:
            _, kept = self._feedback(count)
            if evenly:
                totals = _weighed(totals, gradients, weight.own / agreed.mean_weight)

            def unsent(own: Array, total: Array, old: Array) -> Array:
                lost = total - own
                if kept is not None:
                    lost = lost + kept.astype(lost.dtype) * old.astype(lost.dtype)
                return _replaced_if(commit, old, lost)

            residual = self._unsent(agreed.own, totals, memory.residual, commit, kept, unsent)
            for i, x in zip(self.chosen, residual, strict=True):
                new.residual[i] = x
        return Result(self._in_order(outputs), new, finite, self._in_order(sent))

    def _in_buckets(self, given: _Given) -> _Agreed:
        """What the buckets agree on, one after the other, put together.

        Each needs to know of the one before that it is finite. Otherwise XLA would merge their
        all-reduces into one, which waits for the last gradient.
        """
        if len(self.buckets) < 2:
            return self._agree(given)
        parts: list[Step] = []
        found: list[_Agreed] = []
        after = None
        for bucket in self.buckets:
            own, rest = _places(self.chosen, bucket), _places(self.dense, bucket)
            part = dataclasses.replace(
                self,
                chosen=[self.chosen[k] for k in own],
                dense=[self.dense[k] for k in rest],
                after=after,
            )
            agreed = part._agree(
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
        return self._joined(parts, found, after)

    def _joined(self, parts: list[Step], found: list[_Agreed], finite: Array) -> _Agreed:
        """What the buckets agreed on, in the order of all leaves."""
        order = [i for part in parts for i in part.chosen]
        order_dense = [i for part in parts for i in part.dense]

        def factors(each: list[_Factors]) -> _Factors:
            p, q = ([x for factors in each for x in factors[side]] for side in (0, 1))
            return _Factors(_sorted_by(order, p), _sorted_by(order, q))

        return _Agreed(
            factors([agreed.means for agreed in found]),
            factors([agreed.own for agreed in found]),
            _sorted_by(order_dense, [x for agreed in found for x in agreed.dense]),
            _sorted_by(order_dense, [x for agreed in found for x in agreed.dense_sent]),
            finite,
            found[0].mean_weight,
        )

    def _agree(self, given: _Given) -> _Agreed:
        """Both factors, or the one whose turn it is."""
        if not self.options.alternating:
            return self._two_sided(given)
        left = functools.partial(self._one_sided, given, given.memory.q, left=True)
        right = functools.partial(self._one_sided, given, given.memory.p, left=False)
        if self.turn is not None:
            return left() if self.turn == "left" else right()
        return lax.cond(self._is_left_turn(given.count), left, right)

    def _is_left_turn(self, count: Array) -> Array:
        """Whether an alternating update sends left factors."""
        if self.turn is not None:
            return jnp.array(self.turn == "left")
        return (count - self.options.start_step) % 2 == 0

    def _has_started(self, count: Array) -> Array | None:
        """Bool scalar: whether this update is compressed; None if it is known to be."""
        if self.turn is not None:
            return jnp.array(False) if self.turn == "exact" else None
        return None if self.options.start_step == 0 else count >= self.options.start_step

    def _exact_before(self, count: Array, exact: Callable[[], T], compressed: Callable[[], T]) -> T:
        """What is to be done before `start_step`, or what from then on."""
        if self.turn is not None:
            return exact() if self.turn == "exact" else compressed()
        return from_step(count, self.options.start_step, exact, compressed)

    def _two_sided(self, given: _Given) -> _Agreed:
        """Left factors, an all-reduce, right factors, another one."""
        options, totals, n = self.options, given.totals, len(given.totals)
        left, own = given.left, None
        if self._repays_evenly(given.weight):
            left, own = None, given.weight.own
            totals = _weighed(totals, given.gradients, own, given.last_weight)
        if left is None:
            bases = self._right_bases(given.memory, given.count)
            left = self._multiply(totals, bases, transposed=False)
        first, weight = self._reduce(
            [*left, *given.dense], given.weight, thin=n, weighed=0 if own is None else n
        )

        # Zeros for what is not finite: no decomposition need be trusted with NaN. The mean stands
        # in for torch's sum; dividing eps too leaves the quotient unchanged.
        mean_left = first.means[:n]
        if not self._gives_zeros(given.weight):
            mean_left = [jnp.where(first.finite, x, 0) for x in mean_left]
        p = self._bases(mean_left, options.eps / axis_size(options.axis_name))
        mean_weight = None
        if own is not None and weight is not None and weight.mean is not None:
            mean_weight, weight = weight.mean, None
            totals = _weighed(given.totals, given.gradients, own / mean_weight)
        right = self._multiply(totals, p, transposed=True)
        second, _ = self._reduce(right, weight, thin=n)
        return self._agreed(
            _Factors(p, second.means),
            _Factors(p, second.sent),
            first,
            first.finite & second.finite,
            mean_weight,
        )

    def _repays_evenly(self, weight: Weight | None) -> TypeGuard[Weight]:
        """Whether residuals are shares of the mean one, whatever their replicas weigh by now.

        A residual holds what was not sent, and how its replica differs from the others. The latter
        cancels in the mean under the weights that it arose with, and under no others. So it is kept
        as it entered the mean, weight included, and enters the next mean as it is. For that the
        mean weight must be known, which the first all-reduce brings for the second; the first one
        takes that of the last step, which the length of the right factors tells, because all that
        it decides is directions. One-sided steps have no second all-reduce.
        """
        return weight is not None and self.options.error_feedback and not self.options.alternating

    def _one_sided(self, given: _Given, others: list[Any], *, left: bool) -> _Agreed:
        """Factors of one side from those of the other, in one all-reduce."""
        n = len(given.totals)
        bases = self._bases(self._beside(others), self.options.eps)
        own = self._multiply(given.totals, bases, transposed=not left)
        reduced, _ = self._reduce([*own, *given.dense], given.weight, thin=n)
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

    def _agreed(
        self,
        means: _Factors,
        own: _Factors,
        first: Reduced,
        finite: Array,
        mean_weight: Array | None = None,
    ) -> _Agreed:
        n = len(self.dense)
        # One type for all branches, also for a factor that is the same on every replica.
        own, sent = as_local((own, first.sent[len(first.sent) - n :]), self.options.axis_name)
        mean_weight = jnp.ones([], jnp.float32) if mean_weight is None else mean_weight
        return _Agreed(means, own, first.means[len(first.means) - n :], sent, finite, mean_weight)

    def _rebuilt(self, agreed: _Agreed, weight: Weight | None) -> _Rebuilt:
        """Outputs from the factors."""
        dtypes = [self.plans[i].dtype for i in self.chosen]
        means, finite = agreed.means, agreed.finite
        half = jnp.dtype(jnp.float16) in dtypes
        # A float16 output can overflow where its factors did not.
        outputs = self._products(means, None if half else finite)
        if half:
            finite &= all_finite([x for x in outputs if x.dtype == jnp.float16])
            outputs = nan_unless(finite, outputs)
        sent = []
        if self.want_sent:
            own = agreed.own
            if self._repays_evenly(weight):  # as before it was weighed
                scale = jnp.where(weight.own > 0, agreed.mean_weight / weight.own, 0)
                own = own._replace(q=[x * scale.astype(x.dtype) for x in own.q])
            sent = [*self._products(own), *agreed.dense_sent]
        if self.kernels:
            dense = grouped.where(finite, agreed.dense, None, self.kernels)
        else:
            dense = nan_unless(finite, agreed.dense)
        return _Rebuilt([*outputs, *dense], sent, finite)

    def _plain(self, totals: list[Array], dense: list[Array], weight: Weight | None) -> _Rebuilt:
        """Exact averages, in one all-reduce. Before `start_step` the sums are the gradients."""
        gradients = [
            x.astype(self.plans[i].dtype) for i, x in zip(self.chosen, totals, strict=True)
        ]
        axis_name = self.options.axis_name
        exact = functools.partial(reduce_mean, axis_name=axis_name, wire_dtype=self.wire)
        reduced, _ = weighted_mean(exact, [*gradients, *dense], weight, axis_name, self.wire)
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
                value += jnp.where(self.ours if started is None else started & self.ours, extra, 0)
            totals.append(value)
        return totals

    def _feedback(self, count: Array) -> tuple[Any, Any]:
        """By what the residual is multiplied as it is added, and as it is kept; None: 1 and 0."""
        decay, every = self.options.error_decay, self.options.feedback_every
        added: Any = decay(count) if callable(decay) else decay
        if every > 1:
            due = (count + 1) % every == 0
            return jnp.where(due, added, 0.0), jnp.where(due | ~self.ours, 0.0, 1.0)
        return (None if isinstance(added, (int, float)) and added == 1 else added), None

    def _reduce(
        self, parts: list[Array], weight: Weight | None, *, thin: int, weighed: int = 0
    ) -> WeightedMeans:
        if self.after is not None:
            parts = nan_unless(self.after, parts)
        axis_name, integers = self.options.axis_name, self.options.integers
        if integers is not None:
            mean = functools.partial(
                reduce_integers,
                axis_name=axis_name,
                thin=thin,
                bits=integers.bits,
                # Each of their leaves is sent as it would be without the others.
                stacked={k for k, i in enumerate(self.chosen) if i in self.stacks.members},
            )
        else:
            mean = functools.partial(
                reduce_mean,
                axis_name=axis_name,
                wire_dtype=self.wire,
                thin=thin,
                zeroed_whole=self.kernels is not None,
            )
        wire = jnp.float32 if integers is not None else self.wire
        return weighted_mean(mean, parts, weight, axis_name, wire, weighed=weighed)

    def _gives_zeros(self, weight: Weight | None) -> bool:
        """Whether `_reduce` gives zeros for factors that are not finite.

        Integers do, and the kernels' vector; weights are divided by after either.
        """
        return weight is None and (self.options.integers is not None or self.kernels is not None)

    def _right_bases(self, memory: Memory, count: Array) -> list[Array]:
        """Orthonormal right factors to begin a power iteration with."""
        starts: Any = memory.q
        if not self.options.warm_start:
            starts = {i: self._random_start(i, count) for i in self.chosen}
        # They only have to span the space: another basis of it gives the same left factors.
        return self._bases(self._beside(starts), self.options.eps, ROUNDS_TO_SPAN)

    def _random_start(self, i: int, count: Array) -> Array:
        plan, stack = self.plans[i], self.stacks.members.get(i)
        if stack is None:
            return random_q(self.options, plan, i, count)

        def of_member(k: Array) -> Array:
            return _random(self.options, plan, plan.q_shape[1:], (k, count))

        return jax.vmap(of_member)(jnp.array(stack))

    def _bases(self, factors: Sequence[Array], eps: Any, rounds: int = ROUNDS) -> list[Array]:
        if self.kernels:
            return grouped.bases(factors, eps, self.kernels, rounds)
        return orthonormal_bases(factors, eps, rounds=rounds)

    def _beside(self, factors: Any) -> list[Array]:
        """The remembered factors of the compressed leaves, by position, in the compute dtype."""
        return [factors[i].astype(compute_dtype(self.plans[i].dtype)) for i in self.chosen]

    def _totals_and_left(
        self, leaves: list[Array], memory: Memory, count: Array, started: Array | None
    ) -> tuple[list[Array], list[Array] | None]:
        """Gradients plus residuals; where one kernel makes both, left factors from them too.

        Those kernels run before `start_step` as well, for nothing: a conditional around them would
        copy the sums, which are as large as the gradients.
        """
        options = self.options
        if not (self.kernels and options.error_feedback) or options.alternating:
            return self._totals(leaves, memory.residual, count, started), None
        added, _ = self._feedback(count)
        scale = jnp.asarray(1 if added is None else added, jnp.float32)
        scale = jnp.where(self.ours if started is None else started & self.ours, scale, 0)
        bases, views = self._right_bases(memory, count), self._views()
        order: list[int] = []
        totals: list[Array] = []
        left: list[Array] = []
        # A kernel takes many leaves, and waits for the last of their gradients.
        for bucket in self.buckets or [self.chosen]:
            own = _places(self.chosen, bucket)
            sums, products = grouped.add_and_multiply(
                [views[k] for k in own],
                [leaves[self.chosen[k]] for k in own],
                [memory.residual[self.chosen[k]] for k in own],
                scale,
                [bases[k] for k in own],
                self.kernels,
            )
            order, totals, left = order + own, totals + sums, left + products
        return _sorted_by(order, totals), _sorted_by(order, left)

    def _multiply(
        self, totals: list[Array], factors: list[Array], *, transposed: bool
    ) -> list[Array]:
        """``M Q`` of every compressed leaf, or ``M^T P``."""
        if self.kernels:
            return grouped.multiply(
                self._views(), totals, factors, self.kernels, transposed=transposed
            )
        one = transposed_times_p if transposed else times_q
        return [one(v, m, x) for v, m, x in zip(self._views(), totals, factors, strict=True)]

    def _replace(self, olds: list[Any], flag: Array, news: list[Array]) -> None:
        """Puts the factors of the compressed leaves into a list for all leaves, if `flag`."""
        before = [olds[i] for i in self.chosen]
        if self.kernels:
            news = [x.astype(old.dtype) for x, old in zip(news, before, strict=True)]
            after = grouped.where(flag, news, before, self.kernels)
        else:
            zipped = zip(before, news, strict=True)
            after = [_replaced_if(flag, old, x) for old, x in zipped]
        for i, x in zip(self.chosen, after, strict=True):
            olds[i] = x

    def _products(self, factors: _Factors, finite: Array | None = None) -> list[Array]:
        """``P Q^T`` in the shape and dtype of every compressed leaf; NaN unless `finite`."""
        dtypes = [self.plans[i].dtype for i in self.chosen]
        if self.kernels:
            return grouped.outer(self._views(), *factors, dtypes, self.kernels, finite)
        if finite is not None:
            # One NaN in a row of a factor is NaN in the whole row of the product: no second look
            # at what is as large as the gradients.
            factors = factors._replace(p=nan_unless(finite, factors.p))
        zipped = zip(self._views(), *factors, dtypes, strict=True)
        return [outer(v, p, q).astype(dtype) for v, p, q, dtype in zipped]

    def _unsent(
        self,
        own: _Factors,
        totals: list[Array],
        residual: list[Any],
        commit: Array,
        kept: Array | None,
        function: Callable[[Array, Array, Array], Array],
    ) -> list[Array]:
        """The new residuals, made by `function` in the place of the old ones."""
        olds = [residual[i] for i in self.chosen]
        if self.kernels:
            return grouped.unsent(
                self._views(), *own, totals, olds, commit, kept, function, self.kernels
            )
        zipped = zip(self._views(), *own, totals, olds, strict=True)
        return [replace_by_product(*leaf, function) for leaf in zipped]

    def _in_order(self, values: Sequence[Array]) -> list[Array]:
        """From the compressed leaves and then the others to the order of the leaves."""
        return _sorted_by(self.chosen + self.dense, values) if values else []

    def _views(self) -> list[MatrixView]:
        return [view for i in self.chosen if (view := self.plans[i].view) is not None]


def _weighed(
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


def _norm(factors: list[Array]) -> Array:
    """Of all values together; float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in factors]
    return jnp.sqrt(jnp.sum(jnp.stack(squares))) if squares else jnp.ones([], jnp.float32)


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


def _places(positions: Sequence[int], bucket: Sequence[int]) -> list[int]:
    """Which of these positions of leaves are in the bucket, by their places here."""
    inside = set(bucket)
    return [k for k, i in enumerate(positions) if i in inside]


def _sorted_by(keys: Sequence[int], values: Sequence[Array]) -> list[Array]:
    pairs = sorted(zip(keys, values, strict=True), key=lambda pair: pair[0])
    return [value for _, value in pairs]


def _replaced_if(flag: Array, old: Array, new: Array) -> Array:
    return jnp.where(flag, new.astype(old.dtype), old)
