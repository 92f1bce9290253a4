"""Views scanned layers, which are stacked along the first axis of a leaf, as one matrix each.

`stacked` makes a function for the `matrix_dims` of `powersgd`. The default rule takes a kernel of
``(layers, in, out)`` as one matrix with one rank for all layers, which loses more. Nothing in a
leaf shows for certain that its first axis counts layers, so the user names the parts of the tree,
and names that fit nothing are refused.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp._base.checks import answers_other_names, check_dims
from jaxcomp._base.leaves import key_names, leaf_dtype, leaf_name
from jaxcomp._base.typing import KeyPath, MatrixDims, MatrixDimsFn, Shape
from jaxcomp._lowrank.matrices import default_matrix_dims, plan_leaves

_LEAST_AXES = 3  # axes of a stacked matrix
_SHOWN = 4  # number of leaves that a message lists
_LEAST_RATE = 2  # the default `min_compression_rate`


@answers_other_names
def stacked(*names: str, matrix_dims: MatrixDimsFn | None = None) -> MatrixDimsFn:
    """Makes a ``matrix_dims=`` function for layers that are stacked along the first axis of leaves.

    Args:
      *names: Names of parts of the tree that hold stacked layers, as ``nn.scan`` and `jax.lax.scan`
        make them: ``stacked("blocks")``. The leading axis of every leaf in them counts layers, and
        each layer is compressed separately.
      matrix_dims: The rule for the leaves of one layer, and for leaves elsewhere; None for the
        default rule.

    Returns:
      A function of (key path, leaf) for `powersgd`.

    Raises:
      ValueError: If no name is given; when the function is used, if the tree has no such name, a
        leaf in the named part has no axis of layers, or no leaf in it has a matrix for each layer.

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
    rule = check_dims(matrix_dims) or default_matrix_dims

    def dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
        if not set(names) & set(key_names(path)):
            return rule(path, leaf)
        layer = jax.ShapeDtypeStruct(np.shape(leaf)[1:], leaf_dtype(leaf))
        layer_dims: Any = rule(path, layer)
        try:
            return MatrixDims(*layer_dims).behind_an_axis()
        except (TypeError, ValueError):  # `plan_leaves` refuses them by leaf name
            return layer_dims

    # `plan_leaves` calls it with all leaves of a tree before it plans the first one.
    dims.check_leaves = functools.partial(_check_leaves, names)  # pyright: ignore[reportFunctionMemberAccess]
    return dims


def _check_leaves(names: Sequence[str], leaves: Sequence[tuple[KeyPath, Any]]) -> None:
    """Refuses names that the tree does not have, and named parts that are not stacked layers."""
    known = set()
    parts: dict[str, dict[str, Shape]] = {}
    for path, leaf in leaves:
        in_path = key_names(path)
        known.update(in_path)
        for i, name in enumerate(in_path):
            if name in names:
                part = leaf_name(path[: i + 1])
                parts.setdefault(part, {})[leaf_name(path)] = np.shape(leaf)
                break  # this is the outermost part, if names are nested
    missing = tuple(name for name in names if name not in known)
    if missing:
        raise ValueError(
            f"stacked{missing} names no part of this tree, whose parts are named "
            f"{', '.join(sorted(map(str, known - {None})))}."
        )
    for part, shapes in parts.items():
        _check_part(part, shapes)


def _check_part(part: str, shapes: Mapping[str, Shape]) -> None:
    """Refuses a part whose leading axes differ, or without a leaf of three or more axes.

    A stack of biases has two axes, so a leaf of two axes does not show stacked layers.
    """
    lengths = {shape[:1] for shape in shapes.values()}  # () for a scalar
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            f"`stacked` takes the leading axis of every leaf in {part} as the axis of layers, but "
            f"their lengths differ: {_listed(shapes)}. Name only parts whose leaves are stacked "
            "layers."
        )
    if max(map(len, shapes.values())) < _LEAST_AXES:
        raise ValueError(
            f"`stacked` would compress nothing in {part}: no leaf in it has an axis of layers and "
            f"two more axes: {_listed(shapes)}. Leave this name out; each leaf is then compressed "
            "as one matrix."
        )
    thin = {}  # leaves of which the matrix of one layer is too small, even at rank 1
    for name, shape in shapes.items():
        layer = jax.ShapeDtypeStruct(shape[1:], np.float32)
        # By the default rule, because the rank and the rate of the reducer are not known here.
        (plan,) = plan_leaves(layer, 1, _LEAST_RATE)
        if layer.ndim > 1 and plan.view is None:
            thin[name] = shape
    if thin:
        warnings.warn(
            f"`stacked` compresses nothing of {_listed(thin)} in {part}: the matrix of one layer "
            "is too small. To compress all layers as one matrix, keep these leaves under a name "
            "that is not in `stacked`.",
            stacklevel=2,
        )


def _listed(shapes: Mapping[str, Shape]) -> str:
    first = itertools.islice(shapes.items(), _SHOWN)
    return ", ".join(f"{name} of shape {shape}" for name, shape in first)
