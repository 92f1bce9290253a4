"""PowerSGD's factors as integers on the wire, and what rides along with them as it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from jax import lax

from jaxcomp._base.leaves import all_finite, compute_dtype
from jaxcomp._base.typing import Array, AxisName
from jaxcomp._mesh.collectives import Reduced, axis_size, mean_each, other_axes
from jaxcomp._mesh.shares import BlockLayout, ExactLayout, Layout, mean_by_shares

_BLOCK = 128  # values that share a scale, at most: 3% more bytes for the scales


def factor_layout(shape: tuple[int, ...], replicas: int, bits: int) -> BlockLayout:
    """Blocks along the columns of a ``(*batch, n, r)`` factor, which is sent column by column.

    The columns differ in size by orders of magnitude and the integers of a block share their scale.
    So a column is cut into equal blocks. They stay within it where its blocks can be dealt out
    equally to the replicas; where not, a few take the end of one column and the start of the next,
    which costs less than padding every replica's share to whole blocks.
    """
    column = shape[-2]
    block = math.ceil(column / math.ceil(column / _BLOCK))
    return BlockLayout.of(math.prod(shape), replicas, block, bits)


def reduce_integers(
    parts: Sequence[Array],
    axis_name: AxisName,
    *,
    factors: int,
    bits: int,
    stacks: Collection[int] = (),
) -> Reduced:
    """Averages factors as integers and the other parts exactly, in an all-to-all and an all-gather.

    The counterpart of `reduce_mean`. Beside mesh axes that are left to the compiler, the parts that
    are no factors keep their shapes and so their shardings, in an all-reduce for each dtype.

    The first `factors` parts are factors ``(*batch, n, r)``; those whose positions are in `stacks`
    are of many leaves, along a first axis. The others have any shapes.
    """
    replicas, dense = axis_size(axis_name), parts[factors:]
    columns = [_transposed(x) for x in parts[:factors]]
    layouts: list[Layout] = [
        factor_layout(x.shape[1 if i in stacks else 0 :], replicas, bits)
        for i, x in enumerate(parts[:factors])
    ]
    if other_axes():
        reduced = mean_by_shares(columns, layouts, axis_name, stacks)
        others = mean_each(dense, axis_name)
        means, sent = [*reduced.means, *others], [*reduced.sent, *dense]
        finite = reduced.finite & all_finite(others)
    else:
        # In their own dtypes: they have no residual that could keep a rounding.
        layouts += [ExactLayout(x.size, replicas, x.dtype) for x in dense]
        values = [x.astype(compute_dtype(x.dtype)) for x in dense]
        means, sent, finite = mean_by_shares([*columns, *values], layouts, axis_name, stacks)

    def restored(xs: Sequence[Array]) -> list[Array]:
        each = [*map(_transposed, xs[:factors]), *xs[factors:]]
        return [x.astype(part.dtype) for x, part in zip(each, parts, strict=True)]

    return Reduced(restored(means), restored(sent), finite)


def _transposed(factor: Array) -> Array:
    """The last two axes in turn.

    The barrier keeps XLA from folding the transpose into the product that made the factor, whose
    CPU backend is ten times slower at that form, and from decoding the factors anew for every
    value of a leaf, where it fuses them with the arithmetic on what is as large as the gradients.
    """
    return lax.optimization_barrier(factor).mT
