"""What every step of a reducer begins and ends with, whatever its arithmetic.

Gradients are checked and taken apart, and what is made of them is put together again. The state is
compared with them leaf by leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_axis_name
from jaxcomp._base.leaves import boxed_as, leaf_name, unboxed
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import (
    axis_tuple,
    check_local,
    explicit_axes,
)
from jaxcomp._mesh.explicit import call_on_automatic_axes, typed_specs
from jaxcomp._mesh.weights import Weight, as_weight, if_counted, weighted_mean_each


class Reduction(NamedTuple):
    """One update of a `Reducer`, with what `error_feedback` and `switch_at` need to know of it."""

    updates: PyTree  # the average, equal on every replica
    state: PyTree  # the new state; the old one, bit for bit, where `finite` is False
    # this replica's own contribution as sent: `updates` is the mean of it, weighted by the weights
    sent: PyTree
    finite: Array  # bool scalar, equal on every replica: whether all updates are finite


def on_plain_arrays(
    function: Callable[..., Any], specs: Callable[[PyTree, PyTree], PyTree]
) -> Callable[..., Any]:
    """`function` on what is in the boxes of gradients and parameters; outputs are boxed again.

    Beside Explicit axes every operation must say how its result is sharded, which the arithmetic of
    a reducer, with its reshapes and products, cannot know. There the compiler decides meanwhile,
    and the results are typed as what they replace.

    Args:
      function: A reducer's ``update`` or `reduce`.
      specs: From the partition specs of gradients and state to those of what `function` returns.
    """

    def run(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any) -> Any:
        arguments = unboxed(updates), state, unboxed(params)
        if explicit_axes():
            typed = specs(*map(typed_specs, arguments[:2]))
            result = call_on_automatic_axes(function, typed, *arguments, **extra_args)
        else:
            result = function(*arguments, **extra_args)
        if isinstance(result, Reduction):
            means, sent = (boxed_as(x, updates) for x in (result.updates, result.sent))
            return result._replace(updates=means, sent=sent)
        means, state = result
        return boxed_as(means, updates), state

    return run


@dataclasses.dataclass(frozen=True)
class OpenStep:
    """The gradients of one step on their way through a reducer; from `open_step`."""

    treedef: Any
    leaves: list[Any]  # in flattening order; averaged over `reduce_first` already
    positions: list[int]  # of the floating ones
    weight: Weight | None = None  # of this replica, or of the fast axes together; None: all alike

    @property
    def arrays(self) -> list[Array]:
        """What is to be averaged over the replicas."""
        return [self.leaves[i] for i in self.positions]

    def beside(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree like the gradients' that stand where `arrays` do."""
        leaves = self.treedef.flatten_up_to(tree)
        return [leaves[i] for i in self.positions]

    def tree(self, arrays: Sequence[Array]) -> PyTree:
        """The gradients' tree with these in the place of `arrays`; other leaves as they came."""
        return self.treedef.unflatten(_replaced(self.leaves, self.positions, arrays))

    def close(
        self,
        means: Sequence[Array],
        state: PyTree,
        finite: Array,
        *,
        sent: Sequence[Array] | None = None,
        old: PyTree | None = None,
    ) -> Reduction:
        """The end of the step.

        Args:
          means: The averages of `arrays`, in any floating dtype; they take on the gradients'.
          state: The new state.
          finite: Bool scalar, equal on every replica: whether all means are finite.
          sent: This replica's own contributions to the means; None for the gradients themselves.
          old: The state before. If it is given, a step that is not finite leaves no trace: the
            state is the old one, bit for bit, and all outputs are NaN. None if the reducer has seen
            to that.

        Returns:
          What the reducer's `reduce` returns.
        """
        if old is not None:
            means = nan_unless(finite, means)
            state = jax.tree.map(lambda new, kept: jnp.where(finite, new, kept), state, old)
        dtypes = [x.dtype for x in self.arrays]
        means, sent = (
            [x.astype(dtype) for x, dtype in zip(xs, dtypes, strict=True)]
            for xs in (means, self.arrays if sent is None else sent)
        )
        return Reduction(self.tree(means), state, self.tree(sent), finite)


def open_step(
    updates: PyTree,
    axis_name: AxisName | None,
    reduce_first: AxisName | None = None,
    weight: Any = None,
) -> OpenStep:
    """Opens a reducer's step: refuses what cannot be averaged, and takes apart what can.

    Args:
      updates: This replica's gradients. ``float0`` leaves, of integer parameters, are passed on.
      axis_name: The mapped axis or axes of the replicas; None where they are not known.
      reduce_first: Fast axes over which the exact mean is taken beforehand, in the gradients' own
        dtypes.
      weight: How much this replica counts, a number; `jaxcomp.extend.weighted_mean` takes it as
        the result's ``weight``. The gradients of a replica of weight 0, which may hold anything,
        become zeros. None if all count the same.

    Returns:
      The floating leaves as ``arrays``, and ``close`` to put a `Reduction` together.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, a gradient was already reduced over
        the axis, or the axis is not bound. The message names the leaf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def step(gradients):
      ...     opened = extend.open_step(gradients, "data")
      ...     reduced = extend.reduce_mean(opened.arrays, "data", jnp.float32)
      ...     return opened.close(reduced.means, (), reduced.finite).updates
      >>> jax.vmap(step, axis_name="data")({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [[2.0], [2.0]]
    """
    if reduce_first is not None:
        updates, weight = _averaged(updates, reduce_first, weight)
    counts = None if weight is None else as_weight(weight, axis_name)
    leaves, treedef = jax.tree.flatten(updates)
    positions = reducible(updates, axis_name)
    if counts is not None:
        leaves = _replaced(leaves, positions, [if_counted(counts, leaves[i]) for i in positions])
    return OpenStep(treedef, leaves, positions, counts)


def reducible(updates: PyTree, axis_name: AxisName | None) -> list[int]:
    """Positions (in flattening order) of the leaves that a reducer averages.

    ``float0`` leaves, the gradients of integer parameters, carry nothing and are left out.

    Raises:
      ValueError: As `open_step`.
    """
    positions, wrong = [], []
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(updates)[0]):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            positions.append(i)
        elif dtype is None:
            wrong.append(f"{leaf_name(path)} is a {type(leaf).__name__} and no array")
        elif dtype != jax.dtypes.float0:
            wrong.append(f"{leaf_name(path)} has dtype {dtype}")
    if wrong:
        raise ValueError(
            f"Only floating gradients can be reduced: {'; '.join(wrong)}. Keep parameters that are "
            "not trained out with optax.masked (of an Equinox module, differentiate "
            "eqx.filter(model, eqx.is_inexact_array)); wrap the chain in "
            "optax.contrib.split_real_and_imaginary for complex ones."
        )
    if axis_name is not None:
        check_local(updates, axis_name)
    return positions


def other_state(reducer: str, kind: str, state: PyTree) -> ValueError:
    """The refusal of a state that is not this reducer's own."""
    return ValueError(
        f"{reducer}'s update needs its own {kind}, got {type(state).__name__}. Inside an "
        "optax.chain the chain's update takes the chain's state; jaxcomp.adapt_state turns another "
        "reducer's into this one's."
    )


def nan_unless(finite: Array, values: Sequence[Array]) -> list[Array]:
    """The arrays, or NaN throughout."""
    return [jnp.where(finite, x, jnp.nan) for x in values]


def all_finite(leaves: Sequence[Array]) -> Array:
    """Bool scalar: whether every floating value is finite."""
    flags = [jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack(flags).all() if flags else jnp.array(True)


def check_reduce_first(reduce_first: Any, axis_name: AxisName) -> None:
    """Refuses an axis that is reduced twice.

    Raises:
      ValueError: With what to pass instead.
    """
    if reduce_first is None:
        return
    check_axis_name(reduce_first)
    if set(axis_tuple(reduce_first)) & set(axis_tuple(axis_name)):
        raise ValueError(
            f"`reduce_first` and `axis_name` must name different axes, got {reduce_first!r} and "
            f"{axis_name!r}. Give the fast axis to reduce_first and the slow one to axis_name."
        )


def _averaged(updates: PyTree, reduce_first: AxisName, weight: Any) -> tuple[PyTree, Array | None]:
    """The exact mean over the fast axes, in the gradients' own dtypes, and what it counts."""
    opened = open_step(updates, reduce_first, weight=weight)
    reduced, counted = weighted_mean_each(opened.arrays, opened.weight, reduce_first)
    return opened.tree(reduced.means), counted and counted.mean


class Field(NamedTuple):
    """One field of a state, with what the gradients say about it."""

    name: str
    tree: PyTree  # as the gradients, with `optax.MaskedNode` where a leaf has nothing
    shapes: list[tuple[int, ...] | None]  # expected, in flattening order; None: nothing


def fitted(kind: str, updates: PyTree, fields: list[Field], hint: str) -> list[list[Any]]:
    """The leaves of each field beside those of the gradients.

    Args:
      kind: Name of the state's class.
      updates: The gradients.
      fields: The fields.
      hint: What to do about a shape that is off, one sentence.

    Raises:
      ValueError: Listing every leaf that only one of the trees has, or whose shape is off.
    """
    paths = [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    treedef = jax.tree.structure(updates)
    try:
        beside = [treedef.flatten_up_to(field.tree) for field in fields]
    except ValueError as error:
        difference = "; ".join(_difference(paths, field.tree) for field in fields[:1])
        raise ValueError(
            f"The gradients and the {kind} have different tree structures: {difference}. Make the "
            "state with init() of a tree like the gradients."
        ) from error
    wrong = []
    for field, values in zip(fields, beside, strict=True):
        for path, value, expected in zip(paths, values, field.shapes, strict=True):
            found = None if isinstance(value, optax.MaskedNode) else tuple(np.shape(value))
            if found != expected:
                shapes = f"expected {expected or 'none'}, got {found or 'none'}"
                wrong.append(f"{field.name}{path}: {shapes}")
    if wrong:
        raise ValueError(
            f"The {kind} does not fit these gradients and arguments:\n  "
            + "\n  ".join(wrong)
            + "\nA residual that has an axis of replicas too many or lacks one was not placed with "
            f"jaxcomp.shard_state and mapped with jaxcomp.state_specs. {hint}"
        )
    return beside


def _difference(want: list[str], tree: PyTree) -> str:
    """The leaves that only one of the two trees has, by their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )[0]
    have = [leaf_name(path) for path, _ in nodes]
    only = [f"only among the gradients {name}" for name in want if name not in have]
    only += [f"only in the state {name}" for name in have if name not in want]
    return ", ".join(only) or "the same leaves in other containers"


def _replaced(leaves: list[Array], positions: list[int], values: Sequence[Array]) -> list[Array]:
    """`leaves` with those at `positions` replaced."""
    result = list(leaves)
    for position, value in zip(positions, values, strict=True):
        result[position] = value
    return result
