"""What becomes of the value and the auxiliary output of every replica.

Nothing is averaged that is not a mean. The loop without replicas says what is right: a floating
scalar is a mean over the examples, what has a row for each example is as long as the whole batch,
other floating arrays (BatchNorm's statistics) are means. Of all else nobody knows, so it is asked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.axes import as_local, known_equal
from jaxcomp._mesh.collectives import mean_each, total

CHOICES = ("mean", "sum", "join", "stack")


class Outputs(NamedTuple):
    """The leaves of one replica's value and auxiliary output, by what becomes of them."""

    whole: dict[int, Any]  # equal on all replicas by now
    rows: dict[int, Any]  # to be laid one after the other; that axis in front


class Reported:
    """Value and auxiliary output of a step, taken apart on a replica and put together outside."""

    def __init__(self, aux: PyTree, axis_name: AxisName, rows: set[int]):
        """For one call.

        Args:
          aux: The user's choice: None, one of `CHOICES`, or a tree of them.
          axis_name: The mapped axis or axes.
          rows: How many examples one replica has.
        """
        self._aux, self._axis_name, self._rows = aux, axis_name, rows
        self._treedef: Any = None
        self._axes: dict[int, int] = {}  # where the examples of a joined leaf lie

    def asks(self, value: Any) -> bool:
        """Whether there is an output of which it matters how it grows with the batch."""
        leaves = jax.tree.leaves(value)
        return any(
            jnp.ndim(x) and choice is None and not known_equal(x, self._axis_name)
            for x, choice in zip(leaves, self._choices(value), strict=True)
        )

    def apart(self, value: Any, twice: PyTree | None, weight: Array | None) -> Outputs:
        """On a replica: the leaves, averaged, summed, or as rows.

        Args:
          value: A scalar, or (scalar, auxiliary).
          twice: The same as shapes for a batch twice as large, if `asks`; None if unknown.
          weight: How much this replica counts; None if all count the same.

        Raises:
          ValueError: Naming an output of which nobody knows what it is, with the choice.
        """
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(value)
        leaves = [jnp.asarray(x) for _, x in paths]
        choices = self._choices(value)
        larger = [None] * len(leaves) if twice is None else jax.tree.leaves(twice)
        found = Outputs({}, {})
        averaged: dict[int, Array] = {}
        for i, ((path, _), x, choice) in enumerate(zip(paths, leaves, choices, strict=True)):
            if choice in (None, "mean") and known_equal(x, self._axis_name):
                found.whole[i] = x
                continue
            kind = choice or self._kind(path, x, larger[i])
            x = as_local(x, self._axis_name)
            if kind == "mean":
                averaged[i] = _floating(path, x)
            elif kind == "sum":
                x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
                found.whole[i] = total(x, self._axis_name)
            elif kind == "stack":
                self._axes[i], found.rows[i] = 0, x[None]
            else:
                axis = kind if isinstance(kind, int) else _leading(path, x)
                self._axes[i], found.rows[i] = axis, jnp.moveaxis(x, axis, 0)
        means = _weighted(list(averaged.values()), weight, self._axis_name)
        found.whole.update(zip(averaged, means, strict=True))
        return found

    def specs(self) -> Outputs:
        """Where `apart` leaves its leaves, for ``out_specs``."""
        whole: Any = PartitionSpec()
        rows: Any = PartitionSpec(self._axis_name)
        return Outputs(whole, rows)

    def together(self, found: Outputs) -> Any:
        """Outside, or where everybody keeps its own rows: in the form that the function gave."""
        rows = {i: jnp.moveaxis(x, 0, self._axes[i]) for i, x in found.rows.items()}
        leaves = {**found.whole, **rows}
        return self._treedef.unflatten([leaves[i] for i in range(len(leaves))])

    def _choices(self, value: Any) -> list[str | None]:
        """What the user asked for, for each leaf; the value itself is a mean."""
        if not isinstance(value, tuple):
            return ["mean"]
        is_none = lambda x: x is None  # noqa: E731
        given = jax.tree.broadcast(self._aux, value[1], is_leaf=is_none)
        flat = jax.tree.leaves(given, is_leaf=is_none)
        present = jax.tree.leaves(value[1], is_leaf=is_none)
        return ["mean", *(c for c, x in zip(flat, present, strict=True) if x is not None)]

    def _kind(self, path: KeyPath, x: Array, twice: Any) -> str | int:
        """The default: "mean", or the axis along which the leaf grows with the batch.

        Raises:
          ValueError: If it is neither.
        """
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        if twice is not None and np.shape(twice) != x.shape:
            pairs = enumerate(zip(np.shape(twice), x.shape, strict=False))
            changed = [(axis, more, n) for axis, (more, n) in pairs if more != n]
            if twice.ndim == x.ndim and len(changed) == 1 and changed[0][1] == 2 * changed[0][2]:
                return changed[0][0]
            raise ValueError(_question(path, x, "grows with the batch in an unusual way"))
        if twice is None and self._rows & set(x.shape):
            raise ValueError(_question(path, x, "may hold a row for each example, or may not"))
        if not floating:
            raise ValueError(_question(path, x, "has no rows of examples and no mean"))
        return "mean"


def check_aux(aux: PyTree) -> None:
    """Refuses what is no choice.

    Raises:
      ValueError: Naming it.
    """
    wrong = [kind for kind in jax.tree.leaves(aux) if kind not in CHOICES]
    if wrong:
        raise ValueError(
            f"`aux` must be one of {CHOICES}, a tree of them, or None, got {wrong[0]!r}."
        )


def _weighted(xs: list[Array], weight: Array | None, axis_name: AxisName) -> list[Array]:
    """Weighted means, in one all-reduce for each dtype; what a replica of weight 0 has is left."""
    wide = [x.astype(compute_dtype(x.dtype)) for x in xs]
    if weight is None:
        means = mean_each(wide, axis_name)
    else:
        wide = [jnp.where(weight == 0, 0, x * weight.astype(x.dtype)) for x in wide]
        *means, mean_weight = mean_each([*wide, weight], axis_name)
        means = [mean / mean_weight.astype(mean.dtype) for mean in means]
    return [mean.astype(x.dtype) for mean, x in zip(means, xs, strict=True)]


def _floating(path: KeyPath, x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x
    raise ValueError(_question(path, x, "has no mean over the replicas"))


def _leading(path: KeyPath, x: Array) -> int:
    if x.ndim:
        return 0
    raise ValueError(_question(path, x, "is a scalar, of which nothing can be joined"))


def _question(path: KeyPath, x: Array, why: str) -> str:
    return (
        f"The auxiliary output {leaf_name(path[1:])}, {x.dtype} of shape {x.shape}, {why}. Say "
        'what becomes of it: aux="sum" adds up counts, "join" lays rows in order, "stack" '
        'gives an axis of replicas, "mean" averages; or a tree of these for single outputs, with '
        "None for the others."
    )
