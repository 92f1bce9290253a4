"""PowerSGD's factors as integers on the wire, and what rides along with them as it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import jax.numpy as jnp
from jax import lax

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import Array, AxisName
from jaxcomp._lowrank.stacks import Stacks
from jaxcomp._mesh.axes import axis_size, other_axes
from jaxcomp._mesh.collectives import Reduced
from jaxcomp._mesh.shares import LARGE, BlockLayout, ExactLayout, Layout, mean_of_stacks
from jaxcomp._mesh.weights import mean_each
from jaxcomp._reducers.contract import all_finite

_BLOCK = 128  # values that share a scale, at most: 3% more bytes for the scales


def factor_layout(shape: tuple[int, ...], replicas: int, bits: int) -> BlockLayout:
    """Blocks along the columns of a ``(*batch, n, r)`` factor, which is sent column by column.

    The columns differ in size by orders of magnitude and the integers of a block share their scale.
    So a column is cut into equal blocks. They stay within it where its blocks can be dealt out
    evenly to the replicas; where not, a few take the end of one column and the start of the next,
    which costs less than padding every replica's share to whole blocks.
    """
    column = shape[-2]
    block = math.ceil(column / math.ceil(column / _BLOCK))
    return BlockLayout.of(math.prod(shape), replicas, block, bits)


def reduce_integers(
    parts: Sequence[Array],
    axis_name: AxisName,
    *,
    thin: int,
    bits: int,
    stacked: Collection[int] = frozenset(),
) -> Reduced:
    """Averages factors as integers and the other parts exactly, in an all-to-all and an all-gather.

    The counterpart of `reduce_mean`. Beside mesh axes that are left to the compiler, the parts that
    are no factors keep their shapes and so their shardings, in an all-reduce for each dtype.

    Args:
      parts: `thin` factors ``(*batch, n, r)``, then arrays of any shapes and floating dtypes.
      axis_name: The mapped axis or axes.
      thin: How many of the parts are factors.
      bits: Of an integer.
      stacked: Positions of parts that are the factors of many leaves, along a first axis.

    Returns:
      Means and sent with the parts' shapes and dtypes; means of factors are 0 unless all means are
      finite.
    """
    replicas, dense = axis_size(axis_name), parts[thin:]
    # Small factors of one shape as one: a GPU launches kernels for each otherwise.
    alone = {i: x for i, x in enumerate(parts[:thin]) if i not in stacked and x.size <= LARGE}
    stacks = Stacks.alike({i: (x.shape, x.dtype) for i, x in alone.items()})
    kept = stacks.left(range(thin))
    factors = stacks.stack(parts[:thin])
    columns = [_transposed(factors[i]) for i in kept]
    many = {k for k, i in enumerate(kept) if i in stacks.members or i in stacked}
    layouts: list[Layout] = [
        factor_layout(factors[i].shape[1 if k in many else 0 :], replicas, bits)
        for k, i in enumerate(kept)
    ]
    if other_axes():
        reduced = mean_of_stacks(columns, layouts, many, axis_name)
        others = mean_each(dense, axis_name)
        means, sent = [*reduced.means, *others], [*reduced.sent, *dense]
        finite = reduced.finite & all_finite(others)
    else:
        # In their own dtypes: they have no residual that could keep a rounding.
        layouts += [ExactLayout(x.size, replicas, x.dtype) for x in dense]
        values = [x.astype(compute_dtype(x.dtype)) for x in dense]
        means, sent, finite = mean_of_stacks([*columns, *values], layouts, many, axis_name)

    def restored(xs: Sequence[Array]) -> list[Array]:
        turned = dict(zip(kept, map(_transposed, xs[: len(kept)]), strict=True))
        # XLA would transpose each of the leaves in a kernel of its own.
        turned |= {i: lax.optimization_barrier(turned[i]) for i in stacks.members}
        each = [*stacks.unstack([turned.get(i) for i in range(thin)]), *xs[len(kept) :]]
        return [x.astype(part.dtype) for x, part in zip(each, parts, strict=True)]

    zeroed = [jnp.where(finite, x, 0) for x in means[: len(kept)]]
    return Reduced(restored([*zeroed, *means[len(kept) :]]), restored(sent), finite)


def _transposed(factor: Array) -> Array:
    """The last two axes in turn.

    The barrier keeps XLA from folding the transpose into the product that made the factor, whose
    CPU backend is ten times slower at that form, and from decoding the factors anew for every
    value of a leaf, where it fuses them with the arithmetic on what is as large as the gradients.
    """
    return lax.optimization_barrier(factor).mT
