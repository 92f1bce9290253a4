"""What becomes of the value and the auxiliary output of every replica.

Nothing is averaged that is not a mean. The loop without replicas says what is right: a floating
scalar is a mean over the examples, what has a row for each example is as long as the whole batch,
other floating arrays (BatchNorm's statistics) are means. Of all else nobody knows, so it is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import as_local, known_equal, mean_each, total
from jaxcomp._mesh.weights import weighted_gradients

CHOICES = ("mean", "sum", "join", "stack")


class Outputs(NamedTuple):
    """The leaves of one replica's value and auxiliary output, by what becomes of them."""

    whole: dict[int, Any]  # equal on all replicas by now
    rows: dict[int, Any]  # to be laid one after the other; that axis in front


class Reported:
    """Value and auxiliary output of a step: judged, taken apart on a replica, and put together."""

    def __init__(self, aux: PyTree, axis_name: AxisName):
        """For one call; `aux` is the user's choice: None, one of `CHOICES`, or a tree of them."""
        self._aux, self._axis_name = aux, axis_name
        self._treedef: Any = None
        # For each leaf "equal", one of CHOICES, or the axis along which its examples lie.
        self._kinds: list[str | int] = []

    def decide(self, value: Any, rows: set[int], larger: Callable[[], PyTree]) -> None:
        """Finds what becomes of each output.

        Args:
          value: A scalar, or (scalar, auxiliary).
          rows: How many examples this replica has.
          larger: Gives the same as shapes for a batch twice as large. It may fail.

        Raises:
          ValueError: Naming an output of which nobody knows what it is, with the choice.
        """
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(value)
        leaves = [jnp.asarray(x) for _, x in paths]
        choices = [
            "equal" if c in (None, "mean") and known_equal(x, self._axis_name) else c
            for x, c in zip(leaves, self._choices(value), strict=True)
        ]
        twice: list[Any] = [None] * len(leaves)
        if any(x.ndim and choice is None for x, choice in zip(leaves, choices, strict=True)):
            # Whatever a function does that wants the one size of its batch: then nothing is known.
            with contextlib.suppress(Exception):
                twice = jax.tree.leaves(larger())
        self._kinds = [
            _kind(path, x, choice, large, rows)
            for (path, _), x, choice, large in zip(paths, leaves, choices, twice, strict=True)
        ]

    def apart(self, value: Any, weight: Array | None) -> Outputs:
        """On a replica: the leaves, averaged, summed, or as rows.

        Args:
          value: As for `decide`.
          weight: How much this replica counts; None if all count the same.
        """
        found = Outputs({}, {})
        averaged: dict[int, Array] = {}
        for i, (leaf, kind) in enumerate(zip(jax.tree.leaves(value), self._kinds, strict=True)):
            x = jnp.asarray(leaf)
            if kind == "equal":
                found.whole[i] = x
                continue
            x = as_local(x, self._axis_name)
            if kind == "mean":
                averaged[i] = x
            elif kind == "sum":
                x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
                found.whole[i] = total(x, self._axis_name)
            else:
                found.rows[i] = x[None] if kind == "stack" else jnp.moveaxis(x, int(kind), 0)
        wide = {i: x.astype(compute_dtype(x.dtype)) for i, x in averaged.items()}
        if weight is not None and wide:
            wide = weighted_gradients(wide, weight, self._axis_name)
        means = mean_each(list(wide.values()), self._axis_name)
        for i, mean in zip(averaged, means, strict=True):
            found.whole[i] = mean.astype(averaged[i].dtype)
        return found

    def specs(self) -> Outputs:
        """Where `apart` leaves its leaves, for ``out_specs``."""
        whole: Any = PartitionSpec()
        rows: Any = PartitionSpec(self._axis_name)
        return Outputs(whole, rows)

    def together(self, found: Outputs) -> Any:
        """Outside, or where everybody keeps its own rows: in the form that the function gave."""
        leaves = dict(found.whole)
        for i, x in found.rows.items():
            kind = self._kinds[i]
            leaves[i] = x if kind == "stack" else jnp.moveaxis(x, 0, int(kind))
        return self._treedef.unflatten([leaves[i] for i in range(len(leaves))])

    def _choices(self, value: Any) -> list[str | None]:
        """What the user asked for, for each leaf; the value itself is a mean."""
        if not isinstance(value, tuple):
            return ["mean"]
        asked = jax.tree.broadcast(_whole(self._aux, value[1]), value[1])
        return ["mean", *(choice or None for choice in jax.tree.leaves(asked))]


def _whole(choice: PyTree, aux: Any) -> PyTree:
    """The choice with "" for None, and for what a dictionary does not name.

    Raises:
      ValueError: If it names what is not there.
    """
    if not (isinstance(choice, Mapping) and isinstance(aux, Mapping)):
        return jax.tree.map(lambda c: c or "", choice, is_leaf=lambda c: c is None)
    if unknown := sorted(str(name) for name in choice if name not in aux):
        raise ValueError(
            f"`aux` names {unknown[0]!r}; the auxiliary output has {', '.join(map(repr, aux))}."
        )
    kind: Any = type(aux)
    return kind({name: _whole(choice.get(name), x) for name, x in aux.items()})


def _kind(path: KeyPath, x: Array, choice: str | None, twice: Any, rows: set[int]) -> str | int:
    """What becomes of an output: "equal", one of `CHOICES`, or the axis of its examples.

    Raises:
      ValueError: If nobody knows, or it cannot be what the user chose.
    """
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if choice == "mean" and not floating:
        raise ValueError(_question(path, x, "has no mean over the replicas"))
    if choice == "join" and not x.ndim:
        raise ValueError(_question(path, x, "is a scalar, of which nothing can be joined"))
    if choice is not None:
        return 0 if choice == "join" else choice
    if twice is not None and np.shape(twice) != x.shape:
        pairs = enumerate(zip(np.shape(twice), x.shape, strict=False))
        changed = [(axis, more, n) for axis, (more, n) in pairs if more != n]
        if twice.ndim == x.ndim and len(changed) == 1 and changed[0][1] == 2 * changed[0][2]:
            return changed[0][0]
        raise ValueError(_question(path, x, "grows with the batch in an unusual way"))
    if twice is None and rows & set(x.shape):
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


def _question(path: KeyPath, x: Array, why: str) -> str:
    return (
        f"The auxiliary output {leaf_name(path[1:])}, {x.dtype} of shape {x.shape}, {why}. Say "
        'what becomes of it: aux="sum" adds up counts, "join" lays rows in order, "stack" '
        'gives an axis of replicas, "mean" averages; or a tree of these for single outputs, with '
        "None for the others."
    )
