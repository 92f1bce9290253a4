"""The arithmetic of PowerSGD on lists of leaves, on NVIDIA GPUs those of one shape in one kernel.

What the kernels do not take (more columns than fit into the registers, float64, a view that moves
values in memory) is multiplied leaf by leaf, as `leafwise` does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcomp._base.typing import Array
from jaxcomp._lowrank import kernels, leafwise
from jaxcomp._lowrank.cholesky_qr import ROUNDS, inverse_factors
from jaxcomp._lowrank.leafwise import orthonormal_bases
from jaxcomp._lowrank.matricize import MatrixView

# Biases, scales and factors, of which there are many; more values are worth a kernel of their own.
_SMALL = 1 << 19
_MOST_SMALL = 128  # outputs of one launch


class _Group(NamedTuple):
    """Positions of leaves that one kernel takes, or of one leaf that none does."""

    positions: list[int]
    fits: bool


@dataclasses.dataclass(frozen=True)
class Grouped(leafwise.Leafwise):
    """Kernels for leaves of one shape: on GPUs, or in tests interpreted, on any device."""

    interpret: bool = False

    def add_and_multiply(
        self,
        views: Sequence[MatrixView],
        gradients: Sequence[Array],
        residuals: Sequence[Array],
        scale: Array,
        q: Sequence[Array],
    ) -> tuple[list[Array], list[Array]]:
        """The sums ``gradient + scale * residual`` in float32, and the sums times their `q`."""
        totals, left = list(gradients), list(q)
        for group, fits in _groups(
            views, q, [(x.dtype, e.dtype) for x, e in zip(gradients, residuals, strict=True)]
        ):
            if not fits:
                for i in group:
                    extra = residuals[i].astype(q[i].dtype) * scale.astype(q[i].dtype)
                    totals[i] = gradients[i].astype(q[i].dtype) + extra
                    left[i] = leafwise.times_q(views[i], totals[i], q[i])
                continue
            parts = [
                (_stack_of(views[i], gradients[i]), _stack_of(views[i], residuals[i]))
                for i in group
            ]
            sums, product = kernels.multiply(
                parts,
                _joined([q[i] for i in group]),
                contract_last=not views[group[0]].cols_first,
                scale=scale,
                interpret=self.interpret,
            )
            _put(totals, group, sums, gradients)
            _put(left, group, _parts(product, views, group))
        return totals, left

    def multiply(
        self,
        views: Sequence[MatrixView],
        totals: Sequence[Array],
        factors: Sequence[Array],
        *,
        transposed: bool,
    ) -> list[Array]:
        """``M Q`` of every leaf, or ``M^T P`` if `transposed`."""
        results = list(factors)
        one = leafwise.transposed_times_p if transposed else leafwise.times_q
        for group, fits in _groups(views, factors, [x.dtype for x in totals]):
            if not fits:
                _put(results, group, [one(views[i], totals[i], factors[i]) for i in group])
                continue
            _, product = kernels.multiply(
                [(_stack_of(views[i], totals[i]),) for i in group],
                _joined([factors[i] for i in group]),
                contract_last=views[group[0]].cols_first == transposed,
                interpret=self.interpret,
            )
            _put(results, group, _parts(product, views, group))
        return results

    def outer(
        self,
        views: Sequence[MatrixView],
        p: Sequence[Array],
        q: Sequence[Array],
        dtypes: Sequence[Any],
        finite: Array | None = None,
    ) -> list[Array]:
        """``P Q^T`` of every leaf, in its shape and in these dtypes; NaN unless `finite`."""

        def checked(factor: Array) -> Array:
            return factor if finite is None else jnp.where(finite, factor, jnp.nan)

        results = list(p)
        for group, fits in _groups(views, p, dtypes):
            if not fits:
                whole = [
                    leafwise.outer(views[i], checked(p[i]), q[i]).astype(dtypes[i]) for i in group
                ]
                _put(results, group, whole)
                continue
            first, second = _in_memory_order(views, p, q, group)
            first = checked(first)
            found = kernels.outer(
                first, second, len(group), dtypes[group[0]], interpret=self.interpret
            )
            _put(results, group, found, views)
        return results

    def unsent(
        self,
        views: Sequence[MatrixView],
        p: Sequence[Array],
        q: Sequence[Array],
        totals: Sequence[Array],
        olds: Sequence[Array],
        commit: Array,
        kept: Array | None,
        function: Callable[[Array, Array, Array], Array],
    ) -> list[Array]:
        """The new residuals; `function` makes those of leaves that no kernel takes."""
        results = list(olds)
        for group, fits in _groups(
            views, p, [(x.dtype, e.dtype) for x, e in zip(totals, olds, strict=True)]
        ):
            if not fits:
                for i in group:
                    results[i] = leafwise.replace_by_product(
                        views[i], p[i], q[i], totals[i], olds[i], function
                    )
                continue
            first, second = _in_memory_order(views, p, q, group)
            found = kernels.unsent(
                [_stack_of(views[i], totals[i]) for i in group],
                [_stack_of(views[i], olds[i]) for i in group],
                first,
                second,
                commit,
                kept,
                interpret=self.interpret,
            )
            _put(results, group, found, views)
        return results

    def bases(self, factors: Sequence[Array], eps: Any, rounds: int = ROUNDS) -> list[Array]:
        """Orthonormal bases of all factors, in so many rounds of Cholesky QR."""

        def factorize(gram: Array, lost_below: Array) -> tuple[Array, Array]:
            if gram.shape[-1] > kernels.MOST_COLUMNS or gram.dtype != jnp.float32:
                return inverse_factors(gram, lost_below)
            return kernels.inverse_factors(gram, lost_below, interpret=self.interpret)

        return orthonormal_bases(factors, eps, factorize, rounds)

    def where(
        self, flag: Array, news: Sequence[Array], olds: Sequence[Array] | None
    ) -> list[Array]:
        """`news` if `flag`, else `olds`, or NaN without them; the small ones in one kernel.

        XLA would launch one for each. Nothing but slices is taken of what was one vector before,
        which XLA then puts together again without a copy.
        """
        results = [
            jnp.where(flag, x, jnp.nan if olds is None else olds[i]) for i, x in enumerate(news)
        ]
        small = [i for i, x in enumerate(news) if 0 < x.size <= _SMALL]
        for dtype in dict.fromkeys(news[i].dtype for i in small):
            chosen = [i for i in small if news[i].dtype == dtype]
            for start in range(0, len(chosen), _MOST_SMALL):
                group = chosen[start : start + _MOST_SMALL]
                flat = jnp.concatenate([news[i].reshape(-1) for i in group])
                other: Any = jnp.nan
                if olds is not None:
                    other = jnp.concatenate([olds[i].reshape(-1) for i in group])
                sizes = tuple(news[i].size for i in group)
                found = kernels.separate(
                    jnp.where(flag, flat, other), sizes, interpret=self.interpret
                )
                _put(results, group, found, news)
        return results


def _groups(
    views: Sequence[MatrixView], factors: Sequence[Array], kinds: Sequence[Any]
) -> Iterator[_Group]:
    """Leaves of one matrix shape, order, rank and kind."""
    found: dict[Any, list[int]] = {}
    for i, (view, factor, kind) in enumerate(zip(views, factors, kinds, strict=True)):
        rank = factor.shape[-1]
        if not view.is_reshape or rank > kernels.MOST_COLUMNS or factor.dtype != jnp.float32:
            yield _Group([i], False)
            continue
        key = (view.batch, view.n_rows, view.n_cols, view.cols_first, rank, kind)
        found.setdefault(key, []).append(i)
    for group in found.values():
        for start in range(0, len(group), kernels.MOST_LEAVES):
            yield _Group(group[start : start + kernels.MOST_LEAVES], True)


def _stack_of(view: MatrixView, leaf: Array) -> Array:
    matrix = view.matricize(leaf)
    return matrix.reshape(-1, *matrix.shape[-2:])


def _joined(factors: Sequence[Array]) -> Array:
    return jnp.concatenate([x.reshape(-1, *x.shape[-2:]) for x in factors])


def _in_memory_order(
    views: Sequence[MatrixView], p: Sequence[Array], q: Sequence[Array], group: Sequence[int]
) -> tuple[Array, Array]:
    pair = _joined([p[i] for i in group]), _joined([q[i] for i in group])
    return (pair[1], pair[0]) if views[group[0]].cols_first else pair


def _parts(product: Array, views: Sequence[MatrixView], group: Sequence[int]) -> list[Array]:
    """``(leaves * batch, n, r)`` as a factor ``(*batch, n, r)`` for every leaf."""
    each = product.reshape(len(group), -1, *product.shape[1:])
    return [x.reshape(*views[i].batch, *x.shape[1:]) for i, x in zip(group, each, strict=True)]


def _put(
    results: list[Array],
    group: Sequence[int],
    values: Sequence[Array],
    like: Sequence[Array | MatrixView] | None = None,
) -> None:
    """Each value into its place, in the shape of what has that place in `like`."""
    for i, value in zip(group, values, strict=True):
        results[i] = value if like is None else value.reshape(like[i].shape)
