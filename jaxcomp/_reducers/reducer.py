"""Defines `Reducer`, which checks all gradients and states before its function sees them.

Every reducer of this package, and a user's own, is a `Reducer` around one function. An update first
removes the replica axis (`Transformation`). Then `Reducer.reduce` takes gradients out of their
boxes, checks them and the state, makes Explicit axes Auto, and multiplies gradients by weights. So
the function computes with plain trees of one replica only. Its averages are cast to the gradients'
dtypes.

The function returns a `Reduction`, more than an Optax update: what this replica sent, and whether
the step is finite. `error_feedback` needs both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

from jaxcomp._base.checks import check_axis_name, check_function
from jaxcomp._base.leaves import (
    boxed_as,
    checked_params,
    is_floating,
    is_masked,
    leaf_name,
    saturated,
    unboxed,
)
from jaxcomp._base.typing import Array, AxisName, PyTree, Shape
from jaxcomp._mesh.collectives import axis_tuple, mesh_axes, varying, vma_axes
from jaxcomp._mesh.meshes import call_on_automatic_axes, typed_specs
from jaxcomp._mesh.per_replica import PER_REPLICA, leaves_marked
from jaxcomp._mesh.weights import refuse_misspelt_weight, weighted_gradients
from jaxcomp._reducers.transformation import CountBytes, Transformation, bytes_of


class Reduction(NamedTuple):
    """Holds the result of one update of a `Reducer`, with the parts that `error_feedback` needs."""

    updates: PyTree  # the average, equal on every replica
    state: PyTree  # the new state; the old one if `finite` is False
    sent: PyTree  # this replica's contribution as sent; `updates` is its mean over the replicas
    finite: Array  # bool scalar, equal on every replica: True if all updates are finite


@jax.tree_util.register_static
class Reducer(Transformation):
    """Averages gradients as an Optax transformation, and returns each replica's contribution too.

    Every reducer of this package is a `Reducer`. `error_feedback` calls ``reduce`` instead of
    ``update``, and keeps the part that was not sent. Complex gradients, and gradients that were
    already reduced over the axis, are refused before the reducer's function sees them.

    ``update(..., weight=w)`` computes a weighted average, with any reducer. `w` is this replica's
    weight, for example the number of examples in its batch; with 0 its gradients are ignored,
    whatever they hold. Gradients are multiplied by `w` divided by the mean weight (one all-reduce
    of a scalar), and then averaged as usual. So the residual is a part of the weighted mean,
    whatever the weights of later steps are.

    Args:
      init: A function that makes a consolidated state from parameters. A state of your own is a
        NamedTuple whose class names the fields that differ between replicas, as in
        ``per_replica = ("momentum",)``, or ``()`` if no field does. Functions that place, save or
        find states read this attribute.
      reduce: A function of local gradients, state, parameters or None, and extra arguments by name.
        It returns a `Reduction`, with `updates` and `sent` in any floating dtypes. If these are not
        finite, it returns the old state, and NaN as updates. It never gets a ``weight``: its
        gradients are already weighted, in float32 or wider. The argument ``like`` then holds the
        original gradients, whose dtypes the updates will have.
      axis_name: The mapped axis or axes of the replicas.
      made_by: The text that ``repr`` shows.
      count_bytes: A function of (params, replicas, step), the last two possibly None, that returns
        the `CompressionStats` of ``bytes``. The number of bytes must not return to an earlier value
        once it has changed, because ``bytes(steps=)`` finds the steps of change by bisection.
      keeps_residual: True if the state holds a residual; `error_feedback` then refuses the reducer.

    Example:
      This reducer averages signs and keeps the rest for the next step:

      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> from jaxcomp import extend
      >>> def reduce(updates, state, params=None, **extra_args):
      ...     signs = [jnp.sign(g) for g in extend.floating_leaves(updates)]
      ...     reduced = extend.reduce_mean(signs, "data", jnp.float32)
      ...     means, sent = (extend.with_leaves(updates, x) for x in (reduced.means, signs))
      ...     return jaxcomp.Reduction(means, state, sent, reduced.finite)
      >>> signs = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, "data")
      >>> tx = jaxcomp.error_feedback(signs)
      >>> grads = {"w": jnp.array([[3.0, -1.0], [0.5, -1.0]])}  # two replicas
      >>> state = tx.init({"w": jnp.zeros(2)})
      >>> mean, state = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(grads, state)
      >>> mean["w"][0].tolist(), state.residual["w"].tolist()
      ([1.0, -1.0], [[2.0, 0.0], [-0.5, 0.0]])
    """

    axis_name: AxisName
    keeps_residual: bool
    in_phases = True  # exact steps first, if any, then compressed steps
    _reduce: Callable[..., Reduction]

    def __new__(
        cls,
        init: Callable[..., PyTree],
        reduce: Callable[..., Reduction],
        axis_name: AxisName,
        *,
        made_by: str = "",
        count_bytes: CountBytes | None = None,
        keeps_residual: bool = False,
    ) -> Self:
        """Makes an ``update`` that checks its arguments and calls `reduce`."""
        check_axis_name(axis_name)
        check_function("init", init, "params")
        check_function("reduce", reduce, "updates", "state", "params")

        def checked_init(params: PyTree) -> PyTree:
            return init(checked_params("params", params))

        def update(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, PyTree]:
            reduction = self.reduce(updates, state, params, **extra_args)
            return reduction.updates, reduction.state

        self = super().__new__(cls, checked_init, update, count_bytes=count_bytes)
        self.made_by = made_by or f"{cls.__name__}(axis_name={axis_name!r})"
        self.axis_name = axis_name
        self.keeps_residual = keeps_residual
        self._reduce = reduce
        return self

    def reduce(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> Reduction:
        """Checks and reduces gradients, and returns also the part that was sent.

        Args:
          updates: This replica's gradients; leaves may be in boxes, such as
            `flax.linen.Partitioned`.
          state: This replica's state, without the leading axis of 1 that `jax.shard_map` leaves
            (``update`` removes it).
          params: Parameters or None.
          weight: This replica's weight, or None.
          **extra_args: Passed to the reducer's function.

        Returns:
          A `Reduction`; updates and sent are trees like `updates`, in the dtypes of its leaves.

        Raises:
          ValueError: If gradients or state do not fit this reducer.
        """
        refuse_misspelt_weight(extra_args)
        gradients = unboxed(updates)
        params = unboxed(params)
        check_gradients(gradients, params, self.axis_name)
        # From the gradients, because an Optax update may be called without parameters.
        check_state(state, jax.eval_shape(self.init, gradients))
        average = self._average
        if mesh_axes(AxisType.Explicit):
            # With Explicit axes JAX infers the sharding of each result, and refuses products and
            # reshapes where it cannot. A reducer has such ones, so the axes become Auto here, and
            # each result gets the type of the value that it replaces. Only where the user maps the
            # update: in a `data_parallel` function they are Auto already.
            specs = typed_specs(gradients)
            everywhere: Any = PartitionSpec()
            result_specs = Reduction(specs, typed_specs(state), specs, everywhere)
            average = functools.partial(call_on_automatic_axes, average, result_specs)
        reduction = average(gradients, state, params, weight, extra_args)
        averages = boxed_as(reduction.updates, updates)
        return reduction._replace(updates=averages, sent=boxed_as(reduction.sent, updates))

    def _average(
        self,
        gradients: PyTree,
        state: PyTree,
        params: PyTree,
        weight: Any,
        extra_args: dict[str, Any],
    ) -> Reduction:
        """Weights the gradients, reduces them, and returns averages in the gradients' dtypes."""
        weighted = gradients
        if weight is not None:
            weighted = weighted_gradients(gradients, weight, self.axis_name)
            # Weighted gradients are wider; the function may want the dtypes that will be returned.
            extra_args = extra_args | {"like": gradients}
        reduction = self._reduce(weighted, state, params, **extra_args)
        _check_reduction(reduction, gradients)
        averages = in_dtypes_of(gradients, reduction.updates)
        return reduction._replace(updates=averages, sent=in_dtypes_of(gradients, reduction.sent))


def _check_reduction(reduction: Any, gradients: PyTree) -> None:
    """Refuses what a reducer's function must not return.

    Raises:
      ValueError: If it is not a `Reduction` with leaves like those of the gradients.
    """
    if not isinstance(reduction, Reduction):
        raise ValueError(
            "The function of a Reducer must return a jaxcomp.Reduction, got a "
            f"{type(reduction).__name__}."
        )
    expected = _shapes(gradients)
    for name, tree in (("updates", reduction.updates), ("sent", reduction.sent)):
        shapes = _shapes(tree)
        if shapes != expected:
            raise ValueError(
                f"The `{name}` of a Reduction must have the leaves and shapes of the gradients, "
                f"{expected}, got {shapes}."
            )
    if np.shape(reduction.finite) or jnp.result_type(reduction.finite) != jnp.bool_:
        raise ValueError(
            f"`finite` of a Reduction must be a bool scalar, got {reduction.finite!r}."
        )


def in_dtypes_of(gradients: PyTree, averages: PyTree) -> PyTree:
    """Casts averages to the dtypes of the gradients."""

    def cast(average: Any, gradient: Any) -> Any:
        if is_floating(gradient):
            return saturated(average, gradient.dtype)
        # A float0 leaf holds no value; JAX knows that a constant is the same on all replicas.
        return np.zeros(gradient.shape, gradient.dtype)

    return jax.tree.map(cast, averages, gradients)


def averaging(reducer: Any, axis_name: AxisName) -> Transformation:
    """Returns a `Reducer` as it is, and gives any other transformation its ``weight=`` and dtypes.

    In a chain each reducer would weight along its own axis only, and other links not at all. So the
    gradients are weighted before the chain. As a `Transformation`, links of other libraries get no
    replica axis either.
    """
    if isinstance(reducer, Reducer):
        return reducer
    chain = optax.with_extra_args_support(reducer)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        weight: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        weighted = updates
        if weight is not None:
            weighted = weighted_gradients(updates, weight, axis_name)
        means, state = chain.update(weighted, state, params, **extra_args)
        return in_dtypes_of(updates, means), state

    return Transformation(chain.init, update, count_bytes=functools.partial(bytes_of, reducer))


def check_reducer(reducer: Any, fix: str = "Pass the first link of the chain.") -> Reducer:
    """Returns a `Reducer`; refuses any other object.

    Raises:
      ValueError: If it is not a `Reducer`; the message ends with `fix`.
    """
    if not isinstance(reducer, Reducer):
        # A function is named, since it may be a reducer's that was not called.
        kind = getattr(reducer, "__name__", type(reducer).__name__)
        raise ValueError(f"`reducer` must be a jaxcomp reducer, got {kind}. {fix}")
    return reducer


def check_gradients(updates: PyTree, params: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients that no reducer can average.

    ``float0`` leaves, the gradients of integer parameters, hold no value and pass. Under
    ``shard_map(check_vma=True)`` JAX already sums the gradient of a replicated parameter over the
    axis, so a reducer would compress it too late to save bytes.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, has another shape than its
        parameter, or was already reduced over the axis, or the axis is not bound. The message names
        the leaves.
    """
    # First, because it also names an axis that is not bound.
    axes = vma_axes(axis_name)
    wrong = []
    leaves = jax.tree.leaves_with_path(updates)
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            wrong.append(f"{leaf_name(path)} is a {type(leaf).__name__} and not an array")
        elif not jnp.issubdtype(dtype, jnp.floating) and dtype != jax.dtypes.float0:
            wrong.append(f"{leaf_name(path)} has dtype {dtype}")
    if wrong:
        raise ValueError(
            f"Only floating gradients can be reduced: {'; '.join(wrong)}. Exclude untrained "
            "parameters with optax.masked (for an Equinox module, differentiate eqx.filter(model, "
            "eqx.is_inexact_array)). For complex parameters, wrap the chain in "
            "optax.contrib.split_real_and_imaginary."
        )
    shapes = _shapes(params)
    for path, leaf in leaves:
        name = leaf_name(path)
        # There may be no parameters, or other leaves than gradients, as with masked ones.
        expected = shapes.get(name.removeprefix("."))
        if expected is not None and leaf.shape != expected:
            raise ValueError(
                f"The gradient of {name} has shape {leaf.shape}, the parameter has {expected}. "
                "Gradients must be those of the parameters, averaged over this replica's examples."
            )
        summed = [axis for axis in axes if axis not in varying(leaf)]
        if summed and leaf.dtype != jax.dtypes.float0:
            raise ValueError(
                f"The gradient {name} is the same on every replica along "
                f"{summed[0]!r}: it was already summed, by jax.grad inside "
                "shard_map(check_vma=True) or a pmean of your own, so there is nothing left to "
                "reduce. Leave the pmean out, or take the gradient with "
                f"jaxcomp.local_value_and_grad(loss, {axis_name!r}), or mark the parameters with "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying') before jax.grad. If it is a "
                f"constant, mark it: jaxcomp.as_local(gradient, {axis_name!r})."
            )


def check_averaged(means: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients that still differ between replicas after the transformation.

    Raises:
      ValueError: If a gradient varies over the axis, which is known only under ``check_vma=True``;
        the message names the leaf.
    """
    for path, leaf in jax.tree.leaves_with_path(means):
        apart = [name for name in axis_tuple(axis_name) if name in varying(leaf)]
        if leaf.dtype != jax.dtypes.float0 and apart:
            raise ValueError(
                f"`reducer` leaves the gradient {leaf_name(path)} different on every replica along "
                f"{', '.join(map(repr, apart))}: it is not a reducer, or reduces only a part of "
                "the parameters, as in optax.masked. Pass jaxcomp.powersgd(...) or another reducer "
                "of jaxcomp, or an optax.chain that begins with one, and no optimizer."
            )


def check_class(state: Any, expected: type) -> None:
    """Refuses a state of another class than the one that this update returns."""
    if type(state) is not expected:
        raise ValueError(
            f"This update needs its own {expected.__name__}, got {type(state).__name__}. Inside an "
            "optax.chain, call the chain's update with the chain's state. jaxcomp.adapt_state "
            "converts another reducer's state."
        )


def check_state(state: PyTree, fresh: PyTree) -> None:
    """Refuses a state whose class or shapes differ from a fresh state for these gradients.

    Raises:
      ValueError: If the state belongs to another reducer, or leaves are missing, extra or of
        another shape; the message lists these leaves.
    """
    if not isinstance(fresh, jax.ShapeDtypeStruct):  # a user's state may be one array
        check_class(state, type(fresh))
    alone, others = differences(state, fresh)
    if not alone and not others:
        return
    hint = "Make the state with init() of a tree like the gradients"
    if alone:
        hint += ", in which a Python number must be an array"
    else:
        hint += " and keep the reducer's arguments, or convert it with jaxcomp.adapt_state"
    axes = []
    shapes = _shapes(state)
    for name, leaf in leaves_marked(fresh, PER_REPLICA).items():
        axes.append(len(shapes.get(name.removeprefix(".")) or leaf.shape) - leaf.ndim)
    if any(axes):
        hint += (
            "; if a per-replica leaf has one axis of replicas too many, or lacks it, place the "
            "state with jaxcomp.shard_state and map it with jaxcomp.state_specs"
        )
    listed = "\n  ".join(alone + others)
    raise ValueError(
        f"The state does not fit these gradients and this reducer's arguments:\n  {listed}\n{hint}."
    )


def differences(
    state: PyTree, fresh: PyTree, *, any_axes: bool = False
) -> tuple[list[str], list[str]]:
    """Lists the leaves by which a state differs from a fresh one for the parameters.

    Args:
      state: The state.
      fresh: The fresh state.
      any_axes: True if the state may have axes of replicas; then only masked leaves, which have no
        shape, differ from others.

    Returns:
      Lines for the leaves that only one of both has, and lines for other differences.
    """
    shapes = _shapes(state)
    expected = _shapes(fresh)
    alone = []
    others = []
    for name in expected | shapes:
        if name not in shapes:
            alone.append(f"{name}: only the parameters have this leaf")
            continue
        if name not in expected:
            alone.append(f"{name}: only the state has this leaf")
            continue
        pair = (expected[name], shapes[name])
        if pair[0] != pair[1] and (None in pair or not any_axes):
            others.append(f"{name}: expected {pair[0]}, got {pair[1]}".replace("None", "none"))
    if not alone and not others and jax.tree.structure(state) != jax.tree.structure(fresh):
        others.append("all leaves are in other containers, such as a dict and a FrozenDict")
    return alone, others


def _shapes(tree: PyTree) -> dict[str, Shape | None]:
    """Returns the shape of each leaf, by its path; None for a masked leaf."""
    shapes = {}
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_masked):
        shape = None
        if not is_masked(leaf):
            shape = np.shape(leaf)
        shapes[leaf_name(path).removeprefix(".")] = shape
    return shapes
