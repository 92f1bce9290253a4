"""What one reducer tells another: besides the average, this replica's own part in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import check_axis_name
from jaxcomp._base.trees import leaf_name, replaced
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import axis_tuple, check_local
from jaxcomp._mesh.collectives import mean_each


class Reduction(NamedTuple):
    """One update of a `Reducer`, with what `error_feedback` and `switch_at` need to know of it."""

    updates: PyTree  # the average, equal on every replica
    state: PyTree  # the new state; the old one, bit for bit, where `finite` is False
    sent: PyTree  # this replica's own contribution as sent: `updates` is the mean of it
    finite: Array  # bool scalar, equal on every replica: whether all updates are finite


class Reducer(optax.GradientTransformationExtraArgs):
    """An Optax transformation that also says what this replica contributed to the average.

    Every reducer of this package is one. To `optax.chain` and the like it is an ordinary
    transformation, a pair of ``init`` and ``update``. `error_feedback` calls `reduce` instead, and
    keeps what was not sent.

    Args:
      init: From parameters to a consolidated state.
      reduce: A function of (local gradients, state, parameters or None, **extra arguments) that
        returns a `Reduction`.
      axis_name: The mapped axis or axes of the replicas.
      update: Optax's update function; by default made of `reduce`.

    Example:
      A reducer that averages signs, and keeps the rest for the next step:

      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> def reduce(updates, state, params=None, **extra_args):
      ...     sent = jax.tree.map(jnp.sign, updates)
      ...     mean = jax.lax.pmean(sent, "data")
      ...     return jaxcomp.Reduction(mean, state, sent, jnp.isfinite(mean["w"]).all())
      >>> signs = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, "data")
      >>> tx = jaxcomp.error_feedback(signs)
      >>> grads = {"w": jnp.array([[3.0, -1.0], [0.5, -1.0]])}  # two replicas
      >>> state = tx.init({"w": jnp.zeros(2)})
      >>> mean, state = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(grads, state)
      >>> mean["w"][0].tolist(), state.residual["w"].tolist()
      ([1.0, -1.0], [[2.0, 0.0], [-0.5, 0.0]])
    """

    reduce: Callable[..., Reduction]
    axis_name: AxisName

    def __new__(
        cls,
        init: Callable[..., PyTree],
        reduce: Callable[..., Reduction],
        axis_name: AxisName,
        *,
        update: Callable[..., Any] | None = None,
    ) -> Reducer:
        """A pair of functions, as Optax wants it, with two attributes beside."""
        check_axis_name(axis_name)

        def derived(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, PyTree]:
            result = reduce(updates, state, params, **extra_args)
            return result.updates, result.state

        self = super().__new__(cls, init, update or derived)
        self.reduce, self.axis_name = reduce, axis_name
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `copy` and `pickle` build the copy from."""
        return (self.init, self.reduce, self.axis_name), {"update": self.update}


def reduce_function(tx: optax.GradientTransformation) -> Callable[..., Reduction]:
    """The `reduce` of a reducer, or a stand-in for it made from a plain transformation.

    Nothing is known of what a plain transformation sends. The stand-in takes the average for every
    replica's contribution, as torch's hooks do: residuals then have the right mean.
    """
    if isinstance(tx, Reducer):
        return tx.reduce
    plain = optax.with_extra_args_support(tx)

    def reduce(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        means, new_state = plain.update(updates, state, params, **extra_args)
        finite = all_finite(jax.tree.leaves(means))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
        return Reduction(means, kept, means, finite)

    return reduce


def all_finite(leaves: list[Array]) -> Array:
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


def averaged_first(updates: PyTree, reduce_first: AxisName | None) -> PyTree:
    """The exact mean over the fast axes, in the gradients' own dtypes; unchanged for None.

    Raises:
      ValueError: If a gradient was already reduced over a fast axis, or the axis is not bound.
    """
    if reduce_first is None:
        return updates
    leaves, treedef = jax.tree.flatten(updates)
    positions = reducible(updates, reduce_first)
    means = mean_each([leaves[i] for i in positions], reduce_first)
    return treedef.unflatten(replaced(leaves, positions, means))


def reducible(updates: PyTree, axis_name: AxisName) -> list[int]:
    """Positions (in flattening order) of the leaves that a reducer averages.

    ``float0`` leaves, the gradients of integer parameters, carry nothing and are left out.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, if a gradient was already reduced
        over the axis, or if the axis is not bound. The message names the leaf.
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
            "not trained out with optax.masked; wrap the chain in "
            "optax.contrib.split_real_and_imaginary for complex ones."
        )
    check_local(updates, axis_name)
    return positions


def reducer_if_mapped(
    init: Any, reduce: Any, axis_name: AxisName | None
) -> optax.GradientTransformationExtraArgs:
    """A `Reducer`, or a plain transformation where nothing but plain ones went in."""
    if axis_name:
        return Reducer(init, reduce, axis_name)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        result = reduce(updates, state, params, **extra_args)
        return result.updates, result.state

    return optax.GradientTransformationExtraArgs(init, update)
