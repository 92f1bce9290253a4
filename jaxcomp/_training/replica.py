"""One step of `data_parallel` on one replica: its gradients, the reducer, what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import axes_known_equal
from jaxcomp._mesh.weights import weighted_gradients
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._training.arguments import Arguments
from jaxcomp._training.gradients import check_loss
from jaxcomp._training.outputs import Outputs, Reported


def replica_step(
    run: Any,
    call: Arguments,
    reported: Reported,
    state: PyTree,
    arrays: dict[int, Any],
    weight: Any,
    explicit: Callable[..., Any] = lambda function: function,
) -> tuple[Outputs, PyTree, PyTree]:
    """Outputs, averaged gradients and the new state of one replica.

    Args:
      run: The `DataParallel`.
      call: What it was called with.
      reported: What becomes of value and auxiliary output.
      state: The reducer's, with the row that shard_map leaves or without.
      arrays: This replica's, by their places in `call`.
      weight: How much its examples count, or it does; None if all count the same.
      explicit: Gives the user's function the types that its arguments had outside.
    """

    def value_and_gradients(arrays: dict[int, Any]) -> Any:
        args, kwargs = call.local(arrays, run.axis_name)
        result = run.grad_fn(*args, **kwargs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(
                "The gradient function must return (value, gradients) or ((value, auxiliary), "
                f"gradients), got {jax.tree.structure(result)}."
            )
        return result

    def of_twice_the_batch(arrays: dict[int, Any]) -> PyTree | None:
        """Shapes of value and auxiliary output; None if the function wants the size that it has."""
        larger = {i: _twice(arrays[i], axis) for i, axis in call.batch(arrays).items()}
        return value_and_gradients({**arrays, **larger})[0]

    def inside(arrays: dict[int, Any]) -> Any:
        value, grads = value_and_gradients(arrays)
        check_loss(value[0] if isinstance(value, tuple) else value, run.axis_name)
        rows = set(call.rows(arrays).values())
        reported.decide(value, rows, lambda: jax.eval_shape(of_twice_the_batch, arrays))
        return value, grads

    value, grads = explicit(inside)(arrays)
    own = None if weight is None else jnp.sum(jnp.asarray(weight).astype(jnp.float32))
    means, state = _reduced(run, grads, state, call.params(arrays), own)
    return reported.apart(value, own), means, state


def _reduced(
    run: Any, grads: PyTree, state: PyTree, params: PyTree, weight: Array | None
) -> tuple[PyTree, PyTree]:
    """Averaged gradients and the new state."""
    update = optax.with_extra_args_support(run.reducer).update
    if weight is not None and isinstance(run.reducer, Reducer):
        means, state = update(grads, state, params, weight=weight)
    elif weight is not None:
        # Each link of a chain would weigh along its own axis, and a plain one not at all.
        weighted = weighted_gradients(grads, weight, run.axis_name)
        means, state = update(weighted, state, params)
        means = jax.tree.map(lambda mean, g: mean.astype(g.dtype), means, grads)
    else:
        means, state = update(grads, state, params)
    _check_averaged(means, run.axis_name)
    return means, state


def _check_averaged(means: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients that the transformation has left different on every replica.

    Raises:
      ValueError: Naming a leaf. Known under ``check_vma=True`` only.
    """
    checked_axes = axes_known_equal(jnp.zeros([]), axis_name)
    for path, leaf in jax.tree_util.tree_flatten_with_path(means)[0]:
        if leaf.dtype == jax.dtypes.float0:
            continue
        if len(axes_known_equal(leaf, axis_name)) < len(checked_axes):
            raise ValueError(
                f"`reducer` leaves the gradient {leaf_name(path)} different on every replica: it "
                "is no reducer. Pass jaxcomp.powersgd(...) or another one of jaxcomp's, or an "
                "optax.chain that begins with one; the optimizer comes behind this call."
            )


def _twice(x: Array, axis: int) -> Array:
    """The examples, and once more the same; to be traced only."""
    spec = jax.typeof(x).sharding.spec
    if axis < len(spec) and spec[axis]:  # no concatenation along an Explicit axis
        free = PartitionSpec(*(None if i == axis else part for i, part in enumerate(spec)))
        x = jax.sharding.reshard(x, free)
    double = jnp.concatenate([x, x], axis)
    return jax.sharding.reshard(double, spec) if any(spec) else double
