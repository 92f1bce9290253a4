"""The place of torch's `register_comm_hook` in a JAX loop: where gradients are ready.

A `jax.shard_map` over the replicas around a gradient function, whatever it is made of, and a
reducer. What comes out are averaged gradients as global arrays; the optimizer stays where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxcomp._base.checks import check_axis_name, check_flag
from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import axis_tuple, is_bound
from jaxcomp._mesh.explicit import Boundary, check_mesh_axes, resharded, typed_specs
from jaxcomp._states.place import shard_state, state_specs
from jaxcomp._training.inside import Inside
from jaxcomp._training.on_mesh import (
    batch_spec,
    check_batch_specs,
    check_differentiable,
    check_params,
    check_replica_axis,
    check_same_rows,
    check_something_is_split,
    errors_explained,
    half,
    is_shared,
    local_axis,
    named_axis,
    split_axis,
    the_mesh,
    weight_spec,
)
from jaxcomp._training.outputs import Reported, check_aux
from jaxcomp._training.stacked_layers import note_stacked_layers


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: jax.jit may take it
class DataParallel:
    """What `data_parallel` returns: the gradients as a call, and `init` and `restore`."""

    grad_fn: Callable[..., Any]
    reducer: optax.GradientTransformation
    axis_name: AxisName
    mesh: Mesh | None
    batch_specs: Any
    aux: PyTree
    check_vma: bool
    argnums: int | tuple[int, ...] = 0  # which arguments are the parameters

    def init(self, params: PyTree) -> PyTree:
        """The reducer's state before the first step, on the mesh.

        ``jaxcomp.shard_state(reducer.init(params), mesh, axis_name)`` is the same, where this
        object is out of reach.

        Args:
          params: What gradients are taken of; with several `argnums` a tuple. Arrays as they are
            laid out for training, or tracers.

        Returns:
          Global arrays. What each replica has of its own is ``(n, *leaf)`` for ``n`` replicas,
          sharded over `axis_name` and, behind that, as its parameter is.

        Raises:
          ValueError: If there is no mesh, or parameters are sharded over `axis_name`.
        """
        mesh = the_mesh(self.mesh, self.axis_name)
        check_params(params, mesh, axis_tuple(self.axis_name))
        check_differentiable(params)
        state = self.reducer.init(params)
        note_stacked_layers(params, state)
        return shard_state(state, mesh, self.axis_name)

    def restore(self, state: PyTree, params: PyTree) -> PyTree:
        """The state of a checkpoint on this mesh: `shard_state`, compared with the parameters.

        Args:
          state: Consolidated, or of any number of replicas.
          params: As for `init`.

        Returns:
          The state; leaves lie over the other axes of the mesh as `init` would lay them.

        Raises:
          ValueError: Listing every leaf whose shape does not fit.
        """
        mesh = the_mesh(self.mesh, self.axis_name)
        return shard_state(state, mesh, self.axis_name, like=self.reducer.init(params))

    def __call__(self, state: PyTree, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        """Value and averaged gradients.

        Call it inside `jax.jit` with global arrays; or inside a function that is mapped over
        `axis_name`, with those of one replica, and without a mesh.

        Args:
          state: From `init`, `restore`, `shard_state` or the last call.
          *args: As the gradient function takes them, parameters first.
          weight: How much examples or replicas count: a mask or counts with the axis along which
            the batch is split, summed for each replica; or an array of shape (replicas,). 0 sits
            out. None if all count the same. Gradients and means are weighted by it.
          **kwargs: As the gradient function takes them: scalars, random keys, what is no array.

        Returns:
          ``((value, gradients), state)``, or ``(((value, auxiliary), gradients), state)``. The
          value is the mean over the replicas. In a mapped function rows of auxiliary output stay
          with their replica.

        Raises:
          ValueError: If there is no mesh, an argument does not fit its specification, none is
            split between the replicas, parameters are sharded over `axis_name`, the state is of
            another number of replicas, or it is not clear what an auxiliary output is.
        """
        if isinstance(state, dict):
            raise ValueError(
                "The first argument must be the reducer's state, as init(params) gives it, and the "
                f"second the parameters; got a dict of {', '.join(map(repr, state))} first."
            )
        self._check_call(args, kwargs)
        if is_bound(self.axis_name):
            return self._on_replica(state, args, kwargs, weight)
        mesh, axes = the_mesh(self.mesh, self.axis_name), axis_tuple(self.axis_name)
        replicas = math.prod(mesh.shape[name] for name in axes)
        check_batch_specs(self.batch_specs, mesh)
        check_replica_axis(state, replicas)
        check_params(self.params_of(args), mesh, axes)
        return self._on_mesh(mesh, replicas, state, args, kwargs, weight)

    def check_mean(self, params: PyTree, *batch: Any, **kwargs: Any) -> None:
        """Refuses a loss that is not the mean of the examples that it is given.

        One that divides by the size of the global batch, a constant, has values and gradients too
        small by the number of replicas. Call it once, outside of `jax.jit`, on one small batch: it
        compares the whole of it with its halves, on one device.

        Args:
          params: As for the call; `argnums` must be 0.
          *batch: As for the call.
          **kwargs: As for the call.

        Raises:
          ValueError: If the halves have half the value each.
        """
        given = self._for_each((params, *batch), self.batch_specs)
        axes = [
            jax.tree.map(lambda x, spec=spec: local_axis(x, spec), arg)
            for arg, spec in zip(batch, given[1:], strict=True)
        ]

        def value(part: int | None) -> float:
            cut = jax.tree.map(lambda x, axis: half(x, axis, part), list(batch), axes)
            # An axis of one replica, for what asks for its index.
            run = jax.vmap(
                lambda _: self._value(self.grad_fn(params, *cut, **kwargs)),
                axis_name=self.axis_name,
            )
            return float(run(jnp.zeros(1))[0])

        whole, halves = value(None), (value(0), value(1))
        if abs(sum(halves) - whole) < abs(sum(halves) / 2 - whole):
            raise ValueError(
                f"The loss of a batch is {whole:.4g}, and of its halves {halves[0]:.4g} and "
                f"{halves[1]:.4g}: it divides by a constant, as the size of the global batch. "
                "Divide by the number of examples that it is given, x.shape[0]."
            )

    @staticmethod
    def _value(result: Any) -> Array:
        value = result[0]
        return value[0] if isinstance(value, tuple) else value

    def _on_replica(
        self, state: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any
    ) -> Any:
        """The step inside a mapped function."""
        given = self._for_each(args, self.batch_specs)
        chosen = self.chosen(args)
        axes = [
            None if i in chosen else local_axis(x, spec)
            for i, (arg, spec) in enumerate(zip(args, given, strict=True))
            for x in jax.tree.leaves(arg)
        ]
        inside = Inside(self, args, kwargs, [*axes, *[None] * len(jax.tree.leaves(kwargs))])
        reported = Reported(self.aux, self.axis_name, inside.rows(inside.arrays))
        outputs, grads, state = inside.step(reported, state, inside.arrays, weight)
        return (reported.together(outputs), grads), state

    def _on_mesh(
        self,
        mesh: Any,
        replicas: int,
        state: PyTree,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weight: Any,
    ) -> Any:
        """The step as a `shard_map` over the replicas."""
        axes = axis_tuple(self.axis_name)
        specs = jax.tree.leaves(self._arg_specs(args, kwargs, mesh, replicas))
        check_something_is_split(specs, self.axis_name)
        inside = Inside(self, args, kwargs, [split_axis(spec) for spec in specs])
        rows = {axis: x.shape[axis] for axis, x in inside.split(inside.arrays)}
        along = weight_spec(weight, rows, self.axis_name, replicas)
        arrays = {i: resharded(x, mesh, specs[i], axes) for i, x in inside.arrays.items()}
        state_spec = state_specs(state, self.axis_name)
        state = jax.tree.map(lambda x, spec: resharded(x, mesh, spec, axes), state, state_spec)
        weights = {} if weight is None else {0: resharded(jnp.asarray(weight), mesh, along, axes)}
        reported = Reported(self.aux, self.axis_name, {n // replicas for n in rows.values()})
        boundary, typed = Boundary(mesh, axes), typed_specs(arrays)

        def on_replica(state: PyTree, arrays: dict[int, Any], weights: dict[int, Any]) -> Any:
            explicit = functools.partial(boundary.explicit, specs=typed)
            return inside.step(reported, state, arrays, weights.get(0), explicit)

        mapped = jax.shard_map(
            on_replica,
            mesh=boundary.mesh,
            in_specs=(state_spec, {i: specs[i] for i in arrays}, dict.fromkeys(weights, along)),
            out_specs=(reported.specs(), PartitionSpec(), state_spec),
            axis_names=set(axes),
            check_vma=self.check_vma,
        )
        like = reported.specs(), typed_specs(self.params_of(args)), typed_specs(state)
        with errors_explained(axes):
            outputs, grads, state = boundary.automatic(mapped, like)(state, arrays, weights)
        return (reported.together(outputs), grads), state

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses too few arguments, and a batch by keyword.

        Raises:
          ValueError: With how to call it.
        """
        several = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        if not all(-len(args) <= index < len(args) for index in several):
            raise ValueError(
                f"This was called with {len(args)} arguments behind the state, and argnums="
                f"{self.argnums}. Call it as (state, params, *batch), parameters by position."
            )
        arrays = [
            leaf_name(path)
            for path, leaf in jax.tree_util.tree_flatten_with_path(kwargs)[0]
            if not is_shared(leaf)
        ]
        if arrays:
            raise ValueError(
                f"The keyword argument {arrays[0]} holds an array with axes. Pass it by position, "
                "where `batch_specs` says how it is split between the replicas."
            )

    def chosen(self, args: tuple[Any, ...]) -> list[int]:
        """The places of the parameters among the arguments."""
        several = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)
        return [index % len(args) for index in several]

    def params_of(self, args: tuple[Any, ...]) -> PyTree:
        """What gradients are taken of, in the form that they have."""
        several = tuple(args[i] for i in self.chosen(args))
        return several if isinstance(self.argnums, tuple) else several[0]

    def _for_each(self, args: tuple[Any, ...], given: Any) -> list[Any]:
        """What `batch_specs` says of each argument; None of the parameters.

        Raises:
          ValueError: If there are more or fewer.
        """
        chosen = self.chosen(args)
        others = [i for i in range(len(args)) if i not in chosen]
        if not isinstance(given, (tuple, list)) or isinstance(given, PartitionSpec):
            given = [given] * len(others)
        if len(given) != len(others):
            raise ValueError(
                f"`batch_specs` has {len(given)} entries, and the function was called with "
                f"{len(others)} arguments besides the parameters. Give one specification for all "
                "of them, or a tuple with one for each."
            )
        by_place = dict(zip(others, given, strict=True))
        return [by_place.get(i) for i in range(len(args))]

    def _arg_specs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any, replicas: int
    ) -> PyTree:
        """A PartitionSpec for each leaf of the arguments, over the replicas' axes only."""
        chosen, given = self.chosen(args), self._for_each(args, self.batch_specs)
        specs = [
            batch_spec(spec, arg, i, mesh, self.axis_name, replicas)
            if i not in chosen
            else jax.tree.map(lambda _: PartitionSpec(), arg)
            for i, (arg, spec) in enumerate(zip(args, given, strict=True))
        ]
        unasked = [i for i, spec in enumerate(given) if spec is None and i not in chosen]
        check_same_rows({i: args[i] for i in unasked}, {i: specs[i] for i in unasked})
        return tuple(specs), jax.tree.map(lambda _: PartitionSpec(), kwargs)


def data_parallel(
    grad_fn: Callable[..., Any],
    reducer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    batch_specs: Any = None,
    aux: PyTree = None,
    axis_name: AxisName | None = None,
    check_vma: bool = True,
) -> DataParallel:
    """Any gradient function of one replica, with its gradients averaged by a reducer.

    In a `jit` loop over sharded arrays the compiler averages gradients, uncompressed. This takes
    the place of the gradient function there: it runs on each replica's part of the batch alone,
    then the reducer, in a `jax.shard_map` over `axis_name` only. The gradients that come out are
    averaged global arrays, laid out as the parameters; optimizer, clipping and masks stay as they
    are. Meshes may have Auto or Explicit axes, and parameters may be sharded over any axis but
    `axis_name`. Inside a function that is mapped over `axis_name` the same call needs no mesh.

    What makes the gradients is the user's: `jax.value_and_grad` of the mean loss of the examples it
    is given, nnx's and Equinox's, a loss scale (unscaled before it returns), a scan that
    accumulates over micro-batches, per-example clipping.

    Args:
      grad_fn: From parameters and one replica's part of the batch to ``(value, gradients)`` or
        ``((value, auxiliary), gradients)``, where the value is a floating scalar, the mean over the
        examples, and the gradients are a tree like the parameters.
      reducer: A `Reducer`, or any Optax transformation that begins with one (give `axis_name`).
      mesh: The mesh; None takes the one of `jax.set_mesh`.
      batch_specs: How the other arguments are split between the replicas: a PartitionSpec for all,
        or a tuple with one for each, which may be a tree. By default as the arrays are known to
        lie, else along axis 0, as long for all of them. What lies on Auto axes inside `jax.jit` is
        not known: a batch split along another axis needs its specification there. Scalars and
        random keys are the same for all: a function makes its own (dropout) with
        ``jax.random.fold_in(key, jax.lax.axis_index(axis_name))``. Axes of the mesh other than
        `axis_name` are left to the compiler.
      aux: What becomes of auxiliary outputs. By default floating scalars are averaged, what grows
        with the batch is joined in its order, other floating arrays (BatchNorm) are averaged, and
        anything else is asked: "mean", "sum" (counts), "join" (rows), "stack" (an axis of
        replicas), for all or as a tree, with None for the default.
      axis_name: The axis or axes of the replicas; None takes the reducer's.
      check_vma: Have JAX prove that the gradients are equal on all replicas. Turn it off for a
        function that it cannot type: loops that begin with ``zeros(shape)``, as most recurrent
        layers.

    Returns:
      A `DataParallel`: a call ``(state, params, *batch, weight=None)`` gives ``((value, gradients),
      state)``; ``init(params)`` gives the state as global arrays, and ``restore`` that of a
      checkpoint.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> def clipped(params, x):  # per-example clipping, which jax.value_and_grad cannot know
      ...     loss = lambda params, row: jnp.mean((row @ params["w"] - 1) ** 2)
      ...     values, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, x)
      ...     return values.mean(), jax.tree.map(lambda g: g.clip(-1, 1).mean(0), grads)
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> reducer = jaxcomp.powersgd(rank=2, axis_name="data", start_step=0)
      >>> gradients = jaxcomp.data_parallel(clipped, reducer, mesh=mesh)
      >>> params = {"w": jnp.zeros((16, 16))}
      >>> state = gradients.init(params)
      >>> (value, grads), state = jax.jit(gradients)(state, params, jnp.eye(16))
      >>> float(value), grads["w"].shape, state.residual["w"].shape
      (1.0, (16, 16), (2, 16, 16))
    """
    if isinstance(grad_fn, optax.GradientTransformation) or not callable(grad_fn):
        raise ValueError(
            f"The first argument must be a function, and the second the reducer, got {grad_fn!r}."
        )
    return checked(
        DataParallel(
            grad_fn, reducer, named_axis(reducer, axis_name), mesh, batch_specs, aux, check_vma
        )
    )


def checked(run: DataParallel) -> DataParallel:
    """`run`, if its arguments are usable.

    Raises:
      ValueError: Otherwise.
    """
    check_axis_name(run.axis_name)
    check_aux(run.aux)
    check_flag("check_vma", run.check_vma)
    if run.mesh is not None:
        check_mesh_axes(run.mesh, run.axis_name)
    return run
