"""The leaves of a Flax tree: linen dicts, ``nnx.State`` and nnx modules through one door.

JAX's own key paths name the leaves, so no Flax import is needed. For `jaxcomp.powersgd`, every leaf
is a matrix as torch's ``view(shape[0], -1)`` cuts it.
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
# The collections of linen variables that hold what a torch state dict holds.
COLLECTIONS = ("params", "batch_stats")
_DIGITS = 20  # of the largest number in a name
_SMALL = 1024  # values; what is smaller may be a step count or a seed
# Decoding caches of attention: floating point, but not parameters.
_CACHES = frozenset({"cached_key", "cached_value", "cache_index"})


def plain_path(path: tuple[Any, ...]) -> Path:
    """Writes a JAX key path as strings, without what is not a module.

    That is the collection of linen variables, and the entry under which nnx keeps an array.
    """
    if len(path) > 1:
        last = path[-1]
        if isinstance(last, jax.tree_util.GetAttrKey) and last.name in ("value", "raw_value"):
            path = path[:-1]
    return without_collection(tuple(jax.tree_util.keystr((key,), simple=True) for key in path))


def without_collection(path: Path) -> Path:
    """Returns the path of a leaf as it is where the tree has no collections."""
    if len(path) > 1 and path[0] in COLLECTIONS:
        return path[1:]
    return path


@functools.lru_cache(maxsize=2**16)
def words_of(segments: Path) -> tuple[Path, Shape]:
    """Splits a name into its words, with # for each number, and its numbers."""
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
    """Collects every leaf of a tree by its path."""
    return {plain_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@dataclasses.dataclass(frozen=True)
class Tree:
    """A flattened Flax tree.

    Attributes:
      shapes: Path, without the collection -> shape of every leaf that corresponds to a torch
        parameter or buffer, in natural order: ``Dense_10`` after ``Dense_9``.
      leaves: Path -> leaf, in JAX's order, those included that correspond to nothing in torch.
      treedef: Their structure.
      collections: Whether it is of linen variables, ``{'params': ..., ...}``.
    """

    shapes: Mapping[Path, Shape]
    leaves: Mapping[Path, Any]
    treedef: Any
    collections: bool

    @property
    def has_statistics(self) -> bool:
        """Tells whether running statistics have a place in the tree."""
        names = {path[-1] for path in self.shapes if path}
        return bool(names & {"mean", "var"})

    def with_leaves(self, leaves: Mapping[Path, Any]) -> Any:
        """Returns the tree with some leaves exchanged and all others as they are."""
        values = dict(self.leaves)
        for path in values.keys() & leaves.keys():
            values[path] = leaves[path]
        return self.treedef.unflatten(list(values.values()))


def trained(tree: Any) -> Any:
    """Selects what an optimizer gets of a Flax tree: parameters without running statistics."""
    if any(kind.__module__.startswith("flax.nnx") for kind in type(tree).__mro__):
        from flax import nnx

        state = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
        return nnx.filter_state(state, nnx.Param)
    if flatten(tree).collections:
        return tree["params"]
    return tree


def flatten(tree: Any) -> Tree:
    """Flattens a Flax tree.

    Args:
      tree: A linen parameter dict, linen variables ``{'params': ..., 'batch_stats': ...}``, an
        ``nnx.State`` or an nnx module; arrays or anything with ``shape`` and ``dtype``.

    Returns:
      The flattened tree. Random-number state, caches and other collections are kept in `leaves`
      and have no shape in `shapes`.

    Raises:
      CheckpointMismatch: Leaves have one name, as those of the keys 1 and "1", or those of one
        name in several collections.
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
    """Puts leaves into a tree, in the dtypes that it has."""
    exchanged = flatten(tree).with_leaves(leaves)
    return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), tree, exchanged)


def hollow(tree: Any) -> Any:
    """Replaces shapes and large arrays of a tree by arrays of the same that take no memory."""

    def emptied(leaf: Any) -> Any:
        small = hasattr(leaf, "__array__") and np.size(leaf) <= _SMALL
        if small or not hasattr(leaf, "dtype"):
            return leaf
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(emptied, tree)


def _natural_key(path: Path) -> list[str]:
    """Returns what sorts names as people do: ``Dense_10`` after ``Dense_9``."""
    return [re.sub(r"\d+", lambda number: number[0].zfill(_DIGITS), name) for name in path]


def _is_parameter(path: Path, value: Any) -> bool:
    if _CACHES.intersection(path):
        return False
    dtype = getattr(value, "dtype", None) or np.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def torch_matrix_dims(path: Any, leaf: Any) -> MatrixDims | None:
    """Cuts a leaf as torch's PowerSGD does: a ``matrix_dims`` for `jaxcomp.powersgd`.

    Rows are the leaf axes that torch's first axis becomes: the output axis of a kernel (the input
    axis of a ConvTranspose), the heads of an attention projection, the vocabulary of an embedding.
    jaxcomp's own rule gives the same matrix for all but unusual shapes: it makes ``(64, 36)`` of a
    ``(3, 3, 4, 64)`` kernel as torch does, and ``(1536, 49)`` of a ``(7, 7, 512, 3)`` one, of which
    torch makes ``(3, 25088)``. Columns stay in the leaf's order, which changes nothing but the
    order of the rows of Q, so a state made for one rule fits the other wherever both cut alike.

    The path alone tells a ConvTranspose (a module named ``ConvTranspose_0``, ``deconv1``, ...) and
    the projections of attention (``query``, ``key``, ``value``, ``qkv``). For other names use
    `matrix_dims_of`.

    Args:
      path: A JAX key path, or the path as strings.
      leaf: An array or anything with a ``shape``.

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
        elif ndim > 2 and _TRANSPOSED_WORDS.intersection(words_of((module.lower(),))[0]):
            rows = (ndim - 2,)
    return MatrixDims(rows=rows, cols=tuple(axis for axis in range(ndim) if axis not in rows))


def matrix_dims_of(pairs: Sequence[Pair]) -> MatrixDimsFn:
    """Makes a `torch_matrix_dims` for the leaves of one model, whatever they are called.

    Args:
      pairs: As `pair` found them.

    Returns:
      A function for the ``matrix_dims`` argument of `jaxcomp.powersgd`. Leaves without a pair
      are left to `torch_matrix_dims`.

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
