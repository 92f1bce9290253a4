"""Chooses a rank for each leaf, for a ratio of compression or a budget of loss.

One rank for all leaves is seldom best: a spectrum that falls fast needs few columns.
`ranks_by_spectrum` starts with rank 1 everywhere and adds one column at a time where it sends most
energy for its bytes, until the budget is spent. It returns a `Ranks`, which `powersgd` takes as its
`rank`.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import (
    answers_other_names,
    check_flag,
    check_static_number,
)
from jaxcomp._base.leaves import (
    FACTOR_DTYPES,
    check_values,
    checked_dtype,
    checked_params,
    is_floating,
    leaf_name,
)
from jaxcomp._base.typing import DType, KeyPath, MatrixDimsFn, PyTree
from jaxcomp._bytes.gap import Measured, read_momentum, spectra_of
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import LeafPlan, is_compressed, plan_leaves
from jaxcomp._reducers.low_rank import leaf_bytes

# A squared singular value below this fraction of the largest is rounding of a float32 gradient.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, as a function is
class Ranks:
    """Returns a rank for (key path, leaf): a function for the `rank` of `powersgd`.

    Attributes:
      by_leaf: Ranks by the names of leaves; None leaves the leaf uncompressed. Save it as JSON
        beside a checkpoint, and ``Ranks(json.loads(text))`` gives the same ranks again.
    """

    by_leaf: dict[str, int | None]

    def __post_init__(self) -> None:
        """Refuses a single rank.

        Raises:
          ValueError: If `by_leaf` is not a dict.
        """
        if not isinstance(self.by_leaf, Mapping):
            raise ValueError(
                f"`by_leaf` must be a dict of ranks by the names of leaves, got {self.by_leaf!r}. "
                "One rank for all leaves is an integer: jaxcomp.powersgd(rank=4, ...)."
            )

    def __call__(self, path: KeyPath, leaf: Any) -> int | None:
        """Returns the rank of a leaf.

        Raises:
          ValueError: If the ranks were chosen without a gradient of the leaf.
        """
        del leaf
        name = leaf_name(path)
        if name not in self.by_leaf:
            raise ValueError(
                f"ranks_by_spectrum saw no gradient of the leaf {name}. Make the ranks with a tree "
                "like the one that is compressed, or give the leaf a rank: "
                f"jaxcomp.Ranks({{**ranks.by_leaf, {name!r}: 8}})."
            )
        return self.by_leaf[name]


@answers_other_names
def ranks_by_spectrum(
    gradients: PyTree,
    *,
    ratio: float | None = None,
    loss_budget: str | float | None = None,
    measured: Measured | None = None,
    adaptive: bool = True,
    comm_dtype: DType | None = None,
    min_compression_rate: float = 2.0,
    matrix_dims: MatrixDimsFn | None = None,
) -> Ranks:
    r"""Chooses a rank for each leaf: high where its spectrum is flat, low where it falls fast.

    One more column for a leaf of ``rows x cols`` costs ``rows + cols`` values on the wire and sends
    the energy :math:`\sigma_k^2`, the square of the next singular value. Each next column goes to
    the leaf that gains most per value,

    .. math::
        \frac{\sigma_k^2}{(\mathrm{rows} + \mathrm{cols})\, s}, \qquad
        s = \mathrm{rms}(G) \text{ with an adaptive optimizer, else } 1,

    as long as the step sends at least `ratio` times fewer values than the dense gradient, or until
    the predicted gap is within `loss_budget`. The division by the root mean square makes leaves
    comparable: Adam divides by about that value, so a leaf lowers the loss by
    :math:`|G|^2 / \mathrm{rms}(G)` and not by :math:`|G|^2`. For a loss budget the singular values
    are those of :math:`\mu / \sqrt{\nu}`, and :math:`s = 1`. If a leaf has the highest rank that
    `min_compression_rate` allows, what is left is to send it uncompressed.

    Args:
      gradients: With `ratio`, typical gradients: Adam's first moment after some hundred exact
        steps, or gradients averaged over some steps. (The gradient of one small batch is mostly
        noise.) With `loss_budget`, the optimizer's state, as for `predict_gap`.
      ratio: How many times fewer values a step sends than an all-reduce does. With the gradients'
        dtype on the wire this is the ratio of ``tx.bytes(params)``.
      loss_budget: Instead of `ratio`: how far above the exact run's held-out loss the expected loss
        may end, ``"0.5%"`` or 0.005.
      measured: With `loss_budget`, as for `predict_gap`: a rank that was run, and its gap.
      adaptive: True if the optimizer scales gradients by their size, as Adam does. Read only with
        `ratio`.
      comm_dtype: The wire dtype, as for `powersgd`. If it is passed, `ratio` counts bytes and is
        the ratio of ``tx.bytes(params)``. With integers, one value of an uncompressed leaf costs as
        much as four or five values of a factor, so fewer leaves stay uncompressed. (Padding to
        equal shares adds a little.)
      min_compression_rate: Pass the same value as to `powersgd`.
      matrix_dims: Pass the same function as to `powersgd`.

    Returns:
      A function of (key path, leaf) for the `rank` of `powersgd`. It returns a rank of at least 1,
      or None for a leaf that is cheaper uncompressed. Its ``by_leaf`` can be saved as JSON.

    Raises:
      ValueError: If an argument is unusable, a gradient is not finite, or rank 1 for every leaf
        sends more than the ratio allows. The returned function raises it for an unknown leaf.

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
            "Pass either `ratio`, how many times fewer bytes to send, or `loss_budget`, how far "
            "above the exact run's loss the loss may end."
        )
    if measured is not None and loss_budget is None:
        raise ValueError("`measured` is read only with `loss_budget`: leave it out with `ratio`.")
    check_flag("adaptive", adaptive)
    wire = checked_dtype("comm_dtype", comm_dtype, FACTOR_DTYPES)
    momentum = None
    if loss_budget is None:
        gradients = checked_params("gradients", gradients)
        check_values("gradients", gradients, on_host=True)
        spectra: Mapping[str, np.ndarray] = spectra_of(gradients, matrix_dims)
    else:
        momentum = read_momentum(gradients, matrix_dims, measured, min_compression_rate)
        gradients = momentum.tree
        spectra = momentum.spectra
        adaptive = False  # the spectra are those of steps, which the optimizer has scaled already
    plans = list(filter(is_floating, plan_leaves(gradients, 1, min_compression_rate, matrix_dims)))
    ranks: dict[str, int | None] = {}
    offers = []
    for plan in plans:
        ranks[plan.path] = None
        if plan.view is not None:
            ranks[plan.path] = 1
            offers.append(
                _offers(plan, spectra[plan.path], wire, min_compression_rate, scaled=adaptive)
            )
    # Always the column with the most energy for its cost. This is optimal for any budget, because
    # the gain falls from one column of a leaf to the next.
    in_order = heapq.merge(*offers, key=lambda offer: (-offer.gain_per_value, offer.path))

    if momentum is None:
        _spend_bytes(in_order, plans, wire, check_static_number("ratio", ratio, 1), ranks)
        return Ranks(ranks)
    assert loss_budget is not None
    most = momentum.law.largest_tail(parse("loss_budget", loss_budget))
    tail = momentum.tail({path: 1 for path, rank in ranks.items() if rank})
    for offer in in_order:
        if tail <= most:
            break
        ranks[offer.path] = offer.rank
        tail -= offer.energy / momentum.energy
    return Ranks(ranks)


def _spend_bytes(
    in_order: Iterable[_Offer],
    plans: Sequence[LeafPlan],
    wire: Any,
    ratio: float,
    ranks: dict[str, int | None],
) -> None:
    """Takes offers into `ranks` as long as the step sends `ratio` times less than all gradients.

    Raises:
      ValueError: If rank 1 for every leaf sends more than that.
    """
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
        possible = math.floor(10 * dense / spent) / 10  # rounded down, so that it can be reached
        raise ValueError(
            f"Even rank 1 for every leaf sends {spent:.0f} {unit}, but ratio={ratio:g} allows only "
            f"{dense / ratio:.0f}. Pass a ratio of at most {possible:.1f}."
        )
    for offer in in_order:
        # A leaf whose next column costs too much gets no later column either.
        if offer.cost <= left and ranks[offer.path] == offer.before:
            ranks[offer.path] = offer.rank
            left -= offer.cost


class _Offer(NamedTuple):
    """Offers one more column for a leaf, or the whole leaf uncompressed."""

    path: str
    before: int  # the rank before
    rank: int | None  # the rank after; None leaves the leaf uncompressed
    cost: int  # in bytes, or in values without a wire dtype
    energy: float  # squared singular values that the column adds
    gain_per_value: float


def _offers(
    plan: LeafPlan, energy: np.ndarray, wire: Any, rate: float, *, scaled: bool
) -> Iterator[_Offer]:
    """Yields the possible next columns of a leaf, one after the other, from the second one on.

    Args:
      plan: The leaf's plan, with rank 1.
      energy: Its squared singular values, largest first.
      wire: The wire dtype of the factors; None counts values instead of bytes.
      rate: The least compression rate of a leaf, `min_compression_rate` of `powersgd`.
      scaled: Whether the energy is divided by the root mean square of the leaf.
    """
    assert plan.view is not None
    rows = plan.view.n_rows
    cols = plan.view.n_cols
    column = _cost(plan, wire)  # cost at rank 1: one column for each matrix of the batch
    scale = 1.0
    if scaled:
        scale = np.sqrt(energy.sum() / plan.size)
    for rank in range(1, min(rows, cols)):
        after: int | None = rank + 1
        cost = column
        sent = energy[rank]
        if after == min(rows, cols) or not is_compressed(rows, cols, after, rate):
            # The rule allows no further column, so what is left to offer is the whole leaf.
            after = None
            dense = dataclasses.replace(plan, view=None, rank=0)
            cost = _cost(dense, wire) - column * rank
            sent = energy[rank:].sum()
        if sent <= _ROUNDING * energy[0]:
            return
        yield _Offer(plan.path, rank, after, cost, sent, sent / (cost * scale))
        if after is None:
            return


def _cost(plan: LeafPlan, wire: Any) -> int:
    """Returns the bytes that a leaf sends, or the number of values if `wire` is None."""
    if wire is None:
        return plan.wire_size
    # As for one replica: padding to equal shares depends on their number, and is little.
    return leaf_bytes(plan, wire, 1)
