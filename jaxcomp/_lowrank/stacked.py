"""Scanned layers, whose leaves have an axis that counts them, as matrices of one layer each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp._base.leaves import leaf_dtype
from jaxcomp._base.typing import KeyPath, MatrixDims, MatrixDimsFn
from jaxcomp._lowrank.matrices import default_matrix_dims


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

    def names_of(path: KeyPath) -> set[Any]:
        return {getattr(key, "key", getattr(key, "name", None)) for key in path}

    def dims(path: KeyPath, leaf: Any) -> MatrixDims | None:
        if not names_of(path) & set(names):
            return rule(path, leaf)
        layer = rule(path, jax.ShapeDtypeStruct(np.shape(leaf)[1:], leaf_dtype(leaf)))
        try:
            parts = [
                tuple(axis + 1 if axis >= 0 else axis for axis in part) for part in layer or ()
            ]
            batch, rows, cols = parts
        except (TypeError, ValueError):
            return layer  # None, or what is refused with the name of the leaf
        return MatrixDims((0, *batch), rows, cols)

    def check_paths(paths: Sequence[KeyPath]) -> None:
        found = set().union(*map(names_of, paths)) - {None}
        if missing := sorted(set(names) - found):
            raise ValueError(
                f"stacked{tuple(missing)} names no part of this tree, whose parts are named "
                f"{', '.join(sorted(map(str, found)))}."
            )

    dims.check_paths = check_paths  # pyright: ignore[reportFunctionMemberAccess]
    return dims
