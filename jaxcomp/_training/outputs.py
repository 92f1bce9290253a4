"""Combines the values and auxiliary outputs of all replicas, as the user specifies.

Each replica's function returns a loss, and perhaps accuracies, counts, logits. A type does not tell
whether a number is a mean, a sum or something else, so the user specifies a word for each output,
and what is not specified is refused; `jaxcomp._training.examine` finds the words. The work is in
three parts: `with_kinds` decides on each replica how a leaf is combined, `reduced` does what needs
collectives there, and `put_together` joins the rows outside of the mapped function, where they are
global arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import is_integer
from jaxcomp._base.leaves import in_words, is_array, is_floating, is_key, leaf_name, with_arrays
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import as_local, known_equal, maximum, total, vma_axes
from jaxcomp._mesh.weights import averaged

# What `aux=` may say, beside an integer, the axis along which rows are joined.
WORDS = ("mean", "sum", "join", "stack")
# A leaf that JAX knows to be equal on all replicas: it stays as it is.
_EQUAL = "equal"
# A leaf that must be equal on all replicas, but JAX does not know it: the program compares.
_COMPARED = "compared"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Holds the leaves of value and auxiliary output, and how each leaf is combined.

    `treedef` and `kinds` are static, so JAX can map a function that returns this object.
    """

    leaves: list[Any]
    treedef: Any = dataclasses.field(metadata={"static": True})
    # For each leaf "equal", "compared", "mean", "sum", "stack", or the axis along which rows are
    # joined.
    kinds: tuple[str | int, ...] = dataclasses.field(metadata={"static": True})


def taken_apart(result: Any) -> tuple[tuple[Any, ...], PyTree]:
    """Splits a gradient function's result: ``(value,)`` or ``(value, auxiliary)``, and gradients.

    Raises:
      ValueError: If the result has another form.
    """
    if not (isinstance(result, tuple) and len(result) in (2, 3)):
        raise ValueError(
            "The gradient function must return (value, gradients), ((value, auxiliary), "
            f"gradients) or (value, auxiliary, gradients), got {one_level(result)}."
        )
    outputs: Any = result[:-1]
    if len(outputs) == 1 and isinstance(outputs[0], tuple) and len(outputs[0]) == 2:
        outputs = outputs[0]
    value = outputs[0]
    # A loss that is constant may be a Python number; `check_loss` has the sentence for it.
    scalar = isinstance(value, float) or (is_array(value) and not np.ndim(value))
    if not (scalar and is_floating(value)):
        raise ValueError(
            "The value that the gradient function returns first must be a floating scalar, the "
            f"mean loss of the examples, got {one_level(value)}. Return (loss, gradients), or, "
            "with auxiliary outputs, ((loss, auxiliary), gradients)."
        )
    return outputs, result[-1]


def with_kinds(
    outputs: tuple[Any, ...],
    aux: PyTree,
    axis_name: AxisName,
    shared: Mapping[int, Array],
    examples: Collection[int],
) -> Outputs:
    """Decides how each leaf of a replica's value and auxiliary output is combined.

    Args:
      outputs: (value,) or (value, auxiliary).
      aux: The user's `aux=`: None, a word or an axis, or a tree of them.
      axis_name: The axis or axes of the replicas.
      shared: The function's arguments that are equal on all replicas, by their identity inside of
        the function. An argument that is returned unchanged is equal on all replicas too.
      examples: The numbers of this replica's examples, along all axes of its arguments.

    Raises:
      ValueError: If `aux` has no entry for a leaf (the message lists all such leaves, with the line
        to write), or an entry does not fit its leaf.
    """
    auxiliary = None
    if len(outputs) == 2:
        auxiliary = outputs[1]
    elif aux is not None:
        raise ValueError(
            f"`aux` is {aux!r}, and the function returns no auxiliary output. Leave `aux` out, or "
            "tell jaxcomp.value_and_grad with has_aux=True that there is one."
        )
    leaves = [jnp.asarray(outputs[0])]
    kinds: list[str | int] = ["mean"]
    line: list[Any] = []
    unsaid = ""
    paths = jax.tree.leaves_with_path(auxiliary)
    for (path, leaf), word in zip(paths, words_of(aux, auxiliary), strict=True):
        name = leaf_name(path)
        if word is None and id(leaf) in shared:  # an argument that is returned unchanged
            leaves.append(shared[id(leaf)])
            kinds.append(_EQUAL)
            line.append("mean")
            continue
        x = as_array(path, leaf)
        leaves.append(x)
        if word is None:
            unsaid += f"\n  {name}: {described(x)}"
            line.append(_possible(x, axis_name))
        else:
            kinds.append(_kind(name, x, word, axis_name, examples))
            line.append(word)
    if unsaid:
        raise ValueError(
            "`aux` does not say how to combine these auxiliary outputs of the "
            f"replicas:{unsaid}\nWrite\n  aux={jax.tree.structure(auxiliary).unflatten(line)!r}\n"
            'with one word in each place: "mean" averages, "sum" adds, "join" concatenates rows '
            'along axis 0 (an integer: along that axis), "stack" adds an axis of replicas. To find '
            "the words, call outputs(params, *batch) of this object, outside of jax.jit, with a "
            "small batch."
        )
    return Outputs(leaves, jax.tree.structure(outputs), tuple(kinds))


def as_array(path: KeyPath, leaf: Any) -> Array:
    """Converts a leaf of the auxiliary output to an array.

    Raises:
      ValueError: If this is not possible.
    """
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        raise ValueError(
            f"The auxiliary output {leaf_name(path)} is a {kind}, but a gradient function can "
            "return only arrays of numbers. Leave it out, or close over it."
        ) from error


def _kind(
    name: str, x: Array, word: str | int, axis_name: AxisName, examples: Collection[int]
) -> str | int:
    """Returns how one leaf is combined, an entry of `Outputs.kinds`.

    Raises:
      ValueError: If the word does not fit the leaf.
    """
    if word == "mean" and known_equal(x, axis_name):
        return _EQUAL
    if word == "mean" and _is_compared(x, axis_name):
        return _COMPARED
    what = f"The auxiliary output {name}, {described(x)},"
    possible = _possible(x, axis_name)
    if word in ("mean", "sum") and word not in possible:
        raise ValueError(
            f'{what} has no {word} over the replicas. Say one of {possible}; "stack" gives an axis '
            "of replicas."
        )
    if word in ("mean", "sum", "stack"):
        return word
    axis = 0
    if word != "join":
        axis = int(word)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f'{what} has no axis {axis} along which to join rows. Say "stack".')
    # Time-major outputs (time, batch) are common, and joined along time they would be scrambled.
    fitting = [other for other, length in enumerate(x.shape) if length in examples]
    if word == "join" and fitting and fitting[0] > 0:
        raise ValueError(
            f"{what} has as many entries along axis {fitting[0]} as there are examples, and "
            f'"join" is along axis 0. Say {fitting[0]}, or 0 if its rows do lie along axis 0.'
        )
    return axis % x.ndim


def _possible(x: Array, axis_name: AxisName) -> str:
    """Returns the words that fit a leaf's type, separated by ``|``; the user keeps one of them."""
    words = []
    if x.ndim:
        words.append("join")
    exact = not has_mean(x) and not known_equal(x, axis_name)
    if not exact or _is_compared(x, axis_name):
        words.append("mean")
    if exact:
        words.append("stack")
    if not is_key(x):
        words.append("sum")
    return "|".join(words)


def has_mean(x: Any) -> bool:
    """Tells whether values of this dtype have a mean of the same dtype: floating and complex."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_compared(x: Array, axis_name: AxisName) -> bool:
    """Tells whether the program must compare a "mean" leaf between the replicas."""
    return not vma_axes(axis_name) and not has_mean(x)


def _all_equal(leaves: Sequence[Array], axis_name: AxisName) -> Array:
    """Returns a bool scalar: True if integers, flags and keys are equal on all replicas."""
    words = []
    for leaf in leaves:
        numbers = in_words(leaf)
        integers = jnp.issubdtype(leaf.dtype, jnp.integer)
        if leaf.dtype == jnp.bool_ or (integers and jnp.iinfo(leaf.dtype).bits < 8):
            numbers = leaf.astype(jnp.int8)
        # By bytes, so that one array holds all types and nothing is rounded.
        in_bytes = jax.lax.bitcast_convert_type(numbers, jnp.uint8)
        words.append(in_bytes.astype(jnp.int32).ravel())
    each = jnp.concatenate(words)
    # The least is minus the largest of the negatives, so one all-reduce finds both.
    both = jnp.concatenate([each, -each])
    largest, least = jnp.split(maximum(both, axis_name), 2)
    return jnp.all(largest == -least)


def reduced(
    outputs: Outputs, weight: Array | None, axis_name: AxisName
) -> tuple[Outputs, list[Array]]:
    """Averages and sums the leaves of a replica, each by its kind.

    Args:
      outputs: This replica's outputs.
      weight: This replica's weight; None if all replicas have the same weight.
      axis_name: The axis or axes of the replicas.

    Returns:
      The outputs with leaves that are now equal on all replicas, and None in place of rows; and the
      rows in order, with the axis along which they will be joined as axis 0.
    """
    leaves = list(outputs.leaves)
    to_average: list[Array | None] = [None] * len(leaves)
    compared = []
    rows: list[Array] = []
    for i, kind in enumerate(outputs.kinds):
        leaf = leaves[i]
        if kind == "mean":
            to_average[i] = leaf
            if jnp.iscomplexobj(leaf):
                to_average[i] = jnp.stack([leaf.real, leaf.imag])
        elif kind == "sum":
            leaves[i] = total(leaf, axis_name)
        elif kind == _COMPARED:
            compared.append(leaf)
        elif kind != _EQUAL:
            leaves[i] = None
            row = leaf[None]  # "stack": a single row for this replica
            if kind != "stack":
                row = jnp.moveaxis(leaf, int(kind), 0)
            rows.append(as_local(row, axis_name))
    means, _ = averaged(to_average, axis_name, weight)
    for i, mean in enumerate(means):
        if mean is not None and jnp.iscomplexobj(leaves[i]):
            means[i] = jax.lax.complex(mean[0], mean[1])
    leaves = with_arrays(leaves, means)
    if compared:
        # A running program cannot raise an error, so the loss becomes NaN.
        leaves[0] = jnp.where(_all_equal(compared, axis_name), leaves[0], jnp.nan)
    return dataclasses.replace(outputs, leaves=leaves), rows


def put_together(whole: Outputs, rows: list[Array]) -> PyTree:
    """Returns value and auxiliary output in the structure of the gradient function's result."""
    leaves = list(whole.leaves)
    following = iter(rows)
    for i, kind in enumerate(whole.kinds):
        if kind == "stack":
            leaves[i] = next(following)
        elif isinstance(kind, int):
            leaves[i] = jnp.moveaxis(next(following), 0, kind)
    outputs = whole.treedef.unflatten(leaves)
    if len(outputs) == 1:
        return outputs[0]
    return outputs


def check_aux(aux: PyTree) -> None:
    """Refuses entries of `aux` that are neither a word nor an axis.

    Raises:
      ValueError: If it finds one; the message shows it.
    """
    for word in jax.tree.leaves(aux):
        if word not in WORDS and not is_integer(word):
            raise ValueError(
                f"`aux` must be one of {WORDS}, an axis along which rows are joined, a tree of "
                f"these, or None, got {word!r}."
            )


def words_of(aux: PyTree, auxiliary: PyTree) -> list[Any]:
    """Returns the entry of `aux` for each leaf of the auxiliary output, or None.

    Entries and leaves are matched by the names in their paths, whatever containers they are in.

    Raises:
      ValueError: If `aux` names something that is not in the auxiliary output.
    """
    # One line for each key, without the kind of key.
    names_of = functools.partial(jax.tree_util.keystr, simple=True, separator="\n")
    entries = {}
    for path, word in jax.tree.leaves_with_path(aux):
        entries[names_of(path)] = (path, word)
    unused = dict(entries)
    places = jax.tree.leaves_with_path(auxiliary, is_leaf=_is_empty)
    words: list[Any] = []
    for path, leaf in places:
        word = None
        for length in range(len(path), -1, -1):  # `aux` may be a prefix of the tree
            part = names_of(path[:length])
            unused.pop(part, None)
            if part in entries:
                _, word = entries[part]
        if not _is_empty(leaf):
            words.append(word)
    for path, _ in unused.values():
        names = ", ".join(leaf_name(place) for place, _ in places)
        raise ValueError(
            f"`aux` names {leaf_name(path)}; the auxiliary output has {names or 'nothing'}."
        )
    return words


def _is_empty(node: Any) -> bool:
    structure = jax.tree.structure(node)
    return structure.num_nodes == 1 and not structure.num_leaves


def described(leaf: Any) -> str:
    """Returns dtype and shape of an array as text, or the class of another object."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


def one_level(node: Any) -> str:
    """Returns a short text of a tree's node and its children."""
    return str(jax.tree.map(described, node, is_leaf=lambda x: x is not node))
