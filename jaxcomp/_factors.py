"""Products of a leaf with its thin factors, without a transpose of the leaf.

A `MatrixView` tells how the leaf is a ``(rows, cols)`` matrix ``M``; ``P`` is ``(rows, r)`` and
``Q`` is ``(cols, r)``, each with the leading batch axes of the view.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxcomp._matricize import MatrixView
from jaxcomp._typing import Array

# A residual that is exact in float32 needs products that are: no TensorFloat-32 on GPU. With so few
# columns the products are bound by memory, so the precision costs nothing.
_EXACT = lax.Precision.HIGHEST
# Up to this rank a sum of outer products, which XLA fuses with the arithmetic around it, replaces a
# matrix product, whose dense result would be written out and read again. It has the shape of the
# leaf, not of the matrix: a reshape in between would keep XLA from updating the residual in place.
_FUSED_OUTER_RANK = 8


def times_q(view: MatrixView, leaf: Array, q: Array) -> Array:
    """``M Q``, shape ``(*batch, rows, r)``."""
    matrix = view.matricize(leaf)
    return _contract_first(matrix, q) if view.cols_first else _contract_last(matrix, q)


def transposed_times_p(view: MatrixView, leaf: Array, p: Array) -> Array:
    """``M^T P``, shape ``(*batch, cols, r)``."""
    matrix = view.matricize(leaf)
    return _contract_last(matrix, p) if view.cols_first else _contract_first(matrix, p)


def outer(view: MatrixView, p: Array, q: Array) -> Array:
    """``P Q^T`` in the shape of the leaf."""
    rank = p.shape[-1]
    if rank > _FUSED_OUTER_RANK:
        first, second = (q, p) if view.cols_first else (p, q)
        product = jnp.einsum("...ir,...jr->...ij", first, second, precision=_EXACT)
        return view.unmatricize(product)
    products = [view.along_rows(p[..., k]) * view.along_cols(q[..., k]) for k in range(rank)]
    return sum(products[1:], start=products[0])


def _contract_last(x: Array, factor: Array) -> Array:
    return jnp.einsum("...ij,...jr->...ir", x, factor, precision=_EXACT)


def _contract_first(x: Array, factor: Array) -> Array:
    product = jnp.einsum("...ir,...ij->...rj", factor, x, precision=_EXACT)
    # XLA would fold the transpose into the product, and its CPU backend is 10 to 50 times slower at
    # the form that this gives (contraction over the first axis of both).
    return lax.optimization_barrier(product).mT
