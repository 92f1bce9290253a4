"""A rank for each leaf: the most that a number of bytes carries, or the fewest bytes for a loss."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import check_flag, check_function, check_static_number
from jaxcomp._base.leaves import FACTOR_DTYPES, checked_dtype, is_floating, leaf_name
from jaxcomp._base.typing import DType, KeyPath, MatrixDimsFn, PyTree
from jaxcomp._bytes.gap import read_momentum, spectra_of
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import LeafPlan, is_compressed, plan_leaves
from jaxcomp._reducers.low_rank import leaf_bytes

# A squared singular value below this share of the largest is rounding of a float32 gradient.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, as a function is
class Ranks:
    """A rank for each leaf, as a function of (key path, leaf): what `powersgd` takes.

    Attributes:
      by_leaf: From names of leaves to ranks; None leaves the leaf uncompressed. Saved as JSON
        beside a checkpoint, it makes the same ranks again: ``Ranks(json.loads(text))``.
    """

    by_leaf: dict[str, int | None]

    def __call__(self, path: KeyPath, leaf: Any) -> int | None:
        """Returns the rank of a leaf.

        Raises:
          ValueError: If there was no gradient of it.
        """
        del leaf
        name = leaf_name(path)
        if name not in self.by_leaf:
            raise ValueError(
                f"ranks_by_spectrum saw no gradient of the leaf {name}. Make the ranks with a tree "
                "like the one that is compressed."
            )
        return self.by_leaf[name]


def ranks_by_spectrum(
    gradients: PyTree,
    *,
    ratio: float | None = None,
    loss_budget: str | float | None = None,
    adaptive: bool = True,
    comm_dtype: DType | None = None,
    min_compression_rate: float = 2.0,
    matrix_dims: MatrixDimsFn | None = None,
) -> Ranks:
    r"""Chooses a rank for each leaf: where the spectrum is flat, more; where it falls, less.

    One more column for a leaf of ``rows x cols`` costs ``rows + cols`` values on the wire and sends
    :math:`\sigma_k^2`, the square of the next singular value. Columns are given out one after the
    other to the leaf that gains most per value,

    .. math::
        \frac{\sigma_k^2}{(\mathrm{rows} + \mathrm{cols})\, s}, \qquad
        s = \mathrm{rms}(G) \text{ with an adaptive optimizer, else } 1,

    until the step sends `ratio` times fewer values than the dense gradient, or `predict_gap` says
    no more than `loss_budget`. The division by the root mean square makes leaves comparable: Adam
    divides by about as much, so that the loss falls by :math:`|G|^2 / \mathrm{rms}(G)` of a leaf
    and not by :math:`|G|^2`. For a loss budget the singular values are those of
    :math:`\mu / \sqrt{\nu}`, which is divided already. A leaf that has got as many columns as
    `min_compression_rate` allows may be sent as it is in the end.

    Args:
      gradients: With `ratio` what a step would send: Adam's first moment after some hundred exact
        steps, or gradients averaged over some steps. The gradient of one small batch is mostly
        noise. With `loss_budget` the optimizer's state, as for `predict_gap`.
      ratio: How many times fewer values than an all-reduce; with the gradients' dtype on the wire,
        the ratio of ``tx.bytes(params)``.
      loss_budget: In the place of `ratio`, how far above the exact run the held-out loss may be
        expected to end: ``"0.5%"``, or 0.005.
      adaptive: Whether the optimizer scales gradients by their size, as Adam does; for `ratio`.
      comm_dtype: As for `powersgd`; where it is given, `ratio` is of bytes, the ratio of
        ``tx.bytes(params)``. With integers a value of an uncompressed leaf costs as much as four or
        five of a factor, so that fewer leaves are left alone. (Shares that cannot be equal add a
        little.)
      min_compression_rate: As for `powersgd`; pass the same to both.
      matrix_dims: As for `powersgd`; pass the same to both.

    Returns:
      A function of (key path, leaf) for the `rank` of `powersgd`: at least 1, or None for a leaf
      that is best left alone. Its ``by_leaf`` can be saved as JSON.

    Raises:
      ValueError: If an argument is unusable, a gradient is not finite, or rank 1 everywhere already
        sends more than the ratio allows. The function raises it for a leaf it has not seen.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> sharp, flat = jnp.diag(jnp.array([1.0] + 31 * [1e-3])), jnp.eye(32)
      >>> rank = jaxcomp.ranks_by_spectrum({"flat": flat, "sharp": sharp}, ratio=4.0)
      >>> tx = jaxcomp.powersgd(rank, axis_name="data")
      >>> stats = tx.bytes({"flat": flat, "sharp": sharp})
      >>> [leaf.rank for leaf in stats.leaves], stats.ratio
      ([7, 1], 4.0)
    """
    if (ratio is None) == (loss_budget is None):
        raise ValueError(
            "Pass either `ratio`, for so many times fewer bytes, or `loss_budget`, for a loss so "
            "far above the exact run's."
        )
    check_flag("adaptive", adaptive)
    check_function("matrix_dims", matrix_dims)
    wire = checked_dtype("comm_dtype", comm_dtype, FACTOR_DTYPES)
    rate = check_static_number("min_compression_rate", min_compression_rate, 0)
    momentum = None
    if loss_budget is None:
        spectra: Mapping[str, np.ndarray] = spectra_of(gradients, matrix_dims)
    else:
        momentum = read_momentum(gradients, matrix_dims)
        gradients = momentum.tree
        spectra = momentum.spectra
        adaptive = False
    plans = list(filter(is_floating, plan_leaves(gradients, 1, rate, matrix_dims)))
    ranks: dict[str, int | None] = {}
    offers = []
    for plan in plans:
        ranks[plan.path] = None
        if plan.view is not None:
            ranks[plan.path] = 1
            offers.append(_offers(plan, spectra[plan.path], wire, rate, scaled=adaptive))
    # Of each leaf the next one, always of the leaf whose next carries most for its cost: the best
    # choice for any budget, because gains fall from column to column of a leaf.
    in_order = heapq.merge(*offers, key=lambda offer: (-offer.gain_per_value, offer.path))

    if momentum is not None:
        budget = momentum.law.tail(parse("loss_budget", loss_budget or 0.0))
        beyond = momentum.tail({path: 1 for path, rank in ranks.items() if rank})
        for offer in in_order:
            if beyond <= budget:
                break
            ranks[offer.path] = offer.rank
            beyond -= offer.energy / momentum.energy
        return Ranks(ranks)

    ratio = check_static_number("ratio", ratio, 1)
    dense = 0
    spent = 0
    unit = "values"
    for plan in plans:
        spent += _cost(plan, wire)
        if wire is None:
            dense += plan.size
        else:
            dense += plan.size * jnp.dtype(plan.dtype).itemsize
            unit = "bytes"
    left = dense / ratio - spent
    if left < 0:
        raise ValueError(
            f"rank 1 everywhere already sends {spent:.0f} {unit}, and ratio={ratio:g} allows "
            f"{dense / ratio:.0f}. Pass a ratio of at most {dense / spent:.1f}."
        )
    for offer in in_order:
        # What is too dear for a leaf once is so for good, and its later columns with it.
        if offer.cost <= left and ranks[offer.path] == offer.before:
            ranks[offer.path] = offer.rank
            left -= offer.cost
    return Ranks(ranks)


class _Offer(NamedTuple):
    """One more column for a leaf, or at last all the rest of it."""

    path: str
    before: int  # its rank
    rank: int | None  # and then; None leaves it uncompressed
    cost: int  # bytes, or values
    energy: float  # that it sends
    gain_per_value: float


def _offers(
    plan: LeafPlan, energy: np.ndarray, wire: Any, rate: float, *, scaled: bool
) -> Iterator[_Offer]:
    """Yields what a leaf could get after its first column, one after the other.

    Args:
      plan: The leaf's plan, with rank 1.
      energy: Its squared singular values, largest first.
      wire: What factors travel in; None to count values in the place of bytes.
      rate: Least compression of a leaf, as for `powersgd`.
      scaled: Whether the energy is divided by the root mean square of the leaf.
    """
    assert plan.view is not None
    rows = plan.view.n_rows
    cols = plan.view.n_cols
    column = _cost(plan, wire)  # of rank 1: one column for each matrix of the batch
    scale = 1.0
    if scaled:
        scale = np.sqrt(energy.sum() / plan.size)
    rank = 1
    last = False
    while not last:
        last = rank + 1 >= min(rows, cols) or not is_compressed(rows, cols, rank + 1, rate)
        after: int | None = rank + 1
        cost = column
        sent = energy[rank]
        if last:
            after = None
            dense = dataclasses.replace(plan, view=None, rank=0)
            cost = _cost(dense, wire) - column * rank
            sent = energy[rank:].sum()
        if sent <= _ROUNDING * energy[0]:
            return
        yield _Offer(plan.path, rank, after, cost, sent, sent / (cost * scale))
        rank += 1


def _cost(plan: LeafPlan, wire: Any) -> int:
    """Returns the bytes that a leaf puts on the wire, or its values without a wire."""
    if wire is None:
        return plan.wire_size
    return leaf_bytes(plan, wire, 1)
