"""One call of `data_parallel`, seen from a replica."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import as_local, axes_known_equal
from jaxcomp._mesh.weights import weighted_gradients
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._training.gradients import check_loss
from jaxcomp._training.on_mesh import is_array
from jaxcomp._training.outputs import Reported


class Inside:
    """The arrays of a call by their places among all arguments, and what is made of them."""

    def __init__(
        self,
        run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: list[int | None],
    ):
        """Of a `DataParallel`; `axes` has, for each leaf, the axis of the examples, or None."""
        self._run, self._axes = run, axes
        self._leaves, self._treedef = jax.tree.flatten((args, kwargs))
        # What is no array stays as it is: a flag that the function branches on, a ConfigDict.
        self.arrays = {i: x for i, x in enumerate(self._leaves) if is_array(x)}
        self._twice: PyTree | None = None  # value and auxiliary output for twice the batch, shapes

    def split(self, arrays: dict[int, Any]) -> list[tuple[int, Any]]:
        """The axis of the examples, and the array, for each that has one."""
        return [(axis, arrays[i]) for i, axis in enumerate(self._axes) if axis is not None]

    def rows(self, arrays: dict[int, Any]) -> set[int]:
        """How many examples there are."""
        return {x.shape[axis] for axis, x in self.split(arrays)}

    def step(
        self,
        reported: Reported,
        state: PyTree,
        arrays: dict[int, Any],
        weight: Any,
        explicit: Callable[..., Any] = lambda function: function,
    ) -> tuple[Any, PyTree, PyTree]:
        """Outputs, averaged gradients and the new state of one replica.

        Args:
          reported: What becomes of value and auxiliary output.
          state: The reducer's, with the row that shard_map leaves or without.
          arrays: This replica's.
          weight: How much it counts, or its examples do; None if all count the same.
          explicit: Gives the user's function the types that its arguments had outside.
        """
        run = self._run
        own = None if weight is None else jnp.sum(jnp.asarray(weight).astype(jnp.float32))
        given = {}
        value, grads = explicit(functools.partial(self._gradients, reported))(arrays)
        dtypes = jax.tree.map(lambda x: x.dtype, grads)
        if own is not None and isinstance(run.reducer, Reducer):
            given["weight"] = own
        elif own is not None:
            # Each link of a chain would weigh along its own axis, and a plain one not at all.
            grads = weighted_gradients(grads, own, run.axis_name)
        params = run.params_of(self._arguments(arrays)[0])
        update = optax.with_extra_args_support(run.reducer).update
        means, state = update(grads, state, params, **given)
        if own is not None and not given:
            means = jax.tree.map(lambda x, dtype: x.astype(dtype), means, dtypes)
        _check_averaged(means, run.axis_name)
        return reported.apart(value, self._twice, own), means, state

    def _arguments(self, arrays: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._treedef.unflatten([arrays.get(i, x) for i, x in enumerate(self._leaves)])

    def _gradients(self, reported: Reported, arrays: dict[int, Any]) -> tuple[Any, PyTree]:
        value, grads = self._call(arrays)
        check_loss(value[0] if isinstance(value, tuple) else value, self._run.axis_name)
        if reported.asks(value):
            self._twice = self._shapes_of_twice(arrays)
        return value, grads

    def _call(self, arrays: dict[int, Any]) -> tuple[Any, PyTree]:
        """The user's function, for parameters that are this replica's own in their types.

        Raises:
          ValueError: If it returns anything else than value and gradients.
        """
        run = self._run
        args, kwargs = self._arguments(arrays)
        chosen = run.chosen(args)
        args = [as_local_arrays(x, run.axis_name) if i in chosen else x for i, x in enumerate(args)]
        result = run.grad_fn(*args, **kwargs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(
                "The gradient function must return (value, gradients) or ((value, auxiliary), "
                f"gradients), got {jax.tree.structure(result)}."
            )
        return result

    def _shapes_of_twice(self, arrays: dict[int, Any]) -> PyTree | None:
        """Shapes of value and auxiliary output for a batch of twice the size; None if unknown."""

        def doubled() -> Any:
            double = {i: axis for i, axis in enumerate(self._axes) if axis is not None}
            larger = {i: _twice(x, double[i]) if i in double else x for i, x in arrays.items()}
            return self._call(larger)[0]

        try:
            return jax.eval_shape(doubled)
        except Exception:  # whatever a function does that wants the one size of its batch
            return None


def as_local_arrays(tree: PyTree, axis_name: AxisName) -> PyTree:
    """`as_local` of the arrays in a tree that may hold other things too."""
    return jax.tree.map(lambda x: as_local(x, axis_name) if is_array(x) else x, tree)


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
    return (
        jax.sharding.reshard(jnp.concatenate([x, x], axis), spec)
        if any(spec)
        else (jnp.concatenate([x, x], axis))
    )
