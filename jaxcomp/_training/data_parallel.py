"""`data_parallel`: a gradient function and a reducer in one `jax.shard_map` over the replicas.

It takes the place of torch's `register_comm_hook`, where gradients are ready, whatever made them.
They come out averaged, as global arrays; the optimizer stays where it was.
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
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxcomp._base.checks import check_axis_name, check_flag
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple, is_bound
from jaxcomp._mesh.explicit import Boundary, check_mesh_axes, resharded, typed_specs
from jaxcomp._mesh.weights import weighted_gradients
from jaxcomp._reducers.reducer import Reducer
from jaxcomp._states.place import shard_state, state_specs
from jaxcomp._training.arguments import Arguments, arrays_only
from jaxcomp._training.gradients import check_averaged, check_loss
from jaxcomp._training.hold_state import state_in
from jaxcomp._training.on_mesh import (
    check_differentiable,
    check_params,
    check_replica_axis,
    errors_explained,
    named_axis,
    the_mesh,
    weight_spec,
)
from jaxcomp._training.outputs import Outputs, Reported, check_aux
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
    argnums: int | tuple[int, ...]  # which arguments are the parameters

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
        params = arrays_only(params)
        mesh = the_mesh(self.mesh, self.axis_name, params)
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
        mesh = the_mesh(self.mesh, self.axis_name, params)
        return shard_state(state, mesh, self.axis_name, like=self.reducer.init(arrays_only(params)))

    def __call__(self, state: PyTree, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        """Value and averaged gradients.

        Call it inside `jax.jit` with global arrays; or inside a function that is mapped over
        `axis_name`, with those of one replica, and without a mesh.

        Args:
          state: The reducer's, from `init`, `restore`, `shard_state` or the last call; or a tree
            that holds it, as a TrainState with `hold_state` in its optimizer does.
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
        call = Arguments(args, kwargs, self.argnums)
        own_state, put_back = state_in(state, self.reducer, lambda: call.params(call.arrays))
        reported = Reported(self.aux, self.axis_name)
        if is_bound(self.axis_name):
            call.split_by(self.batch_specs, self.axis_name)
            outputs, grads, own_state = self._on_replica(
                call, reported, own_state, call.arrays, weight
            )
        else:
            outputs, grads, own_state = self._on_mesh(call, reported, own_state, weight)
        return (reported.together(outputs), grads), put_back(own_state)

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
        call = Arguments((params, *batch), kwargs, 0)
        call.split_by(self.batch_specs, self.axis_name, replicas=2)

        def value(part: int | None) -> float:
            arrays = dict(call.arrays)
            if part is not None:
                for i, axis in call.batch(arrays).items():
                    arrays[i] = jnp.split(jnp.asarray(arrays[i]), 2, axis)[part]
            args, kwargs = call.rebuilt(arrays)
            # An axis of one replica, for what asks for its index.
            run = jax.vmap(
                lambda _: jax.tree.leaves(self.grad_fn(*args, **kwargs)[0])[0],
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

    def _on_mesh(
        self, call: Arguments, reported: Reported, state: PyTree, weight: Any
    ) -> tuple[Outputs, PyTree, PyTree]:
        """The step as a `shard_map` over the replicas."""
        params = call.params(call.arrays)
        mesh = the_mesh(self.mesh, self.axis_name, state, call.arrays)
        axes = axis_tuple(self.axis_name)
        replicas = math.prod(mesh.shape[name] for name in axes)
        check_replica_axis(state, replicas)
        check_params(params, mesh, axes)
        call.split_by(self.batch_specs, self.axis_name, mesh=mesh, replicas=replicas)

        weight = None if weight is None else jnp.asarray(weight)
        given = state, call.arrays, weight
        state_spec = state_specs(state, self.axis_name)
        along = weight_spec(weight, call.rows(call.arrays), self.axis_name, replicas)
        in_specs = state_spec, call.specs, along
        given = jax.tree.map(lambda x, spec: resharded(x, mesh, spec, axes), given, in_specs)
        boundary = Boundary(mesh, axes)
        explicit = functools.partial(boundary.explicit, specs=typed_specs(given[1]))

        def on_replica(state: PyTree, arrays: dict[int, Any], weight: Any) -> Any:
            return self._on_replica(call, reported, state, arrays, weight, explicit)

        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        others = [name for name, size in mesh.shape.items() if size > 1]
        if replicas == 1 and any(kinds[name] == AxisType.Auto for name in others):
            return _only_replica(on_replica, mesh, axes)(*given)
        mapped = jax.shard_map(
            on_replica,
            mesh=boundary.mesh,
            in_specs=in_specs,
            out_specs=(reported.specs(), PartitionSpec(), state_spec),
            axis_names=set(axes),
            check_vma=self.check_vma,
        )
        like = reported.specs(), typed_specs(params), typed_specs(given[0])
        with errors_explained(axes):
            return boundary.automatic(mapped, like)(*given)

    def _on_replica(
        self,
        call: Arguments,
        reported: Reported,
        state: PyTree,
        arrays: dict[int, Any],
        weight: Any,
        explicit: Callable[..., Any] = lambda function: function,
    ) -> tuple[Outputs, PyTree, PyTree]:
        """Outputs, averaged gradients and the new state of one replica.

        Args:
          call: What this was called with.
          reported: What becomes of value and auxiliary output.
          state: The reducer's, with the row that shard_map leaves or without.
          arrays: This replica's, by their places in `call`.
          weight: How much its examples count, or it does; None if all count the same.
          explicit: Gives the user's function the types that its arguments had outside.
        """

        def value_and_gradients(arrays: dict[int, Any]) -> Any:
            args, kwargs = call.local(arrays, self.axis_name)
            result = self.grad_fn(*args, **kwargs)
            if not (isinstance(result, tuple) and len(result) in (2, 3)):
                raise ValueError(
                    "The gradient function must return (value, gradients), ((value, auxiliary), "
                    "gradients) or (value, auxiliary, gradients), got "
                    f"{jax.tree.structure(result)}."
                )
            return result if len(result) == 2 else (result[:2], result[2])

        def inside(arrays: dict[int, Any]) -> Any:
            value, grads = value_and_gradients(arrays)
            check_loss(value[0] if isinstance(value, tuple) else value, self.axis_name)
            of_twice = lambda x: value_and_gradients(call.with_twice_the_batch(x))[0]  # noqa: E731
            rows = set(call.rows(arrays).values())
            reported.decide(value, rows, lambda: jax.eval_shape(of_twice, arrays))
            return value, grads

        value, grads = explicit(inside)(arrays)
        total = None if weight is None else jnp.sum(jnp.asarray(weight).astype(jnp.float32))
        means, state = self._reduced(grads, state, call.params(arrays), total)
        return reported.apart(value, total), means, state

    def _reduced(
        self, grads: PyTree, state: PyTree, params: PyTree, weight: Array | None
    ) -> tuple[PyTree, PyTree]:
        """Averaged gradients and the new state."""
        update = optax.with_extra_args_support(self.reducer).update
        if weight is None:
            means, state = update(grads, state, params)
        elif isinstance(self.reducer, Reducer):
            means, state = update(grads, state, params, weight=weight)
        else:
            # Each link of a chain would weigh along its own axis, and a plain one not at all.
            means, state = update(weighted_gradients(grads, weight, self.axis_name), state, params)
            means = jax.tree.map(lambda mean, g: mean.astype(g.dtype), means, grads)
        check_averaged(means, self.axis_name)
        return means, state


def _only_replica(
    on_replica: Callable[..., Any], mesh: Any, axes: tuple[str, ...]
) -> Callable[..., Any]:
    """The step of one replica alone, beside automatic axes, where XLA compiles no all-reduce of it.

    "Cross-partition allreduce must be in (partial) manual partitioning mode", it says of an array
    that is laid out over such an axis. Under `jax.vmap` an average over the replicas is a sum.
    """
    for name in axes:
        on_replica = jax.vmap(on_replica, in_axes=None, axis_name=name, axis_size=1)

    def run(*given: Any) -> Any:
        with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
            outputs = on_replica(*given)
        return jax.tree.map(lambda x: x.reshape(x.shape[len(axes) :]), outputs)

    return run


def data_parallel(
    grad_fn: Callable[..., Any],
    reducer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    argnums: int | tuple[int, ...] = 0,
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
      grad_fn: From parameters and one replica's part of the batch to ``(value, gradients)``,
        ``((value, auxiliary), gradients)`` or ``(value, auxiliary, gradients)``, where the value is
        a floating scalar, the mean over the examples, and the gradients are a tree like the
        parameters.
      reducer: A `Reducer`, or any Optax transformation that begins with one (give `axis_name`).
      mesh: The mesh; None takes the one of `jax.set_mesh`, else the one that the state lies on.
      argnums: Which arguments are the parameters, as for `jax.value_and_grad`.
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
        replicas), for all or as a tree, with None, or nothing in a dictionary, for the default.
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
    if not all(isinstance(i, int) for i in (argnums if isinstance(argnums, tuple) else (argnums,))):
        raise ValueError(f"`argnums` must be an integer or a tuple of them, got {argnums!r}.")
    axis_name = named_axis(reducer, axis_name)
    check_axis_name(axis_name)
    check_aux(aux)
    check_flag("check_vma", check_vma)
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    return DataParallel(grad_fn, reducer, axis_name, mesh, batch_specs, aux, check_vma, argnums)
