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

from jaxcomp._base.leaves import is_masked
from jaxcomp._base.typing import Array
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
    """Leaves as arrays: first those that are compressed, then those that are not."""

    positions: list[tuple[int, ...]]  # of the leaves in each array
    plans: list[LeafPlan]  # of each array


def grouped(plans: Sequence[LeafPlan]) -> Groups:
    """Groups floating leaves: small equal ones that are compressed, up to `_MOST_VALUES`."""
    # A leaf may be sharded along an axis that is left to the compiler: a group would gather it.
    largest = -1 if other_axes() else _SMALL
    kinds: dict[Any, list[int]] = {}
    for i, plan in enumerate(plans):
        small = plan.view is not None and plan.size <= largest
        kind = dataclasses.replace(plan, path="") if small else i
        if jnp.issubdtype(plan.dtype, jnp.floating):
            kinds.setdefault(kind, []).append(i)
    groups = []
    values = 0
    for kind in sorted(kinds.values(), key=lambda kind: plans[kind[0]].size):
        if len(kind) > 1:
            values += len(kind) * plans[kind[0]].size
        most = _MOST_LEAVES if values <= _MOST_VALUES else 1
        for start in range(0, len(kind), most):
            groups.append(tuple(kind[start : start + most]))
    groups.sort(key=lambda group: (plans[group[0]].view is None, group))
    return Groups(groups, [_of_group(plans[group[0]], len(group)) for group in groups])


def _of_group(plan: LeafPlan, number: int) -> LeafPlan:
    """Returns the plan of so many leaves as one array, each of which has this plan."""
    if number == 1 or plan.view is None:
        return plan
    shape = (number, *plan.shape)
    view = MatrixView(shape, plan.view.dims.behind_an_axis(), is_group=True)
    return dataclasses.replace(plan, shape=shape, view=view)


def together(groups: Groups, leaves: Sequence[Any]) -> list[Array]:
    """Makes the array of each group of all leaves; none of leaves that a state does not have."""
    arrays = []
    for positions in _present(groups, leaves):
        members = [leaves[i] for i in positions]
        arrays.append(members[0] if len(positions) == 1 else jnp.stack(members))
    return arrays


def apart(groups: Groups, arrays: Sequence[Array], leaves: Sequence[Any]) -> list[Any]:
    """Returns all leaves, those of the groups out of their arrays and the others as they are."""
    result = list(leaves)
    for positions, array in zip(_present(groups, leaves), arrays, strict=False):
        for place, i in enumerate(positions):
            result[i] = array if len(positions) == 1 else array[place]
    return result


def _present(groups: Groups, leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the positions of the groups that there are leaves of."""
    return [x for x in groups.positions if not is_masked(leaves[x[0]])]
