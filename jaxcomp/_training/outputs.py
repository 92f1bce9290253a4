"""What becomes of the value and the auxiliary output of every replica: as the user says.

Whether a number is a mean, a sum or one of a kind, no type tells. So nothing is averaged, added up
or joined without a word for it. `jaxcomp._training.examine` finds the words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, known_equal, mean_each, total
from jaxcomp._mesh.weights import weighted_gradients
from jaxcomp._training.arguments import is_array

CHOICES = ("mean", "sum", "join", "stack")
# What becomes of a leaf that all replicas hold alike: it stays as it is.
_EQUAL = "equal"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The leaves of value and auxiliary output, and what becomes of each.

    The latter are static, so they pass through any mapping of JAX beside the arrays.
    """

    leaves: list[Any]
    treedef: Any = dataclasses.field(metadata={"static": True})
    # For each leaf "equal", "mean", "sum", "stack", or the axis along which its rows are joined.
    kinds: tuple[str | int, ...] = dataclasses.field(metadata={"static": True})


def taken_apart(result: Any) -> tuple[tuple[Any, ...], PyTree]:
    """Returns ``(value,)`` or ``(value, auxiliary)``, and the gradients, of a gradient function.

    Raises:
      ValueError: If it returned something else.
    """
    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise ValueError(
            "The gradient function must return (value, gradients), ((value, auxiliary), "
            f"gradients) or (value, auxiliary, gradients), got {_shown(result)}."
        )
    *first, gradients = result
    outputs: Any = first
    if len(first) == 1 and isinstance(first[0], tuple) and len(first[0]) == 2:
        outputs = first[0]
    value: Any = outputs[0]
    scalar = isinstance(value, float) or (is_array(value) and not value.ndim)
    if not (scalar and jnp.issubdtype(jnp.result_type(value), jnp.floating)):
        raise ValueError(
            "The value that the gradient function returns first must be a floating scalar, the "
            f"mean loss of the examples, got {_shown(value)}. Return (loss, gradients), or what "
            "else there is beside the loss: ((loss, auxiliary), gradients)."
        )
    return tuple(outputs), gradients


def judged(
    outputs: tuple[Any, ...],
    aux: PyTree,
    axis_name: AxisName,
    shared: PyTree,
    examples: Collection[int],
) -> Outputs:
    """Says what becomes of each leaf of a replica's value and auxiliary output.

    Args:
      outputs: (value,) or (value, auxiliary).
      aux: What the user says: None, a word or an axis, or a tree of them.
      axis_name: The axis or axes of the replicas.
      shared: The arguments of the function that are the same on all replicas. What it hands back
        as it got it is so too.
      examples: How many examples this replica has, for each axis of its arguments.

    Raises:
      ValueError: If `aux` has no entry for a leaf: the message lists all of them, with the line to
        write. Or if a leaf cannot be what its entry says.
    """
    auxiliary = None
    if len(outputs) == 2:
        auxiliary = outputs[1]
    leaves = [jnp.asarray(outputs[0])]
    kinds: list[str | int] = ["mean"]
    possible: list[str | int] = []
    unsaid = ""
    handed_back = {id(x) for x in jax.tree.leaves(shared)}
    paths = jax.tree_util.tree_leaves_with_path(auxiliary)
    for (path, leaf), word in zip(paths, words_of(aux, auxiliary), strict=True):
        name = leaf_name(path)
        x = _as_array(name, leaf)
        leaves.append(x)
        kinds.append(_kind(name, x, word, axis_name, examples))
        if word is None and id(leaf) not in handed_back:
            unsaid += f"\n  {name}: {_described(x)}"
            word = _possible(x, axis_name)
        possible.append("mean" if word is None else word)
    if unsaid:
        raise ValueError(
            f"What becomes of these auxiliary outputs of the replicas is not said:{unsaid}\nWrite\n"
            f"  aux={jax.tree.structure(auxiliary).unflatten(possible)!r}\n"
            'with one word in each place: "mean" averages, "sum" adds up, "join" lays rows one '
            'behind the other (an axis but the first as a number), "stack" gives an axis of '
            "replicas. To find out: outputs(params, *batch) of this object, outside of jax.jit, "
            "with a small batch."
        )
    return Outputs(leaves, jax.tree.structure(outputs), tuple(kinds))


def _as_array(name: str, leaf: Any) -> Array:
    """Returns a leaf as an array.

    Raises:
      ValueError: If it is nothing of the kind.
    """
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        raise ValueError(
            f"The auxiliary output {name} is a {kind}, and what a gradient function returns is "
            "arrays of numbers. Leave it out, or close over it."
        ) from error


def _kind(
    name: str, x: Array, word: str | int | None, axis_name: AxisName, examples: Collection[int]
) -> str | int:
    """Returns what becomes of one leaf.

    Raises:
      ValueError: If it cannot be what its entry says.
    """
    if word is None or (word == "mean" and known_equal(x, axis_name)):
        return _EQUAL
    described = f"The auxiliary output {name}, {_described(x)},"
    possible = _possible(x, axis_name)
    if word in ("mean", "sum") and word not in possible:
        raise ValueError(
            f'{described} has no {word} over the replicas. Say one of {possible}; "stack" gives an '
            "axis of replicas."
        )
    axis = 0 if word == "join" else word
    if not isinstance(axis, int):
        return axis
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f'{described} has no axis {axis} along which to join rows. Say "stack".')
    if word == "join" and x.shape[0] not in examples:
        for other, length in enumerate(x.shape):
            if length in examples:
                raise ValueError(
                    f"{described} has as many entries along axis {other} as there are examples, "
                    f'and "join" is along axis 0. Say {other}, or 0 if its rows do lie along axis '
                    "0."
                )
    return axis % x.ndim


def _possible(x: Array, axis_name: AxisName) -> str:
    """Returns the words that fit a type, of which one is to be kept."""
    words = ["stack"]
    if known_equal(x, axis_name) or jnp.issubdtype(x.dtype, jnp.floating):
        words = ["mean"]
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words.append("sum")
    if x.ndim:
        words.append("join")
    return "|".join(sorted(words))


def reduced(
    outputs: Outputs, weight: Array | None, axis_name: AxisName
) -> tuple[Outputs, list[Array]]:
    """Averages and sums the leaves of a replica, each as was judged.

    Args:
      outputs: This replica's.
      weight: How much this replica counts; None if all count the same.
      axis_name: The axis or axes of the replicas.

    Returns:
      The same with what is equal on all replicas by now, None in the place of rows; and the rows in
      order, with the axis along which they are to be joined in front.
    """
    leaves = list(outputs.leaves)
    rows: list[Array] = []
    averaged: dict[int, Array] = {}
    for i, (leaf, kind) in enumerate(zip(outputs.leaves, outputs.kinds, strict=True)):
        if kind == "mean":
            averaged[i] = as_local(leaf.astype(compute_dtype(leaf.dtype)), axis_name)
        elif kind == "sum":
            if leaf.dtype == jnp.bool_:
                leaf = leaf.astype(jnp.int32)
            leaves[i] = total(leaf, axis_name)
        elif kind != _EQUAL:
            leaves[i] = None
            row = leaf[None]
            if kind != "stack":
                row = jnp.moveaxis(leaf, int(kind), 0)
            rows.append(as_local(row, axis_name))
    local = list(averaged.values())
    if weight is not None and local:
        local = weighted_gradients(local, weight, axis_name)
    for i, mean in zip(averaged, mean_each(local, axis_name).means, strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return dataclasses.replace(outputs, leaves=leaves), rows


def put_together(whole: Outputs, rows: list[Array]) -> PyTree:
    """Returns value and auxiliary output in the form that the function gave."""
    leaves = list(whole.leaves)
    following = iter(rows)
    for i, kind in enumerate(whole.kinds):
        if kind == "stack":
            leaves[i] = next(following)
        elif isinstance(kind, int):
            leaves[i] = jnp.moveaxis(next(following), 0, kind)
    outputs = whole.treedef.unflatten(leaves)
    return outputs[0] if len(outputs) == 1 else outputs


def check_aux(aux: PyTree) -> None:
    """Refuses what is neither one of the words nor an axis.

    Raises:
      ValueError: Naming it.
    """
    for word in jax.tree.leaves(aux):
        axis = isinstance(word, int) and not isinstance(word, bool)
        if word not in CHOICES and not axis:
            raise ValueError(
                f"`aux` must be one of {CHOICES}, an axis along which rows are joined, a tree of "
                f"these, or None, got {word!r}."
            )


def words_of(aux: PyTree, auxiliary: PyTree) -> list[Any]:
    """Returns what is said of each leaf of the auxiliary output; None where nothing is.

    Places are compared by their names, whatever containers they are in.

    Raises:
      ValueError: If `aux` names what the auxiliary output has not.
    """
    # A line for each key, without its kind.
    names_of = functools.partial(jax.tree_util.keystr, simple=True, separator="\n")
    said = {names_of(path): word for path, word in jax.tree_util.tree_leaves_with_path(aux)}
    places = jax.tree_util.tree_leaves_with_path(auxiliary, is_leaf=_is_empty)
    words: list[Any] = []
    parts = {""}  # of the auxiliary output
    for path, leaf in places:
        beginnings = [names_of(path[:length]) for length in range(len(path) + 1)]
        parts.update(beginnings)
        if not _is_empty(leaf):
            words.append(next((said[part] for part in beginnings if part in said), None))
    for path, _ in jax.tree_util.tree_leaves_with_path(aux):
        if names_of(path) not in parts:
            names = ", ".join(leaf_name(place) for place, _ in places)
            raise ValueError(
                f"`aux` names {leaf_name(path)}; the auxiliary output has {names or 'nothing'}."
            )
    return words


def _is_empty(node: Any) -> bool:
    structure = jax.tree.structure(node)
    return structure.num_nodes == 1 and not structure.num_leaves


def _described(x: Array) -> str:
    return f"{x.dtype} scalar" if not x.ndim else f"{x.dtype} of shape {x.shape}"


def _shown(tree: Any) -> str:
    """Returns a few words for what a function returned."""
    if isinstance(tree, Mapping):
        return f"a dict of {', '.join(map(repr, tree))}"
    if isinstance(tree, tuple | list):
        return f"a {type(tree).__name__} of {len(tree)}"
    if hasattr(tree, "dtype"):
        return f"an array, {_described(tree)}"
    return "None" if tree is None else f"a {type(tree).__name__}"
