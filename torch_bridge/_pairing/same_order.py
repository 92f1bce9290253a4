"""Whether parameters hold the values of a checkpoint in the order that their pairings say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import is_tensor, to_numpy
from torch_bridge._pairing.leaves import flatten
from torch_bridge._pairing.pairing import Pairing


def refuse_other_order(pairings: Sequence[Pairing], model: Mapping[str, Any], params: Any) -> None:
    """Notice parameters that were converted with other options than their state will be.

    Args:
      pairings: Those of the state.
      model: The torch state dict; tensors without values say nothing.
      params: The Flax tree; leaves without values, or with others, say nothing.

    Raises:
      CheckpointMismatch: Leaves hold the same values in another order; all are listed.
    """
    tree = flatten(params)
    leaves = dict(zip(tree.paths, tree.values, strict=True))
    moved = [
        f"{'/'.join(p.path)} {p.shape} <-> {p.torch_name} {p.torch_shape}"
        for p in pairings
        if p.whole and len(p.torch_shape) > 1 and p.path in leaves
        if _is_permuted(leaves[p.path], p, model.get(p.torch_name))
    ]
    if moved:
        raise CheckpointMismatch(
            "The parameters hold the values of the checkpoint in another order: they were "
            "converted with other options. Pass the same flatten=, unflatten=, conv_transpose=, "
            "conv1d= and rules= here, or the same pairings=.",
            mis_shaped=moved,
            parameters=("flatten", "unflatten", "conv_transpose", "conv1d", "rules"),
        )


def _is_permuted(leaf: Any, pairing: Pairing, tensor: Any) -> bool:
    known = isinstance(tensor, np.ndarray) or is_tensor(tensor)
    if not known or not isinstance(leaf, np.ndarray | jax.Array) or isinstance(leaf, Tracer):
        return False
    mine, theirs = np.asarray(leaf), pairing.to_flax(to_numpy(tensor))
    # Cast since then, or before: both rounded to the narrower dtype are equal again.
    narrow = theirs.dtype if theirs.dtype.itemsize < mine.dtype.itemsize else mine.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        mine, theirs = mine.astype(narrow, copy=False), theirs.astype(narrow, copy=False)
    if mine.size == 0 or np.array_equal(mine, theirs):
        return False
    # Cheap before exact: most leaves with other values have another extreme.
    if mine.min() != theirs.min() or mine.max() != theirs.max():
        return False
    return np.array_equal(np.sort(mine, axis=None), np.sort(theirs, axis=None))
