"""Small equal leaves as one array, with an axis in front that counts them.

Each array costs some dozens of operations, which XLA compiles one by one and a GPU launches one by
one: 300 layers of width 64 compile for half a minute. A group costs what one leaf does, but for a
copy into it and one out of it. A step groups the gradients first and takes the groups apart last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcomp._base.typing import Array, MatrixDims
from jaxcomp._lowrank.matrices import LeafPlan, MatrixView
from jaxcomp._mesh.collectives import other_axes

# A leaf of at most so many values is copied faster than the operations that it saves are launched.
_SMALL = 1 << 16
# Of all groups together: their copies of gradients, residuals and outputs are 16 MB each.
_MOST_VALUES = 1 << 22
# XLA takes 32 leaves at once out of a group. From a longer one each is a kernel of its own on a
# GPU, and temporary memory is twice as much (200 layers, rank 4, jaxlib 0.10.2).
_MOST_LEAVES = 32


class Groups(NamedTuple):
    """Which leaves are compressed, and which of these are one array."""

    leaf_plans: list[LeafPlan]  # of all leaves, in flattening order
    uncompressed: list[int]  # positions of those that are averaged as they are
    positions: list[tuple[int, ...]]  # of the compressed leaves in each group
    plans: list[LeafPlan]  # of the array of each group
    views: list[MatrixView]  # how that array is a batch of matrices


class Gradients(NamedTuple):
    """The gradients of one replica."""

    views: list[MatrixView]  # how each of the compressed ones is a batch of matrices
    dtypes: list[Any]  # that their averages take
    compressed: list[Array]  # an array for each group
    uncompressed: list[Array]  # what is averaged as it is


def grouped(plans: list[LeafPlan]) -> Groups:
    """Groups the compressed leaves."""
    uncompressed = []
    for i, plan in enumerate(plans):
        if plan.view is None and jnp.issubdtype(plan.dtype, jnp.floating):
            uncompressed.append(i)
    positions = _small_equal_together(plans)
    group_plans = [_of_group(plans[group[0]], len(group)) for group in positions]
    views = [plan.view for plan in group_plans if plan.view is not None]
    return Groups(plans, uncompressed, positions, group_plans, views)


def _small_equal_together(plans: Sequence[LeafPlan]) -> list[tuple[int, ...]]:
    """Returns positions of compressed leaves, small equal ones together until `_MOST_VALUES`."""
    # A leaf may be sharded along an axis that is left to the compiler: a group would gather it.
    largest = -1 if other_axes() else _SMALL
    kinds: dict[Any, list[int]] = {}
    for i, plan in enumerate(plans):
        if plan.view is not None:
            kind = dataclasses.replace(plan, path="") if plan.size <= largest else i
            kinds.setdefault(kind, []).append(i)
    groups = []
    values = 0
    for kind in sorted(kinds.values(), key=lambda kind: plans[kind[0]].size):
        if len(kind) > 1:
            values += len(kind) * plans[kind[0]].size
        most = _MOST_LEAVES if values <= _MOST_VALUES else 1
        for start in range(0, len(kind), most):
            groups.append(tuple(kind[start : start + most]))
    return sorted(groups)


def _of_group(plan: LeafPlan, number: int) -> LeafPlan:
    """Returns the plan of so many leaves as one array, each of which has this plan."""
    if number == 1 or plan.view is None:
        return plan
    batch, rows, cols = map(_behind_one, plan.view.dims)
    shape = (number, *plan.shape)
    view = MatrixView(shape, MatrixDims((0, *batch), rows, cols), is_group=True)
    return dataclasses.replace(plan, shape=shape, view=view)


def _behind_one(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Counts axes anew where there is one more in front."""
    return tuple(axis + 1 for axis in axes)


def together(groups: Groups, leaves: Sequence[Any]) -> list[Array]:
    """Makes the array of each group from all leaves."""
    arrays = []
    for group in groups.positions:
        if len(group) == 1:
            arrays.append(leaves[group[0]])
        else:
            arrays.append(jnp.stack([leaves[i] for i in group]))
    return arrays


def apart(groups: Groups, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]:
    """Returns all leaves, those of the groups out of their arrays and the others as they are."""
    result = list(leaves)
    for group, array in zip(groups.positions, arrays, strict=True):
        if len(group) == 1:
            result[group[0]] = array
        else:
            for place, i in enumerate(group):
                result[i] = array[place]
    return result


def all_apart(
    groups: Groups, arrays: Sequence[Array], uncompressed: Sequence[Array], leaves: Sequence[Any]
) -> list[Any]:
    """Returns all leaves as `apart` does, with the uncompressed ones in their places too."""
    result = apart(groups, arrays, leaves)
    for i, array in zip(groups.uncompressed, uncompressed, strict=True):
        result[i] = array
    return result
