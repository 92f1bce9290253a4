"""What happens to each leaf: which are compressed, as which matrices, and which together.

Each leaf costs some dozens of operations, which XLA compiles one by one and a GPU launches one by
one: 300 layers of width 64 compile for half a minute. So small leaves that are alike become one,
with an axis in front that counts them; such a stack costs what one leaf does, but for a copy into
it and one out of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, KeyPath, MatrixDims, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matrices import MatrixView

# Key-path entries under which flax.nnx keeps the array of a variable; they name no parameter.
_ANONYMOUS = frozenset({"value", "raw_value"})
# A leaf of at most so many values is copied faster than the operations that it saves are launched.
_SMALL = 1 << 16
# Of all stacks together: their copies of gradients, residuals and outputs are 16 MB each.
_MOST_VALUES = 1 << 22
# XLA takes 32 leaves at once out of a stack. From a longer one each is a kernel of its own on a
# GPU, and temporary memory is twice as much (200 layers, rank 4, jaxlib 0.10.2).
_MOST_LEAVES = 32

# Positions of leaves that are treated as one; most groups have a single one.
Group = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What happens to one leaf. `view` is None and `rank` 0 for a leaf that is not compressed."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    view: MatrixView | None = None
    rank: int = 0

    @property
    def size(self) -> int:
        """Number of values in the leaf."""
        return math.prod(self.shape)

    @property
    def p_shape(self) -> tuple[int, ...]:
        """Shape ``(*batch, n_rows, r)`` of the left factor."""
        assert self.view is not None
        return (*self.view.batch, self.view.n_rows, self.rank)

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape ``(*batch, n_cols, r)`` of the right factor."""
        assert self.view is not None
        return (*self.view.batch, self.view.n_cols, self.rank)

    @property
    def wire_size(self) -> int:
        """Values that this leaf puts on the wire in one step."""
        return self.size if self.view is None else math.prod(self.p_shape) + math.prod(self.q_shape)


def plan_leaves(
    tree: PyTree,
    rank: int | RankFn,
    min_compression_rate: float,
    matrix_dims: MatrixDimsFn | None = None,
) -> list[LeafPlan]:
    """Decides for every leaf of `tree`, in flattening order, whether and how it is compressed.

    Args:
      tree: Arrays, or anything else with ``shape`` and ``dtype``.
      rank: The rank, or a function of (key path, leaf) that gives it; None leaves the leaf alone.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      matrix_dims: A function of (key path, leaf); where it is None, `default_matrix_dims` decides.
        A leaf for which the function returns None is not compressed.

    Returns:
      One plan per leaf.

    Raises:
      ValueError: If `rank` or `matrix_dims` returns something unusable; the message names the leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> params = {"bias": jnp.zeros(64), "kernel": jnp.zeros((3, 3, 32, 64))}
      >>> bias, kernel = extend.plan_leaves(params, rank=4, min_compression_rate=2.0)
      >>> bias.view is None, kernel.p_shape, kernel.q_shape
      (True, (64, 4), (288, 4))
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    _check_names(matrix_dims, [path for path, _ in leaves])
    return [_plan(path, leaf, rank, min_compression_rate, matrix_dims) for path, leaf in leaves]


def is_compressed(rows: int, cols: int, rank: int, min_compression_rate: float) -> bool:
    """Whether two factors of a ``(rows, cols)`` matrix are small enough beside it, as in torch.

    Example:
      >>> from jaxcomp import extend
      >>> extend.is_compressed(64, 64, 16, 2.0), extend.is_compressed(64, 64, 15, 2.0)
      (False, True)
    """
    return (rows + cols) * rank * min_compression_rate < rows * cols


def _plan(
    path: KeyPath,
    leaf: Any,
    rank: int | RankFn,
    min_compression_rate: float,
    matrix_dims: MatrixDimsFn | None,
) -> LeafPlan:
    name = leaf_name(path)
    try:
        shape, dtype = tuple(np.shape(leaf)), leaf_dtype(leaf)
    except TypeError as error:
        raise ValueError(
            f"The leaf {name} is a {type(leaf).__name__} and no array. Of an Equinox module pass "
            "eqx.filter(model, eqx.is_inexact_array), of other trees the arrays that are trained."
        ) from error
    plain = LeafPlan(name, shape, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return plain
    asked = _asked_rank(path, leaf, rank)
    if asked is None:
        return plain
    dims = (default_matrix_dims if matrix_dims is None else matrix_dims)(path, leaf)
    if dims is None:
        return plain
    view = MatrixView(shape, _checked_dims(dims, shape, name))
    rows, cols = view.n_rows, view.n_cols
    r = min(rows, cols, asked)
    if not is_compressed(rows, cols, r, min_compression_rate) or 0 in view.batch:
        return plain
    return LeafPlan(name, shape, dtype, view, r)


def default_matrix_dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
    """The split of the axes into a leading and a trailing block with the fewest rows + columns.

    Rows are the trailing block, so that a Flax kernel ``(in, out)`` becomes torch's ``(out, in)``
    and ``HWIO`` becomes ``(O, HWI)``; ties go to the later cut. A matrix named ``embedding`` is
    ``(vocab, features)`` with the vocabulary as rows, as in torch. None for fewer than two axes.

    Args:
      path: The key path of the leaf.
      leaf: The leaf, or anything else with a shape.

    Returns:
      Which axes are rows and which are columns; what a `matrix_dims` function returns for a leaf
      without a wish of its own.

    Example:
      >>> import jax
      >>> from jaxcomp import extend
      >>> extend.default_matrix_dims((), jax.ShapeDtypeStruct((3, 3, 16, 32), "float32"))
      MatrixDims(batch=(), rows=(3,), cols=(0, 1, 2))
    """
    shape = tuple(np.shape(leaf))
    ndim = len(shape)
    if ndim < 2:
        return None
    if ndim == 2 and _last_name(path) == "embedding":
        return MatrixDims(rows=(0,), cols=(1,))
    cuts = range(ndim - 1, 0, -1)  # later cuts first: min() keeps the first of equals
    cut = min(cuts, key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))
    return MatrixDims(rows=tuple(range(cut, ndim)), cols=tuple(range(cut)))


def stacked(*names: str, matrix_dims: MatrixDimsFn | None = None) -> MatrixDimsFn:
    """A ``matrix_dims=`` function for scanned layers, whose leaves have an axis that counts them.

    Args:
      *names: Parts of the tree that hold stacked layers, as ``nn.scan`` and `jax.lax.scan` over
        blocks make them: ``stacked("blocks")``. The leading axis of every leaf in them counts
        layers, which are compressed one by one.
      matrix_dims: The rule for one layer, and for leaves elsewhere; None for the default one.

    Returns:
      A function of (key path, leaf) for `powersgd`.

    Raises:
      ValueError: If no name is given; when it is used, if a name is none of the tree's.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.powersgd(4, axis_name="data", matrix_dims=jaxcomp.stacked("blocks"))
      >>> tx.init({"blocks": {"kernel": jnp.zeros((12, 64, 256))}}).q["blocks"]["kernel"].shape
      (12, 64, 4)
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"`stacked` takes names of parts of the tree, got {names!r}, as in stacked('blocks')."
        )
    rule = default_matrix_dims if matrix_dims is None else matrix_dims

    def dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
        if not _names_of(path) & set(names):
            return rule(path, leaf)
        layer = rule(path, jax.ShapeDtypeStruct(np.shape(leaf)[1:], leaf_dtype(leaf)))
        if layer is None:
            return None
        batch, rows, cols = (tuple(axis + 1 if axis >= 0 else axis for axis in x) for x in layer)
        return MatrixDims((0, *batch), rows, cols)

    # A misspelt name would be silent: `plan_leaves` looks for each of them in the tree.
    dims.wanted_names = frozenset(names)  # pyright: ignore[reportFunctionMemberAccess]
    return dims


def _names_of(path: KeyPath) -> set[Any]:
    return {getattr(key, "key", getattr(key, "name", None)) for key in path}


def _check_names(matrix_dims: MatrixDimsFn | None, paths: Sequence[KeyPath]) -> None:
    """Refuses names of `stacked` that the tree has not.

    Raises:
      ValueError: With the names that there are.
    """
    wanted = getattr(matrix_dims, "wanted_names", frozenset())
    found = set().union(*map(_names_of, paths)) - {None} if wanted else set()
    if missing := sorted(wanted - found):
        raise ValueError(
            f"stacked{tuple(missing)} names no part of this tree, whose parts are named "
            f"{', '.join(sorted(map(str, found)))}."
        )


def _asked_rank(path: KeyPath, leaf: Any, rank: int | RankFn) -> int | None:
    if not callable(rank):
        return rank
    value = rank(path, leaf)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(
            f"`rank` must return a positive integer or None, got {value!r} for the leaf "
            f"{leaf_name(path)}. Return None for a leaf that shall not be compressed."
        )
    return int(value)


def _checked_dims(dims: MatrixDims, shape: tuple[int, ...], name: str) -> MatrixDims:
    ndim = len(shape)
    try:
        axes = [tuple(axis + ndim if axis < 0 else axis for axis in part) for part in dims]
        batch, rows, cols = axes
    except (TypeError, ValueError):
        batch, rows, cols = (), (), ()
    if not rows or not cols or sorted(batch + rows + cols) != list(range(ndim)):
        raise ValueError(
            f"`matrix_dims` must put each of the {ndim} axes of the leaf {name} with shape {shape} "
            f"into exactly one of batch, rows and cols, with at least one row and one column axis, "
            f"got {dims!r}. Return None for a leaf that shall not be compressed."
        )
    return MatrixDims(batch, rows, cols)


def _last_name(path: KeyPath) -> str:
    for key in reversed(path):
        name = getattr(key, "key", getattr(key, "name", None))
        if isinstance(name, str) and name not in _ANONYMOUS:
            return name
    return ""


def groups_of(plans: Sequence[LeafPlan]) -> list[Group]:
    """The compressed leaves; small equal ones together, the smallest until `_MOST_VALUES`."""
    chosen = [i for i, plan in enumerate(plans) if plan.view is not None]
    kinds: dict[Any, list[int]] = {}
    for i in chosen:
        alone = i if plans[i].size > _SMALL else None
        kinds.setdefault((dataclasses.replace(plans[i], path=""), alone), []).append(i)
    groups, values = [], 0
    for kind in sorted(kinds.values(), key=lambda kind: plans[kind[0]].size):
        values += len(kind) * plans[kind[0]].size if len(kind) > 1 else 0
        most = _MOST_LEAVES if values <= _MOST_VALUES else 1
        groups += [tuple(kind[k : k + most]) for k in range(0, len(kind), most)]
    return sorted(groups)


def plan_of(plans: Sequence[LeafPlan], group: Group) -> LeafPlan:
    """The plan of the leaves of a group together."""
    plan = plans[group[0]]
    if len(group) == 1:
        return plan
    assert plan.view is not None  # only compressed leaves are in groups
    batch, rows, cols = (tuple(axis + 1 for axis in part) for part in plan.view.dims)
    shape = (len(group), *plan.shape)
    view = MatrixView(shape, MatrixDims((0, *batch), rows, cols), is_stack=True)
    return dataclasses.replace(plan, shape=shape, view=view)


def stack(groups: Sequence[Group], values: Sequence[Array]) -> list[Array]:
    """One array for each group, from those of all leaves."""
    return [
        values[group[0]] if len(group) == 1 else jnp.stack([values[i] for i in group])
        for group in groups
    ]


def unstack(groups: Sequence[Group], arrays: Sequence[Array]) -> dict[int, Array]:
    """The inverse of `stack`: arrays by the positions of their leaves."""
    found: dict[int, Array] = {}
    for group, x in zip(groups, arrays, strict=True):
        found |= zip(group, [x] if len(group) == 1 else x, strict=True)
    return found
