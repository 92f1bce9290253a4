"""The leaves of a Flax tree: of linen dicts, ``nnx.State`` and nnx modules.

JAX's key paths name the leaves, so Flax is imported only for trees of nnx. For `jaxcomp.powersgd`,
the functions of this file give every leaf the matrix of torch's ``view(shape[0], -1)``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import MatrixDims
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import shape_of
from torch_bridge._pairing.pairs import Pair, Path, Shape

MatrixDimsFn: TypeAlias = Callable[[Any, Any], MatrixDims | None]
_TRANSPOSED_WORDS = frozenset({"convtranspose", "transpose", "transposed", "deconv", "tconv"})
# DenseGeneral layers of attention with several output axes, (embed, heads, head_dim) and the like.
_SPLIT_OUTPUTS = frozenset({"query", "key", "value", "qkv", "in_proj"})
# The collections of linen variables that correspond to a torch state dict.
COLLECTIONS = ("params", "batch_stats")
_DIGITS = 20  # digits of the largest number in a name
_SMALL = 1024  # values; a smaller array may be a step count or a seed, and keeps its values
# Decoding caches of attention: floating point, but not parameters.
_CACHES = frozenset({"cached_key", "cached_value", "cache_index"})


def plain_path(path: tuple[Any, ...]) -> Path:
    """Returns a JAX key path as strings, with the names of modules and of the leaf only.

    Drops the collection of linen variables, and the entry ``value`` of an nnx variable.
    """
    if len(path) > 1:
        last = path[-1]
        if isinstance(last, jax.tree_util.GetAttrKey) and last.name in ("value", "raw_value"):
            path = path[:-1]
    names = []
    for key in path:
        names.append(jax.tree_util.keystr((key,), simple=True))
    return without_collection(tuple(names))


def without_collection(path: Path) -> Path:
    """Returns the path of a leaf without its collection, if it has one."""
    if len(path) > 1 and path[0] in COLLECTIONS:
        return path[1:]
    return path


@functools.lru_cache(maxsize=2**16)
def words_of(segments: Path) -> tuple[Path, Shape]:
    """Splits a name into words and numbers; among the words ``#`` stands for each number."""
    words = []
    numbers = []
    for segment in segments:
        for piece in re.findall(r"\d+|[^\W\d_]+", segment):
            if piece.isdigit():
                numbers.append(int(piece))
                piece = "#"
            words.append(piece)
    return tuple(words), tuple(numbers)


def leaves_by_path(tree: Any) -> dict[Path, Any]:
    """Returns all leaves of a tree, by path."""
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaves[plain_path(path)] = leaf
    return leaves


@dataclasses.dataclass(frozen=True)
class Tree:
    """A flattened Flax tree.

    Attributes:
      shapes: Path, without the collection -> shape, of every leaf that corresponds to a torch
        parameter or buffer, in natural order: ``Dense_10`` after ``Dense_9``.
      leaves: Path -> leaf, of all leaves, in JAX's order.
      treedef: JAX's structure of the tree.
      collections: True for linen variables, ``{'params': ..., ...}``.
    """

    shapes: Mapping[Path, Shape]
    leaves: Mapping[Path, Any]
    treedef: Any
    collections: bool

    @property
    def has_statistics(self) -> bool:
        """Returns whether the tree has a place for running statistics."""
        return any(path[-1:] in (("mean",), ("var",)) for path in self.shapes)

    def with_leaves(self, leaves: Mapping[Path, Any]) -> Any:
        """Returns the tree with these leaves replaced, and all others unchanged."""
        values = dict(self.leaves)
        for path in values.keys() & leaves.keys():
            values[path] = leaves[path]
        return self.treedef.unflatten(list(values.values()))


def trained(tree: Any) -> Any:
    """Returns the part of a Flax tree that an optimizer gets: parameters without statistics."""
    if any(kind.__module__.startswith("flax.nnx") for kind in type(tree).__mro__):
        from flax import nnx

        state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
        return nnx.filter_state(state, nnx.Param)
    if flatten_tree(tree).collections:
        return tree["params"]
    return tree


def flatten_tree(tree: Any) -> Tree:
    """Flattens a Flax tree.

    Args:
      tree: A linen parameter dict, linen variables ``{'params': ..., 'batch_stats': ...}``, an
        ``nnx.State`` or an nnx module, of arrays or objects with ``shape`` and ``dtype``.

    Returns:
      The flattened tree. Random-number state, caches and other collections are in `leaves`, but not
      in `shapes`.

    Raises:
      CheckpointMismatch: Two leaves have one path, as with the keys 1 and "1", or with one name in
        two collections.
    """
    flat, treedef = jax.tree.flatten_with_path(tree)
    of_variables = isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)
    leaves = {}
    shapes = {}
    ambiguous = {}
    for key_path, value in flat:
        path = plain_path(key_path)
        if path in leaves:
            ambiguous["/".join(path)] = None
        leaves[path] = value
        collection = jax.tree_util.keystr(key_path[:1], simple=True)
        is_kept = not of_variables or collection in COLLECTIONS
        if is_kept and _is_parameter(path, value):
            shapes[path] = shape_of(value)
    if ambiguous:
        raise CheckpointMismatch(
            "Several leaves of the Flax tree have one name. Rename all but one.",
            ambiguous=list(ambiguous),
        )
    ordered = {path: shapes[path] for path in sorted(shapes, key=_natural_key)}
    return Tree(ordered, leaves, treedef, of_variables)


def with_values(tree: Any, leaves: Mapping[Path, Any]) -> Any:
    """Returns a tree with these leaves replaced, cast to the dtypes of the old leaves."""
    exchanged = flatten_tree(tree).with_leaves(leaves)
    return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), tree, exchanged)


def without_values(tree: Any) -> Any:
    """Replaces shapes and large arrays of a tree by zeros of equal shape that take no memory."""

    def emptied(leaf: Any) -> Any:
        small = hasattr(leaf, "__array__") and np.size(leaf) <= _SMALL
        if small or not hasattr(leaf, "dtype"):
            return leaf
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(emptied, tree)


def _natural_key(path: Path) -> list[str]:
    """Returns a sort key with which ``Dense_10`` comes after ``Dense_9``."""
    key = []
    for name in path:
        key.append(re.sub(r"\d+", lambda number: number[0].zfill(_DIGITS), name))
    return key


def _is_parameter(path: Path, value: Any) -> bool:
    if _CACHES.intersection(path):
        return False
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def torch_matrix_dims(path: Any, leaf: Any) -> MatrixDims | None:
    """Gives a leaf the matrix of torch's PowerSGD: a ``matrix_dims`` for `jaxcomp.powersgd`.

    The rows are the leaf axes that come from torch's first axis: the output axis of a kernel (the
    input axis of a ConvTranspose), the heads of an attention projection, the vocabulary of an
    embedding. jaxcomp's default rule gives the same matrix except for unusual shapes. For a
    ``(3, 3, 4, 64)`` kernel both give ``(64, 36)``. For a ``(7, 7, 512, 3)`` kernel the default
    gives ``(1536, 49)`` and torch ``(3, 25088)``. The columns keep the leaf's order, which changes
    only the order of the rows of Q. So if both rules give the same matrices, a state of one fits
    the other.

    This function recognises a ConvTranspose (a module named ``ConvTranspose_0``, ``deconv1``, ...)
    and the projections of attention (``query``, ``key``, ``value``, ``qkv``) by their names. For
    other names use `matrix_dims_of`.

    Args:
      path: A JAX key path, or the path as strings.
      leaf: An array or any object with a ``shape``.

    Returns:
      The axes, or None (not compressed) for fewer than two axes.

    Example:
        >>> import numpy as np
        >>> torch_matrix_dims(("Conv_0", "kernel"), np.zeros((3, 3, 4, 8)))
        MatrixDims(batch=(), rows=(3,), cols=(0, 1, 2))
        >>> torch_matrix_dims(("Embed_0", "embedding"), np.zeros((50, 4)))
        MatrixDims(batch=(), rows=(0,), cols=(1,))
    """
    names = plain_path(tuple(path))
    ndim = len(np.shape(leaf))
    if ndim < 2:
        return None
    module = "".join(names[-2:-1])
    rows: Shape = (0,)  # an embedding or a bare parameter keeps torch's shape
    if names[-1:] == ("kernel",):
        rows = (ndim - 1,)
        if module in _SPLIT_OUTPUTS and ndim > 2:
            rows = tuple(range(1, ndim))
        elif ndim > 2 and names_transposed((module,)):
            rows = (ndim - 2,)
    return MatrixDims(rows=rows, cols=tuple(axis for axis in range(ndim) if axis not in rows))


def names_transposed(names: Path) -> bool:
    """Returns whether a name is that of a ConvTranspose: ``ConvTranspose_0``, ``deconv1``, ..."""
    words, _ = words_of(tuple(map(str.lower, names)))
    return not _TRANSPOSED_WORDS.isdisjoint(words)


def matrix_dims_of(pairs: Sequence[Pair]) -> MatrixDimsFn:
    """Makes a `torch_matrix_dims` for one model, which does not depend on the leaves' names.

    Args:
      pairs: The pairs that `pair` returned.

    Returns:
      A function for the ``matrix_dims`` argument of `jaxcomp.powersgd`. For leaves without a pair
      it calls `torch_matrix_dims`.

    Example:
        >>> from torch_bridge import pair
        >>> like = {"up": {"kernel": np.zeros((3, 3, 4, 8))}}
        >>> matrix_dims_of(pair({"up.weight": np.zeros((4, 8, 3, 3))}, like))(
        ...     ("up", "kernel"), like["up"]["kernel"]
        ... )
        MatrixDims(batch=(), rows=(2,), cols=(0, 1, 3))
    """
    by_path = {pair.path: pair for pair in pairs}

    def matrix_dims(path: Any, leaf: Any) -> MatrixDims | None:
        pair = by_path.get(plain_path(tuple(path)))
        if pair is None or len(np.shape(leaf)) < 2:
            return torch_matrix_dims(path, leaf)
        rows, cols = pair.matrix_axes()
        if rows and cols:
            return MatrixDims(rows=rows, cols=cols)
        return None

    return matrix_dims
