"""Which rank each leaf should have, so that a given number of bytes carries the most."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import check_flag, check_function, check_static_number
from jaxcomp._base.leaves import checked_factor_dtype, leaf_name
from jaxcomp._base.typing import DType, KeyPath, MatrixDimsFn, PyTree
from jaxcomp._lowrank.matrices import LeafPlan, is_compressed, plan_leaves
from jaxcomp._reducers.factor_bytes import leaf_bytes

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
    ratio: float,
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

    until the step sends `ratio` times fewer values than the dense gradient. The division by the
    root mean square makes leaves comparable: Adam divides by about as much, so that the loss falls
    by :math:`|G|^2 / \mathrm{rms}(G)` of a leaf and not by :math:`|G|^2`. A leaf that has got as
    many columns as `min_compression_rate` allows may be sent as it is in the end.

    Args:
      gradients: What a step would send: Adam's first moment after some hundred exact steps, or
        gradients averaged over some steps. The gradient of one small batch is mostly noise.
      ratio: How many times fewer values than an all-reduce; with the gradients' dtype on the wire,
        the ratio of ``tx.bytes(params)``.
      adaptive: Whether the optimizer scales gradients by their size, as Adam does.
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
    check_static_number("ratio", ratio, 1)
    check_flag("adaptive", adaptive)
    wire = checked_factor_dtype("comm_dtype", comm_dtype)
    rate = check_static_number("min_compression_rate", min_compression_rate, 0)
    check_function("matrix_dims", matrix_dims)
    plans = [
        plan
        for plan in plan_leaves(gradients, 1, rate, matrix_dims)
        if jnp.issubdtype(plan.dtype, jnp.floating)
    ]

    def cost(plan: LeafPlan) -> int:
        return plan.wire_size if wire is None else leaf_bytes(plan, wire, 1)

    def next_column(plan: LeafPlan, rank: int) -> tuple[int, bool]:
        """What one more column costs, and True; after the last one the dense leaf, and False."""
        assert plan.view is not None
        rows, cols = plan.view.n_rows, plan.view.n_cols
        if rank + 1 < min(rows, cols) and is_compressed(rows, cols, rank + 1, rate):
            return cost(plan), True  # of rank 1: one column for each matrix of the batch
        return cost(dataclasses.replace(plan, view=None, rank=0)) - cost(plan) * rank, False

    spectra = _spectra(gradients, plans)
    widths = [1 if wire is None else jnp.dtype(plan.dtype).itemsize for plan in plans]
    budget = sum(n * plan.size for n, plan in zip(widths, plans, strict=True)) / ratio
    spent = sum(map(cost, plans))
    if spent > budget:
        raise ValueError(
            f"rank 1 everywhere already sends {spent} {'values' if wire is None else 'bytes'}, and "
            f"ratio={ratio:g} allows {budget:.0f}. Pass a ratio of at most "
            f"{ratio * budget / spent:.1f}."
        )
    return Ranks(_give_out(plans, spectra, budget - spent, adaptive, next_column))


def _spectra(gradients: PyTree, plans: list[LeafPlan]) -> dict[str, np.ndarray]:
    """Squared singular values of each compressed leaf, largest first, summed over its batch."""
    views = {plan.path: plan.view for plan in plans}
    spectra = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        name = leaf_name(path)
        view = views.get(name)
        if view is None:
            continue
        matrix = np.asarray(view.matricize(jnp.asarray(leaf)), np.float64)
        if not np.isfinite(matrix).all():
            raise ValueError(f"The gradient {name} is not finite. Average over other steps.")
        # Of the smaller Gram matrix: a vocabulary of 50 000 rows costs no more than its features.
        if matrix.shape[-2] < matrix.shape[-1]:
            matrix = np.swapaxes(matrix, -1, -2)
        values = np.linalg.eigvalsh(np.swapaxes(matrix, -1, -2) @ matrix)[..., ::-1]
        spectra[name] = np.maximum(values, 0).reshape(-1, values.shape[-1]).sum(0)
    return spectra


def _give_out(
    plans: list[LeafPlan],
    spectra: dict[str, np.ndarray],
    budget: float,
    adaptive: bool,
    next_column: Callable[[LeafPlan, int], tuple[int, bool]],
) -> dict[str, int | None]:
    """The rank of every leaf; None: not compressed. Greedy, as gains fall from column to column."""
    ranks: dict[str, int | None] = {plan.path: 1 if plan.view else None for plan in plans}
    offers: list[tuple[float, str, LeafPlan]] = []

    def offer(plan: LeafPlan, energy: np.ndarray, rank: int) -> None:
        """Puts the next column of a leaf, or after the last one the rest of it, on offer."""
        cost, allowed = next_column(plan, rank)
        gain = energy[rank] if allowed else energy[rank:].sum()
        scale = np.sqrt(energy.sum() / plan.size) if adaptive else 1.0
        if gain > _ROUNDING * energy[0]:
            heapq.heappush(offers, (-gain / (cost * scale), plan.path, plan))

    for plan in plans:
        if plan.view:
            offer(plan, spectra[plan.path], 1)
    while offers:
        _, path, plan = heapq.heappop(offers)
        rank = ranks[path]
        assert rank is not None
        cost, allowed = next_column(plan, rank)
        if cost > budget:
            continue
        budget -= cost
        ranks[path] = rank + 1 if allowed else None
        if allowed:
            offer(plan, spectra[path], rank + 1)
    return ranks
