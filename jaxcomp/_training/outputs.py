"""What becomes of the value and the auxiliary output of every replica: as the user says.

Whether a number is a mean, a sum or one of a kind, no type tells. So nothing is averaged, added up
or joined without a word for it. `jaxcomp._training.examine` finds the words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.leaves import compute_dtype, leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import as_local, known_equal, mean_each, total
from jaxcomp._mesh.weights import weighted_gradients
from jaxcomp._training.arguments import is_array

CHOICES = ("mean", "sum", "join", "stack")
# What a leaf is that all replicas hold alike: it stays as it is.
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


def taken_apart(result: Any) -> tuple[PyTree, PyTree]:
    """Returns ``value`` or ``(value, auxiliary)``, and the gradients, of a gradient function.

    Raises:
      ValueError: If it returned something else.
    """
    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise ValueError(
            "The gradient function must return (value, gradients), ((value, auxiliary), "
            f"gradients) or (value, auxiliary, gradients), got {_shown(result)}."
        )
    *first, gradients = result
    outputs = tuple(first) if len(first) == 2 else first[0]
    pair = isinstance(outputs, tuple) and len(outputs) == 2
    value = outputs[0] if pair else outputs
    if not _is_floating_scalar(value):
        raise ValueError(
            "The value that the gradient function returns first must be a floating scalar, the "
            f"mean loss of the examples, got {_shown(value)}. Return (loss, gradients), or what "
            "else there is beside the loss: ((loss, auxiliary), gradients)."
        )
    return outputs, gradients


def _is_floating_scalar(value: Any) -> bool:
    if isinstance(value, float):
        return True
    return is_array(value) and not value.ndim and jnp.issubdtype(value.dtype, jnp.floating)


def judged(
    outputs: PyTree, aux: PyTree, axis_name: AxisName, shared: PyTree, examples: Collection[int]
) -> Outputs:
    """Says what becomes of each leaf of a replica's value and auxiliary output.

    Args:
      outputs: A scalar, or (scalar, auxiliary).
      aux: What the user says: None, a word or an axis, or a tree of them.
      axis_name: The axis or axes of the replicas.
      shared: The arguments of the function that are the same on all replicas. What it hands back
        as it got it is so too.
      examples: How many examples this replica has, for each axis of its arguments.

    Raises:
      ValueError: Listing every leaf of which nothing is said, with the line to write; or naming a
        leaf that cannot be what is said of it.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(outputs)
    leaves = [_as_array(path, leaf) for path, leaf in paths]
    words: list[Any] = ["mean"]
    if isinstance(outputs, tuple):
        words += words_of(aux, outputs[1])
    same = {id(x) for x in jax.tree.leaves(shared)}
    unsaid: list[int] = []
    kinds: list[str | int] = []
    for i, (path, leaf) in enumerate(paths):
        if words[i] is None and id(leaf) not in same:
            unsaid.append(i)
        kinds.append(_kind(path[1:], leaves[i], words[i], axis_name, examples))
    if unsaid:
        raise ValueError(_question(paths, words, unsaid, outputs[1], axis_name))
    return Outputs(leaves, treedef, tuple(kinds))


def _as_array(path: KeyPath, leaf: Any) -> Array:
    """Returns a leaf as an array.

    Raises:
      ValueError: If it is nothing of the kind.
    """
    if not (is_array(leaf) or isinstance(leaf, bool | int | float | complex)):
        raise ValueError(
            f"The auxiliary output {leaf_name(path[1:])} is a {type(leaf).__name__}, and what a "
            "gradient function returns is arrays. Leave it out, or close over it."
        )
    return jnp.asarray(leaf)


def _kind(
    path: KeyPath,
    x: Array,
    word: str | int | None,
    axis_name: AxisName,
    examples: Collection[int],
) -> str | int:
    """Returns what becomes of one leaf.

    Raises:
      ValueError: If it cannot be what is said of it.
    """
    if word is None or (word == "mean" and known_equal(x, axis_name)):
        return _EQUAL
    name = f"The auxiliary output {leaf_name(path)}, {_described(x)},"
    if word == "mean" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f'{name} has no mean over the replicas. Say "sum" of a count; or "stack", for an axis '
            "of replicas."
        )
    axis = 0 if word == "join" else word
    if not isinstance(axis, int):
        return axis
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f'{name} has no axis {axis} along which to join rows. Say "stack".')
    if word == "join" and x.shape[0] not in examples:
        for other, length in enumerate(x.shape):
            if length in examples:
                raise ValueError(
                    f"{name} has as many entries along axis {other} as there are examples, and "
                    f'"join" is along axis 0. Say {other}, or 0 if its rows do lie along axis 0.'
                )
    return axis % x.ndim


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
    whole: list[Any] = [None] * len(outputs.leaves)
    rows: list[Array] = []
    averaged: list[int] = []
    for i, (leaf, kind) in enumerate(zip(outputs.leaves, outputs.kinds, strict=True)):
        if kind == _EQUAL:
            whole[i] = leaf
        elif kind == "mean":
            averaged.append(i)
        elif kind == "sum":
            counts = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
            whole[i] = total(counts, axis_name)
        elif kind == "stack":
            rows.append(as_local(leaf[None], axis_name))
        else:
            rows.append(as_local(jnp.moveaxis(leaf, int(kind), 0), axis_name))
    local = [as_local(outputs.leaves[i], axis_name) for i in averaged]
    wide = [x.astype(compute_dtype(x.dtype)) for x in local]
    if weight is not None and wide:
        wide = weighted_gradients(wide, weight, axis_name)
    for i, mean in zip(averaged, mean_each(wide, axis_name), strict=True):
        whole[i] = mean.astype(outputs.leaves[i].dtype)
    return dataclasses.replace(outputs, leaves=whole), rows


def put_together(whole: Outputs, rows: list[Array]) -> PyTree:
    """Returns value and auxiliary output in the form that the function gave."""
    leaves = list(whole.leaves)
    following = iter(rows)
    for i, kind in enumerate(whole.kinds):
        if kind == "stack":
            leaves[i] = next(following)
        elif isinstance(kind, int):
            leaves[i] = jnp.moveaxis(next(following), 0, kind)
    return whole.treedef.unflatten(leaves)


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

    Raises:
      ValueError: If `aux` has another form than the auxiliary output, or names what it has not.
    """
    words: list[Any] = []
    names: list[str] = []
    used: set[str] = set()
    for path, _ in jax.tree_util.tree_flatten_with_path(auxiliary)[0]:
        names.append(leaf_name(path))
        word = aux
        depth = 0
        while not (word is None or isinstance(word, str | int)):
            if depth == len(path):
                raise _other_form(aux, auxiliary)
            word = _part_of(word, path[depth], aux, auxiliary)
            depth += 1
        words.append(word)
        used.add(leaf_name(path[:depth]))
    for path, _ in jax.tree_util.tree_flatten_with_path(aux)[0]:
        if leaf_name(path) not in used and not _has_part(auxiliary, path):
            raise ValueError(
                f"`aux` names {leaf_name(path)}; the auxiliary output has "
                f"{', '.join(names) or 'nothing'}."
            )
    return words


def _has_part(tree: Any, path: KeyPath) -> bool:
    """Tells whether a tree has something at a path, be it an empty container."""
    for key in path:
        if isinstance(tree, Mapping):
            if getattr(key, "key", None) not in tree:
                return False
            tree = tree[key.key]
        elif isinstance(tree, tuple | list) and hasattr(key, "idx"):
            if key.idx >= len(tree):
                return False
            tree = tree[key.idx]
        elif hasattr(key, "name") and hasattr(tree, key.name):
            tree = getattr(tree, key.name)
        else:
            return False
    return True


def _part_of(choice: Any, key: Any, aux: PyTree, auxiliary: PyTree) -> Any:
    """Returns the part of a tree of words at one step of a path; None for what is not named.

    Raises:
      ValueError: If it has no such parts.
    """
    if isinstance(choice, Mapping) and hasattr(key, "key"):
        return choice.get(key.key)
    if isinstance(choice, tuple | list) and hasattr(key, "idx") and key.idx < len(choice):
        return choice[key.idx]
    if hasattr(key, "name") and hasattr(choice, key.name):
        return getattr(choice, key.name)
    raise _other_form(aux, auxiliary)


def _other_form(aux: PyTree, auxiliary: PyTree) -> ValueError:
    return ValueError(
        f"`aux` has the form {_shown(aux)}, and the auxiliary output {_shown(auxiliary)}. Give one "
        "word for all of it, or a tree like it that may end early."
    )


def line_to_write(words: list[Any], auxiliary: PyTree) -> str:
    """Returns ``aux=...`` with a word in the place of each leaf."""
    return f"aux={jax.tree.structure(auxiliary).unflatten(words)!r}"


def _question(
    paths: Sequence[tuple[KeyPath, Any]],
    words: list[Any],
    unsaid: list[int],
    auxiliary: PyTree,
    axis_name: AxisName,
) -> str:
    """Asks about the outputs at some places of which nothing is said, with the line to write."""
    listed = ""
    possible = ["mean" if word is None else word for word in words]
    for i in unsaid:
        path, leaf = paths[i]
        x = jnp.asarray(leaf)
        listed += f"\n  {leaf_name(path[1:])}: {_described(x)}"
        possible[i] = _possible(x, axis_name)
    return (
        f"What becomes of these auxiliary outputs of the replicas is not said:{listed}\nWrite\n"
        f'  {line_to_write(possible[1:], auxiliary)}\nwith one word in each place: "mean" '
        'averages, "sum" adds up, "join" lays rows one behind the other (an axis but the first as '
        'a number), "stack" gives an axis of replicas. To find out: outputs(params, *batch) of '
        "this object, outside of jax.jit, with a small batch."
    )


def _possible(x: Array, axis_name: AxisName) -> str:
    """Returns the words that fit a type, of which one is to be kept."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    first = "join|" if x.ndim else ""
    if floating or known_equal(x, axis_name):
        return f"{first}mean|sum"
    return f"{first}sum|stack"


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
