"""A rank for each leaf: the most that a number of bytes carries, or the fewest bytes for a loss."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import check_flag, check_function, check_static_number
from jaxcomp._base.leaves import checked_factor_dtype, leaf_name
from jaxcomp._base.typing import DType, KeyPath, MatrixDimsFn, PyTree
from jaxcomp._bytes.gap import Momentum, read_momentum, spectra_of
from jaxcomp._bytes.units import parse
from jaxcomp._lowrank.matrices import LeafPlan, is_compressed, plan_leaves
from jaxcomp._reducers.factor_wire import leaf_bytes

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
        """The rank of a leaf.

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
    r"""Ranks for `powersgd`, leaf by leaf: where the spectrum is flat, more; where it falls, less.

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
      that is best left alone. Its ``by_leaf`` is fit for JSON.

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
    wire = checked_factor_dtype("comm_dtype", comm_dtype)
    rate = check_static_number("min_compression_rate", min_compression_rate, 0)
    if loss_budget is not None:
        momentum = read_momentum(gradients, matrix_dims)
        plans = _floating_plans(momentum.tree, rate, matrix_dims)
        offers = _Columns(plans, momentum.spectra, wire, rate, scaled=False)
        return Ranks(offers.within_loss(momentum, parse("loss_budget", loss_budget)))
    ratio = check_static_number("ratio", ratio, 1)
    plans = _floating_plans(gradients, rate, matrix_dims)
    offers = _Columns(plans, spectra_of(gradients, matrix_dims), wire, rate, scaled=adaptive)
    return Ranks(offers.within_ratio(ratio))


def _floating_plans(tree: PyTree, rate: float, matrix_dims: MatrixDimsFn | None) -> list[LeafPlan]:
    plans = plan_leaves(tree, 1, rate, matrix_dims)
    return [plan for plan in plans if jnp.issubdtype(plan.dtype, jnp.floating)]


class _Columns:
    """Gives out columns one after the other, always the one that carries most for its cost.

    That is the best choice for any budget, because gains fall from column to column of a leaf.
    """

    def __init__(
        self,
        plans: list[LeafPlan],
        spectra: Mapping[str, np.ndarray],
        wire: Any,
        rate: float,
        *,
        scaled: bool,
    ):
        """Puts the second column of every leaf on offer; the first is everybody's.

        Args:
          plans: Of all floating leaves, with rank 1 for those that can be compressed.
          spectra: Squared singular values of those, largest first.
          wire: What factors travel in; None to count values in the place of bytes.
          rate: Least compression of a leaf, as for `powersgd`.
          scaled: Whether energies are divided by the root mean square of their leaf.
        """
        self._plans = plans
        self._spectra = spectra
        self._wire = wire
        self._rate = rate
        self._scaled = scaled
        self._offers: list[tuple[float, str, LeafPlan]] = []
        self.ranks: dict[str, int | None] = {}
        for plan in plans:
            self.ranks[plan.path] = None
            if plan.view is not None:
                self.ranks[plan.path] = 1
                self._offer(plan, 1)

    def within_ratio(self, ratio: float) -> dict[str, int | None]:
        """Returns the ranks of so many times fewer bytes, or values.

        Raises:
          ValueError: If rank 1 everywhere sends more.
        """
        dense = 0
        for plan in self._plans:
            width = 1 if self._wire is None else jnp.dtype(plan.dtype).itemsize
            dense += width * plan.size
        budget = dense / ratio
        spent = sum(self._cost(plan) for plan in self._plans)
        if spent > budget:
            unit = "values" if self._wire is None else "bytes"
            raise ValueError(
                f"rank 1 everywhere already sends {spent} {unit}, and ratio={ratio:g} allows "
                f"{budget:.0f}. Pass a ratio of at most {dense / spent:.1f}."
            )
        left = budget - spent
        while self._offers:
            plan = heapq.heappop(self._offers)[2]
            cost, _ = self._next(plan)
            if cost <= left:
                left -= cost
                self._take(plan)
        return self.ranks

    def within_loss(self, momentum: Momentum, budget: float) -> dict[str, int | None]:
        """Returns the ranks with which no more than a share of the loss is expected to be lost."""
        total = sum(energy.sum() for energy in self._spectra.values())
        allowed = momentum.law.tail(budget) * total
        beyond = momentum.tail(self._compressed()) * total
        while self._offers and beyond > allowed:
            beyond -= self._take(heapq.heappop(self._offers)[2])
        return self.ranks

    def _compressed(self) -> dict[str, int]:
        return {path: rank for path, rank in self.ranks.items() if rank is not None}

    def _take(self, plan: LeafPlan) -> float:
        """Gives a leaf what was offered to it, and puts its next column on offer.

        Returns:
          The energy that is sent thereby.
        """
        rank = self.ranks[plan.path]
        assert rank is not None
        energy = self._spectra[plan.path]
        _, is_column = self._next(plan)
        if not is_column:
            self.ranks[plan.path] = None
            return energy[rank:].sum()
        self.ranks[plan.path] = rank + 1
        self._offer(plan, rank + 1)
        return energy[rank]

    def _offer(self, plan: LeafPlan, rank: int) -> None:
        """Puts the next column of a leaf of this rank, or after the last the rest, on offer."""
        energy = self._spectra[plan.path]
        cost, is_column = self._next(plan)
        gain = energy[rank] if is_column else energy[rank:].sum()
        scale = 1.0
        if self._scaled:
            scale = np.sqrt(energy.sum() / plan.size)
        if gain > _ROUNDING * energy[0]:
            heapq.heappush(self._offers, (-gain / (cost * scale), plan.path, plan))

    def _next(self, plan: LeafPlan) -> tuple[int, bool]:
        """Returns the cost of one more column and True; at last the dense leaf's and False."""
        rank = self.ranks[plan.path]
        assert plan.view is not None
        assert rank is not None
        rows, cols = plan.view.n_rows, plan.view.n_cols
        column = self._cost(plan)  # of rank 1: one column for each matrix of the batch
        if rank + 1 < min(rows, cols) and is_compressed(rows, cols, rank + 1, self._rate):
            return column, True
        dense = self._cost(dataclasses.replace(plan, view=None, rank=0))
        return dense - column * rank, False

    def _cost(self, plan: LeafPlan) -> int:
        """Returns the bytes that a leaf puts on the wire, or its values without a wire."""
        return plan.wire_size if self._wire is None else leaf_bytes(plan, self._wire, 1)
