"""`jax.value_and_grad` for a `jit` loop, with a reducer where the compiler would put an all-reduce.

A `jax.shard_map` around the local gradient and the reducer, and nothing else: what comes out are
averaged gradients as global arrays, and the optimizer stays where it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxcomp._base.checks import check_axis_name, check_flag
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, KeyPath, PyTree
from jaxcomp._mesh.axes import as_local, axis_tuple, known_equal
from jaxcomp._mesh.explicit import Boundary, check_mesh_axes, resharded, typed_specs
from jaxcomp._mesh.weights import Weight, as_weight, weighted_mean_each
from jaxcomp._states.replicas import state_specs
from jaxcomp._states.stacked import place_stacked, stack, unstack
from jaxcomp._training.gradients import local_value_and_grad
from jaxcomp._training.on_mesh import (
    batch_spec,
    check_batch_specs,
    check_differentiable,
    check_params,
    check_replica_axis,
    check_same_rows,
    check_something_is_split,
    errors_explained,
    is_shared,
    replica_weights,
    the_mesh,
)

_AUX = ("mean", "stack")


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: jax.jit may take it
class ValueAndGrad:
    """What `value_and_grad` returns: `init`, `restore`, and the gradient itself as a call."""

    fun: Callable[..., Any]
    reducer: optax.GradientTransformation
    axis_name: AxisName
    mesh: Mesh | None
    argnums: int | tuple[int, ...]
    has_aux: bool
    aux: PyTree
    batch_specs: Any
    check_vma: bool

    def init(self, params: PyTree) -> PyTree:
        """The reducer's state before the first step, on the mesh.

        Args:
          params: What is differentiated: the argument of `fun`, or with several `argnums` a tuple
            of them. Arrays as they are laid out for training, or tracers.

        Returns:
          Global arrays. What each replica has of its own is ``(n, ...)`` for ``n`` replicas,
          sharded over `axis_name` and, behind that, as its parameter is.

        Raises:
          ValueError: If there is no mesh, or parameters are sharded over `axis_name`.
        """
        mesh = the_mesh(self.mesh, self.axis_name)
        check_params(params, mesh, axis_tuple(self.axis_name))
        check_differentiable(params)
        return place_stacked(self.reducer.init(params), mesh, self.axis_name)

    def restore(self, state: PyTree, params: PyTree) -> PyTree:
        """The state of a checkpoint on this mesh, whatever number of replicas it was saved with.

        Args:
          state: As this object returned it, for any number of replicas, or consolidated.
          params: As for `init`.

        Returns:
          The state: with as many replicas as it was saved with, each its own; with another number,
          all the mean, on which alone the updates depend.

        Raises:
          ValueError: Listing every leaf whose shape fits neither form.
        """
        like = self.reducer.init(params)  # says also how the leaves lie over the other axes
        return place_stacked(state, the_mesh(self.mesh, self.axis_name), self.axis_name, like)

    def __call__(self, state: PyTree, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        """Value and averaged gradients; call it inside `jax.jit`.

        Args:
          state: From `init`, `restore`, or the last call.
          *args: As `fun` takes them: global arrays.
          weight: How much each replica counts, an array of shape (replicas,): the number of
            examples or tokens in its part of the batch, 0 to sit the step out. None if all count
            the same. The value, the gradients and averaged auxiliary output are weighted means.
          **kwargs: As `fun` takes them: scalars, random keys, and what is no array.

        Returns:
          ``((value, gradients), state)``, or ``(((value, auxiliary), gradients), state)`` with
          `has_aux`. The value is the mean over the replicas.

        Raises:
          ValueError: If there is no mesh, an argument does not fit its specification, none is
            split between the replicas, parameters are sharded over `axis_name`, or state or weights
            are of another number of replicas.
        """
        mesh, axes = the_mesh(self.mesh, self.axis_name), axis_tuple(self.axis_name)
        replicas = math.prod(mesh.shape[name] for name in axes)
        check_batch_specs(self.batch_specs, mesh)
        check_replica_axis(state, replicas)
        params = self._params(args)
        check_params(params, mesh, axes)
        check_differentiable(params)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        specs = jax.tree.leaves(self._arg_specs(args, kwargs, axes, replicas))
        if self.batch_specs is None:
            check_something_is_split(specs)
        # What is no array stays as it is: a flag that `fun` branches on, a function.
        arrays = {
            i: resharded(x, mesh, specs[i], axes) for i, x in enumerate(leaves) if _is_array(x)
        }
        state_spec, along = state_specs(state, self.axis_name), PartitionSpec(self.axis_name)
        state = jax.tree.map(lambda x, spec: resharded(x, mesh, spec, axes), state, state_spec)

        def differentiate(arrays: dict[int, Any]) -> Any:
            args, kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            function = local_value_and_grad(
                self.fun, self.axis_name, argnums=self.argnums, has_aux=self.has_aux
            )
            return function(*args, **kwargs)

        weight = replica_weights(weight, replicas)
        own_weight = {} if weight is None else {"weight": resharded(weight, mesh, along, axes)}

        def on_replica(state: PyTree, arrays: dict[int, Any], own_weight: dict[str, Any]) -> Any:
            value, grads = boundary.explicit(differentiate, typed)(arrays)
            args, _ = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            update = optax.with_extra_args_support(self.reducer).update
            grads, own = update(grads, unstack(state), self._params(args), **own_weight)
            counts = as_weight(own_weight.get("weight"), self.axis_name)
            return (self._reported(value, counts), grads), stack(own)

        value_spec = self._aux_specs() if self.has_aux else PartitionSpec()
        boundary, typed = Boundary(mesh, axes), typed_specs(arrays)
        mapped = jax.shard_map(
            on_replica,
            mesh=boundary.mesh,
            in_specs=(state_spec, {i: specs[i] for i in arrays}, dict.fromkeys(own_weight, along)),
            out_specs=((value_spec, PartitionSpec()), state_spec),
            axis_names=set(axes),
            check_vma=self.check_vma,
        )
        like = (value_spec, typed_specs(params)), typed_specs(state)
        with errors_explained(axes):
            return boundary.automatic(mapped, like)(state, arrays, own_weight)

    def _params(self, args: tuple[Any, ...]) -> PyTree:
        """What is differentiated, in the form that `jax.value_and_grad` gives gradients in.

        Raises:
          ValueError: If there are too few arguments.
        """
        several = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if not all(-len(args) <= index < len(args) for index in several):
            raise ValueError(
                f"`fun` was called with {len(args)} arguments, and argnums={self.argnums}. Call "
                "value_and_grad(state, params, *batch): parameters by position, behind the state."
            )
        if isinstance(self.argnums, int):
            return args[self.argnums]
        return tuple(args[i] for i in self.argnums)

    def _reported(self, value: Any, weight: Weight | None) -> Any:
        """Value and auxiliary output, averaged in one all-reduce or with an axis of replicas."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(value)
        kinds = ["mean"] * len(paths)
        if self.has_aux:
            kinds[1:] = jax.tree.leaves(jax.tree.broadcast(self.aux, value[1]))
        leaves = [x for _, x in paths]
        averaged = [
            i
            for i, (path, x) in enumerate(paths)
            if kinds[i] == "mean" and not _is_common(path, x, self.axis_name)
        ]
        own = [as_local(leaves[i], self.axis_name) for i in averaged]
        means = weighted_mean_each(own, weight, self.axis_name).reduced.means
        for i, mean in zip(averaged, means, strict=True):
            leaves[i] = mean
        rows = [
            as_local(x, self.axis_name)[None] if kind == "stack" else x
            for x, kind in zip(leaves, kinds, strict=True)
        ]
        return treedef.unflatten(rows)

    def _aux_specs(self) -> PyTree:
        stacked = PartitionSpec(self.axis_name)
        return PartitionSpec(), jax.tree.map(
            lambda kind: stacked if kind == "stack" else PartitionSpec(), self.aux
        )

    def _arg_specs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], axes: tuple[str, ...], replicas: int
    ) -> PyTree:
        """A PartitionSpec for each leaf of the arguments, over the replicas' axes only."""
        chosen = {self.argnums} if isinstance(self.argnums, int) else set(self.argnums)
        chosen = {index % len(args) for index in chosen}
        others = [i for i in range(len(args)) if i not in chosen]
        given = self.batch_specs
        if not isinstance(given, (tuple, list)) or isinstance(given, PartitionSpec):
            given = [given] * len(others)
        if len(given) != len(others):
            raise ValueError(
                f"`batch_specs` has {len(given)} entries and `fun` was called with {len(others)} "
                "arguments besides what is differentiated. Give one specification for all of "
                "them, or a tuple with one for each."
            )
        specs: list[Any] = [jax.tree.map(lambda _: PartitionSpec(), arg) for arg in args]
        for i, spec in zip(others, given, strict=True):
            specs[i] = batch_spec(spec, args[i], i, self.axis_name, replicas)
        unasked = [i for i, spec in zip(others, given, strict=True) if spec is None]
        check_same_rows({i: args[i] for i in unasked}, {i: specs[i] for i in unasked})
        arrays = [
            leaf_name(path)
            for path, leaf in jax.tree_util.tree_flatten_with_path(kwargs)[0]
            if _is_array(leaf) and not is_shared(leaf)
        ]
        if arrays:
            raise ValueError(
                f"The keyword argument {arrays[0]} holds an array with axes. Pass it by position, "
                "where `batch_specs` says how it is split between the replicas."
            )
        return tuple(specs), jax.tree.map(lambda _: PartitionSpec(), kwargs)


def value_and_grad(
    fun: Callable[..., Any],
    reducer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    aux: PyTree = "mean",
    batch_specs: Any = None,
    axis_name: AxisName | None = None,
    check_vma: bool = True,
) -> ValueAndGrad:
    """`jax.value_and_grad` whose gradients are averaged by a reducer, for loops in `jax.jit`.

    In a `jit` loop over sharded arrays the compiler averages gradients, uncompressed. This takes
    the place of `jax.value_and_grad` there: gradients of each replica alone, then the reducer, in a
    `jax.shard_map` over `axis_name` only. The gradients that come out are averaged global arrays,
    laid out as the parameters; optimizer, clipping and masks stay as they are. Meshes may have
    Auto or Explicit axes, and parameters may be sharded over any but `axis_name`.

    Args:
      fun: The mean loss of the examples that it is given: a scalar, or (scalar, auxiliary) with
        `has_aux`. Parameters come first, or where `argnums` says.
      reducer: A `Reducer`, or any Optax transformation that begins with one (give `axis_name`).
      mesh: The mesh; None takes the one of `jax.set_mesh`.
      argnums: As for `jax.value_and_grad`.
      has_aux: As for `jax.value_and_grad`.
      aux: What becomes of the auxiliary output: "mean" averages it (metrics, BatchNorm
        statistics), "stack" gives it a leading axis of replicas. Or a tree of the two, a prefix of
        the auxiliary output.
      batch_specs: How the arguments that are not differentiated are split between the replicas: a
        PartitionSpec for all, or a tuple with one for each, which may be a tree. By default along
        the leading axis, as long for all of them; scalars and random keys, of `jax.random.key` or
        `PRNGKey`, are the same for all: `fun` makes its own (dropout) with
        ``jax.random.fold_in(key, jax.lax.axis_index(axis_name))``. Axes of the mesh other than
        `axis_name` are left to the compiler.
      axis_name: The axis or axes of the replicas; None takes the reducer's.
      check_vma: Have JAX prove that the gradients are equal on all replicas. Turn it off for a
        `fun` that it cannot type: loops that begin with ``zeros(shape)``, as most recurrent layers.

    Returns:
      A `ValueAndGrad`: ``init(params)`` gives the reducer's state as global arrays, ``restore``
      that of a checkpoint, and a call ``(state, params, *batch)``, inside `jax.jit`, gives
      ``((value, gradients), state)``.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> def loss_fn(params, x):
      ...     return jnp.mean((x @ params["w"] - 1) ** 2)
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> value_and_grad = jaxcomp.value_and_grad(
      ...     loss_fn, jaxcomp.powersgd(rank=2, axis_name="data", start_step=0), mesh=mesh)
      >>> params, optimizer = {"w": jnp.zeros((16, 16))}, optax.sgd(0.1)
      >>> state, opt_state = value_and_grad.init(params), optimizer.init(params)
      >>> @jax.jit
      ... def step(params, opt_state, state, x):
      ...     (loss, grads), state = value_and_grad(state, params, x)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, state, loss
      >>> params, opt_state, state, loss = step(params, opt_state, state, jnp.eye(16))
      >>> float(loss), state.residual["w"].shape
      (1.0, (2, 16, 16))
    """
    axis_name = getattr(reducer, "axis_name", None) if axis_name is None else axis_name
    if axis_name is None:
        raise ValueError(
            f"A {type(reducer).__name__} does not say along which axis it reduces. Pass a jaxcomp "
            "reducer, or axis_name=."
        )
    check_axis_name(axis_name)
    if not callable(fun):
        raise ValueError(f"`fun` must be a function, got {fun!r}.")
    if not all(isinstance(i, int) for i in (argnums if isinstance(argnums, tuple) else (argnums,))):
        raise ValueError(f"`argnums` must be an integer or a tuple of them, got {argnums!r}.")
    wrong = [kind for kind in jax.tree.leaves(aux) if kind not in _AUX]
    if wrong:
        raise ValueError(f"`aux` must be one of {_AUX}, or a tree of them, got {wrong[0]!r}.")
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    flag = check_flag("has_aux", has_aux)
    checked = check_flag("check_vma", check_vma)
    return ValueAndGrad(fun, reducer, axis_name, mesh, argnums, flag, aux, batch_specs, checked)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _is_common(path: KeyPath, x: Any, axis_name: AxisName) -> bool:
    """Whether JAX knows an output to be the same on all replicas; else it must have a mean.

    Raises:
      ValueError: If it has none.
    """
    if known_equal(x, axis_name):
        return True
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(
            f"The auxiliary output {leaf_name(path[1:])} has dtype {jnp.result_type(x)}, which has "
            'no mean over the replicas. Return it as float32, or pass aux="stack".'
        )
    return False
