"""Small leaves of one shape as one leaf, with an axis in front that counts them.

On a GPU each leaf costs a dozen kernels, which take longer to launch than to run where it is small,
and XLA compiles every one of them: 200 layers of width 128 for four minutes. A stack of leaves
costs what one leaf does, but for a copy into the stack and one out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from jaxcomp._lowrank.matricize import LeafPlan, MatrixDims, MatrixView

# A leaf of so many values is copied as fast as the kernels that its stack saves are launched (4 MB
# there and back, at terabytes a second, and ten kernels).
SMALL = 1 << 20
# Stacks are copies, of gradients, residuals and outputs: 256 MB each are not felt beside a model.
_ALL = 1 << 26
# XLA takes 32 leaves at once out of a stack. From a longer one each is a kernel of its own, and of
# 200 layers temporary memory is twice as much (jaxlib 0.10.2, rank 4).
_MOST = 32


@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which leaves of a tree are stacked, by their positions.

    A stack has the position of the first of its members; those of the others stay as they are, and
    are not used.
    """

    members: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plans: Sequence[LeafPlan],
        groups: Sequence[Sequence[int]],
        residuals: Sequence[Any],
    ) -> Stacks:
        """Stacks of the compressed leaves that are small and alike, the smallest leaves first.

        Args:
          plans: Of all leaves.
          groups: Positions of leaves that may be stacked with each other.
          residuals: Of all leaves; stacked ones have one dtype.
        """
        kinds = {
            i: (number, plan.shape, plan.dtype, plan.view, plan.rank, _dtype(residuals[i]))
            for number, group in enumerate(groups)
            for i in group
            if (plan := plans[i]).view is not None and plan.size <= SMALL
        }
        stacks, values = {}, 0
        found = cls.alike(kinds).members
        for first in sorted(found, key=lambda i: plans[i].size):
            values += len(found[first]) * plans[first].size
            if values <= _ALL:
                stacks[first] = found[first]
        return cls(stacks)

    @classmethod
    def alike(cls, kinds: Mapping[int, Any]) -> Stacks:
        """Stacks of the leaves at these positions that are of one kind."""
        found: dict[Any, list[int]] = {}
        for i, kind in kinds.items():
            found.setdefault(kind, []).append(i)
        cut = (tuple(x[k : k + _MOST]) for x in found.values() for k in range(0, len(x), _MOST))
        return cls({stack[0]: stack for stack in cut if len(stack) > 1})

    def left(self, positions: Sequence[int]) -> list[int]:
        """Those of the positions that hold something once the leaves are stacked."""
        gone = {i for group in self.members.values() for i in group[1:]}
        return [i for i in positions if i not in gone]

    def plans(self, plans: Sequence[LeafPlan]) -> list[LeafPlan]:
        """The plans of all leaves, with those of stacks in their places."""
        result = list(plans)
        for first, group in self.members.items():
            result[first] = _plan_of(plans[first], len(group))
        return result

    def stack(self, values: Sequence[Any]) -> list[Any]:
        """Values of all leaves, with stacks in their places; a masked node stays one."""
        result = list(values)
        for first, group in self.members.items():
            if not isinstance(values[first], optax.MaskedNode):
                result[first] = jnp.stack([values[i] for i in group])
        return result

    def unstack(self, values: Sequence[Any]) -> list[Any]:
        """The inverse of `stack`."""
        result = list(values)
        for first, group in self.members.items():
            if not isinstance(values[first], optax.MaskedNode):
                for i, value in zip(group, values[first], strict=True):
                    result[i] = value
        return result


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _plan_of(plan: LeafPlan, number: int) -> LeafPlan:
    """The plan of so many leaves that each have this one."""
    assert plan.view is not None  # only compressed leaves are stacked
    batch, rows, cols = (tuple(axis + 1 for axis in part) for part in plan.view.dims)
    shape = (number, *plan.shape)
    view = MatrixView(shape, MatrixDims((0, *batch), rows, cols))
    return dataclasses.replace(plan, shape=shape, view=view)
