"""Combines the values and auxiliary outputs of all replicas, as the user specifies.

Each replica's function returns a loss, and perhaps accuracies, counts, logits. A type does not tell
whether a number is a mean, a sum or something else, so the user specifies a word for each output,
and what is not specified is refused; `jaxcomp._training.examine` finds the words. The work is in
three parts: `as_outputs` decides on each replica how a leaf is combined, `combined` does what needs
collectives there, and `put_together` joins the rows outside of the mapped function, where they are
global arrays. The decision travels with each array in an `Output`.
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
from jaxcomp._base.leaves import in_words, is_array, is_floating, is_key, leaf_name
from jaxcomp._base.typing import Array, AxisName, KeyPath, PyTree
from jaxcomp._mesh.collectives import (
    as_local,
    axes_known_equal,
    gather,
    known_equal,
    sum_over_replicas,
    vma_axes,
)
from jaxcomp._mesh.weights import averaged

# What `aux=` may say, beside an integer, the axis along which rows are joined.
WORDS = ("mean", "sum", "join", "stack")
# A leaf that JAX knows to be equal on all replicas: it stays as it is.
_EQUAL = "equal"
# A leaf that must be equal on all replicas, but JAX does not know it: the program compares.
_COMPARED = "compared"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """Holds one output of a replica; a mapped function can return it."""

    array: Any
    # "mean", "sum", "equal" or "compared"; or the axis along which rows are joined.
    kind: str | int = dataclasses.field(metadata={"static": True})


def taken_apart(result: Any) -> tuple[tuple[Any, ...], PyTree]:
    """Splits a gradient function's result: ``(value,)`` or ``(value, auxiliary)``, and gradients.

    Raises:
      ValueError: If the result has another form.
    """
    match result:
        case tuple((tuple((value, auxiliary)), gradients)) | tuple((value, auxiliary, gradients)):
            outputs = (value, auxiliary)
        case tuple((value, gradients)):
            outputs = (value,)
        case _:
            raise ValueError(
                "The gradient function must return (value, gradients), ((value, auxiliary), "
                f"gradients) or (value, auxiliary, gradients), got {one_level(result)}."
            )
    # A loss that is constant may be a Python number; `check_loss` has the sentence for it.
    scalar = isinstance(value, float) or (is_array(value) and not np.ndim(value))
    if not (scalar and is_floating(value)):
        raise ValueError(
            "The value that the gradient function returns first must be a floating scalar, the "
            f"mean loss of the examples, got {one_level(value)}. Return (loss, gradients), or, "
            "with auxiliary outputs, ((loss, auxiliary), gradients)."
        )
    return outputs, gradients


def check_loss(loss: Any, axis_name: AxisName) -> None:
    """Refuses a loss that was already averaged over the replicas.

    Raises:
      ValueError: If JAX knows that the loss is equal on all replicas.
    """
    reduced = axes_known_equal(loss, axis_name)
    if reduced:
        raise ValueError(
            f"The loss is the same on every replica along {reduced[0]!r}: it depends neither on "
            "the parameters nor on the examples, or `fun` averages it already, with lax.pmean or "
            "psum. Then gradients would be too small by the number of replicas. Return the mean "
            "over this replica's examples alone, and average the value for reports after the "
            "gradients are taken."
        )


def as_outputs(
    values: tuple[Any, ...],
    aux: PyTree,
    axis_name: AxisName,
    shared: Mapping[int, Array],
    examples: Collection[int],
) -> tuple[PyTree, ...]:
    """Decides how each leaf of a replica's value and auxiliary output is combined.

    Args:
      values: (value,) or (value, auxiliary).
      aux: The user's `aux=`: None, a word or an axis, or a tree of them.
      axis_name: The axis or axes of the replicas.
      shared: The function's arguments that are equal on all replicas, by their identity inside of
        the function. An argument that is returned unchanged is equal on all replicas too.
      examples: The numbers of this replica's examples, along all axes of its arguments.

    Returns:
      The values with an `Output` in place of each leaf.

    Raises:
      ValueError: If `aux` has no entry for a leaf (the message lists all such leaves, with the line
        to write), or an entry does not fit its leaf.
    """
    loss = Output(jnp.asarray(values[0]), "mean")
    if len(values) == 1:
        if aux is not None:
            raise ValueError(
                f"`aux` is {aux!r}, and the function returns no auxiliary output. Leave `aux` out, "
                "or pass has_aux=True to jaxcomp.value_and_grad if there is one."
            )
        return (loss,)
    leaves, treedef = jax.tree.flatten_with_path(values[1])
    outputs: list[Any] = []
    line: list[Any] = []
    unsaid = ""
    for (path, leaf), word in zip(leaves, words_of(aux, values[1]), strict=True):
        if word is None and id(leaf) in shared:  # an argument that is returned unchanged
            outputs.append(Output(shared[id(leaf)], _EQUAL))
            line.append("mean")
            continue
        x = as_array(path, leaf)
        if word is None:
            unsaid += f"\n  {leaf_name(path)}: {described(x)}"
            line.append("|".join(_fitting(x, axis_name)))
            continue
        if word == "stack":  # a single row for this replica
            x = x[None]
        outputs.append(Output(x, _kind(leaf_name(path), x, word, axis_name, examples)))
        line.append(word)
    if unsaid:
        raise ValueError(
            "`aux` does not say how to combine these auxiliary outputs of the "
            f"replicas:{unsaid}\nWrite\n  aux={treedef.unflatten(line)!r}\n"
            'with one word in each place: "mean" averages, "sum" adds, "join" concatenates rows '
            'along axis 0 (an integer: along that axis), "stack" adds an axis of replicas. To find '
            "the words, call outputs(params, *batch) of this object, outside of jax.jit, with a "
            "small batch."
        )
    return loss, treedef.unflatten(outputs)


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
            f"The auxiliary output {leaf_name(path)} is a {kind}, and outputs can only be arrays "
            "of numbers. Leave it out, or close over it."
        ) from error


def _kind(
    name: str, x: Array, word: Any, axis_name: AxisName, examples: Collection[int]
) -> str | int:
    """Returns how one leaf is combined.

    Raises:
      ValueError: If the word does not fit the leaf.
    """
    what = f"The auxiliary output {name}, {described(x)},"
    if word in ("mean", "sum"):
        fitting = _fitting(x, axis_name)
        if word not in fitting:
            raise ValueError(
                f"{what} has no {word} over the replicas. Say one of {'|'.join(fitting)}; "
                '"stack" gives an axis of replicas.'
            )
        return fitting[word]
    axis = 0
    if word not in ("join", "stack"):
        axis = int(word)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f'{what} has no axis {axis} along which to join rows. Say "stack".')
    # Time-major outputs (time, batch) are common, and joined along time they would be scrambled.
    of_examples = [other for other, length in enumerate(x.shape) if length in examples]
    if word == "join" and of_examples and of_examples[0] > 0:
        raise ValueError(
            f"{what} has as many entries along axis {of_examples[0]} as there are examples, but "
            f'"join" is along axis 0. Say {of_examples[0]}, or 0 if its rows do lie along axis 0.'
        )
    return axis % x.ndim


def _fitting(x: Array, axis_name: AxisName) -> dict[str, str | int]:
    """Returns the words that fit a leaf's type, and how each of them combines it."""
    equal = known_equal(x, axis_name)
    fitting: dict[str, str | int] = {}
    if x.ndim:
        fitting["join"] = 0
    if equal:
        fitting["mean"] = _EQUAL
    elif has_mean(x):
        fitting["mean"] = "mean"
    elif not vma_axes(axis_name):
        fitting["mean"] = _COMPARED
    if not equal:
        fitting["stack"] = 0
    if not is_key(x):
        fitting["sum"] = "sum"
    return fitting


def has_mean(x: Any) -> bool:
    """Returns whether values of this dtype have a mean of the same dtype: floating and complex."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def combined(
    outputs: tuple[PyTree, ...], weight: Array | None, axis_name: AxisName
) -> tuple[PyTree, PyTree]:
    """Averages and sums the outputs of a replica, each by its kind.

    Args:
      outputs: This replica's value and auxiliary output, as `as_outputs` returns them.
      weight: This replica's weight; None if all replicas have the same weight.
      axis_name: The axis or axes of the replicas.

    Returns:
      Two trees of the same containers: the arrays that are now equal on all replicas, and an
      `Output` for those that are rows, whose axis is moved to the front. Each has None in place of
      the leaves of the other.
    """
    nodes, treedef = jax.tree.flatten(outputs, is_leaf=lambda node: isinstance(node, Output))
    means = iter(_means([node.array for node in nodes if node.kind == "mean"], weight, axis_name))
    equal: list[Any] = []
    rows: list[Any] = []
    compared: list[Array] = []
    for node in nodes:
        x = node.array
        row = None
        if node.kind == "mean":
            x = next(means)
        elif node.kind == "sum":
            x = sum_over_replicas(x, axis_name)
        elif node.kind == _COMPARED:
            compared.append(x)
        elif node.kind != _EQUAL:
            to_front = as_local(jnp.moveaxis(x, node.kind, 0), axis_name)
            row = Output(to_front, node.kind)
            x = None
        equal.append(x)
        rows.append(row)
    if compared:
        # A running program cannot raise an error, so the loss becomes NaN.
        equal[0] = jnp.where(_all_equal(compared, axis_name), equal[0], jnp.nan)
    return treedef.unflatten(equal), treedef.unflatten(rows)


def _means(arrays: Sequence[Array], weight: Array | None, axis_name: AxisName) -> list[Array]:
    """Averages floating and complex arrays over the replicas."""
    reals = []
    for x in arrays:
        if jnp.iscomplexobj(x):
            x = jnp.stack([x.real, x.imag])
        reals.append(x)
    means, _ = averaged(reals, axis_name, weight)
    for i, x in enumerate(arrays):
        if jnp.iscomplexobj(x):
            means[i] = jax.lax.complex(*means[i])
    return means


def _all_equal(leaves: Sequence[Array], axis_name: AxisName) -> Array:
    """Returns a bool scalar: True if integers, flags and keys are equal on all replicas."""
    words = []
    for leaf in leaves:
        numbers = in_words(leaf)
        if numbers.dtype == jnp.bool_ or jnp.iinfo(numbers.dtype).bits < 8:
            numbers = numbers.astype(jnp.int8)
        # By bytes, so that one array holds all types and nothing is rounded.
        words.append(jax.lax.bitcast_convert_type(numbers, jnp.uint8).ravel())
    rows = gather(jnp.concatenate(words), axis_name)
    return jnp.all(rows == rows[0])


def put_together(equal: PyTree, rows: PyTree) -> PyTree:
    """Returns value and auxiliary output in the structure of the gradient function's result."""

    def joined(x: Any, row: Output | None) -> Any:
        if row is None:
            return x
        return jnp.moveaxis(row.array, 0, int(row.kind))

    outputs = jax.tree.map(joined, equal, rows, is_leaf=lambda node: node is None)
    if len(outputs) == 1:
        return outputs[0]
    return outputs


def check_aux(aux: PyTree) -> None:
    """Refuses entries of `aux` that are neither a word nor an axis.

    Raises:
      ValueError: If it finds one; the message shows it.
    """
    for word in jax.tree.leaves(aux):
        is_word = isinstance(word, str) and word in WORDS
        if not is_word and not is_integer(word):
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
        entries[names_of(path)] = word
    places = jax.tree.leaves_with_path(auxiliary, is_leaf=_is_empty)
    words: list[Any] = []
    parts: set[str] = set()
    for path, leaf in places:
        word = None
        for length in range(len(path) + 1):  # `aux` may be a prefix of the tree
            part = names_of(path[:length])
            parts.add(part)
            word = entries.get(part, word)
        if not _is_empty(leaf):
            words.append(word)
    for path, _ in jax.tree.leaves_with_path(aux):
        if names_of(path) not in parts:
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
