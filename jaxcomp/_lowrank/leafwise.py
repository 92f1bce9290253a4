"""The arithmetic of PowerSGD on lists of leaves, one leaf after the other, in plain JAX.

`grouped` has the same methods in kernels for NVIDIA GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxcomp._base.typing import Array
from jaxcomp._lowrank import products
from jaxcomp._lowrank.cholesky_qr import ROUNDS
from jaxcomp._lowrank.matricize import MatrixView
from jaxcomp._lowrank.orthogonalize import orthonormal_bases


class Leafwise:
    """Plain JAX, for every device and every transformation."""

    def multiply(
        self,
        views: Sequence[MatrixView],
        totals: Sequence[Array],
        factors: Sequence[Array],
        *,
        transposed: bool,
    ) -> list[Array]:
        """``M Q`` of every leaf, or ``M^T P`` if `transposed`."""
        one = products.transposed_times_p if transposed else products.times_q
        return [one(*leaf) for leaf in zip(views, totals, factors, strict=True)]

    def outer(
        self,
        views: Sequence[MatrixView],
        p: Sequence[Array],
        q: Sequence[Array],
        dtypes: Sequence[Any],
        finite: Array | None = None,
    ) -> list[Array]:
        """``P Q^T`` of every leaf, in its shape and in these dtypes; NaN unless `finite`."""
        if finite is not None:
            # One NaN in a row of a factor is NaN in the whole row of the product: no second look
            # at what is as large as the gradients.
            p = self.where(finite, p, None)
        zipped = zip(views, p, q, dtypes, strict=True)
        return [products.outer(view, a, b).astype(dtype) for view, a, b, dtype in zipped]

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
        """The new residuals, in the place of the old ones.

        Args:
          views: How each leaf is a matrix.
          p: Left factors.
          q: Right factors.
          totals: What was to be sent, in the leaves' shapes.
          olds: The old residuals.
          commit: Bool scalar: whether the residuals change at all.
          kept: How much of the old residual stays; None for nothing.
          function: All of that for one leaf, from ``P Q^T``, the total and the old residual.
        """
        del commit, kept  # the function knows them
        zipped = zip(views, p, q, totals, olds, strict=True)
        return [products.replace_by_product(*leaf, function) for leaf in zipped]

    def bases(self, factors: Sequence[Array], eps: Any, rounds: int = ROUNDS) -> list[Array]:
        """Orthonormal bases of all factors, in so many rounds of Cholesky QR."""
        return orthonormal_bases(factors, eps, rounds=rounds)

    def where(
        self, flag: Array, news: Sequence[Array], olds: Sequence[Array] | None
    ) -> list[Array]:
        """`news` if `flag`, else `olds`, or NaN without them."""
        return [
            jnp.where(flag, x, jnp.nan if olds is None else olds[i]) for i, x in enumerate(news)
        ]
