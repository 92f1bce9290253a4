"""`data_parallel`: a gradient function and a reducer in one `jax.shard_map` over the replicas.

It takes the place of torch's `register_comm_hook`, where gradients are ready, whatever made them.
They come out averaged, as global arrays; the optimizer stays where it was.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxcomp._base.checks import check_flag
from jaxcomp._base.leaves import arrays_only, arrays_or_shapes, with_arrays
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, axis_tuple, is_bound
from jaxcomp._mesh.explicit import Boundary, check_mesh_axes, replicas_on, split_axis, typed_specs
from jaxcomp._mesh.per_replica import reducer_states
from jaxcomp._mesh.weights import weighted_gradients
from jaxcomp._reducers.reducer import Reducer, in_dtypes_of
from jaxcomp._reducers.transformation import Transformation
from jaxcomp._states.place import shard_state, state_specs
from jaxcomp._training.arguments import (
    check_keywords,
    on_replica,
    positions,
    split_specs,
    weight_spec,
)
from jaxcomp._training.examine import examined
from jaxcomp._training.gradients import check_averaged, check_loss
from jaxcomp._training.hold_state import is_alone, state_in
from jaxcomp._training.on_mesh import (
    axes_of_state,
    call_on_replicas,
    check_differentiable,
    check_params,
    check_replica_axis,
    named_axis,
    the_mesh,
)
from jaxcomp._training.outputs import Outputs, check_aux, judged, put_together, reduced, taken_apart
from jaxcomp._training.stacked_layers import note_stacked_layers


class Call(NamedTuple):
    """The arguments of one call."""

    arguments: Any  # positional and named ones
    arrays: PyTree  # the arrays among them
    specs: PyTree  # how each array is split
    examples: dict[int, int]  # how many there are, by the axis that they lie along
    replicas: int  # between which arrays are split; 1 in a mapped function, where they are


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity: jax.jit may take it
class DataParallel:
    """What `data_parallel` returns: the gradients as a call, and `init`, `restore`, `outputs`."""

    grad_fn: Callable[..., Any]
    reducer: optax.GradientTransformation
    axis_name: AxisName
    mesh: Mesh | None
    batch_specs: Any
    aux: PyTree
    check_vma: bool
    argnums: int | tuple[int, ...]  # which arguments are the parameters

    def init(self, params: PyTree) -> PyTree:
        """Makes the reducer's state before the first step, on the mesh.

        ``jaxcomp.shard_state(reducer.init(params), mesh, axis_name)`` is the same, where this
        object is out of reach.

        Args:
          params: What gradients are taken of; with several `argnums` a tuple. Arrays as they are
            laid out for training, tracers, or their `jax.ShapeDtypeStruct`.

        Returns:
          Global arrays. What each replica has of its own is ``(n, *leaf)`` for ``n`` replicas,
          sharded over `axis_name` and, behind that, as its parameter is.

        Raises:
          ValueError: If there is no mesh, or parameters are sharded over `axis_name`.
        """
        params = arrays_or_shapes(params)
        mesh = the_mesh(self.mesh, self.axis_name, params)
        check_params(params, mesh, axis_tuple(self.axis_name))
        check_differentiable(params)
        state = self.reducer.init(params)
        note_stacked_layers(params, state)
        return shard_state(state, mesh, axes_of_state(self.reducer, params, mesh, self.axis_name))

    def restore(self, state: PyTree, params: PyTree) -> PyTree:
        """Places the state of a checkpoint on this mesh, compared with the parameters.

        Args:
          state: Consolidated, or of any number of replicas; or a tree that holds it, as for a call.
          params: As for `init`.

        Returns:
          The same, on the mesh; leaves of the reducer's state lie over its other axes as `init`
          would lay them.

        Raises:
          ValueError: Listing every leaf whose shape does not fit.
        """
        params = arrays_or_shapes(params)
        mesh = the_mesh(self.mesh, self.axis_name, params)
        axes = axes_of_state(self.reducer, params, mesh, self.axis_name)
        fresh = self.reducer.init(params)
        if is_alone(state, self.reducer) or not reducer_states(state):
            return shard_state(state, mesh, axes, like=fresh)
        tree = shard_state(state, mesh, axes)
        placed, put_back = state_in(tree, self.reducer, params)
        return put_back(shard_state(placed, mesh, axes, like=fresh))

    def __call__(self, state: PyTree, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        """Returns value and averaged gradients.

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
            another number of replicas, or an auxiliary output has no entry.
        """
        params = self._params(args)
        check_keywords(kwargs, self.grad_fn)
        state, put_back = state_in(state, self.reducer, params)
        if is_bound(self.axis_name):
            call = self._call((args, kwargs))
            compute = functools.partial(self._gradients, call)
            whole, rows, means, state = self._step(compute, state, call.arrays, weight)
        else:
            whole, rows, means, state = self._on_mesh(state, (args, kwargs), params, weight)
        return (put_together(whole, rows), means), put_back(state)

    def outputs(self, params: PyTree, *batch: Any, weight: Any = None, **kwargs: Any) -> PyTree:
        """Finds out what value and auxiliary outputs are, and prints it as a table.

        Call it once, outside of `jax.jit`, with a batch of a few examples whose number is even. It
        runs the whole batch and its two halves, as one replica and as two, and compares: a mean is
        the mean of the halves', a sum their sum, rows are those of the first half, then those of
        the second. What is none of these is said to be so: "stack" it, or change what is returned.
        Two halves that are alike tell little, and what a function draws at random tells nothing:
        give it a key, or a rate, with which it draws alike.

        Args:
          params: As for the call, where `argnums` says.
          *batch: As for the call.
          weight: As for the call: what counts how much in the means.
          **kwargs: As for the call.

        Returns:
          The tree for ``aux=``, with None where no word fits; None if there is no auxiliary output.

        Raises:
          ValueError: If the loss is not the mean of the examples that it is given: one that divides
            by a constant, as the size of the global batch, has values and gradients too small by
            the number of replicas. If the batch cannot be halved.

        Example:
          >>> import jax, jax.numpy as jnp, jaxcomp
          >>> def loss_fn(w, x):
          ...     losses = (x @ w - 1) ** 2
          ...     return losses.mean(), {"losses": losses, "small": (losses < 1).sum()}
          >>> value_and_grad = jaxcomp.value_and_grad(
          ...     loss_fn, jaxcomp.allreduce(axis_name="data"), has_aux=True)
          >>> aux = value_and_grad.outputs(jnp.ones(2), jnp.arange(8.0).reshape(4, 2) / 8)
          output      type        aux
          the loss    float32[]   'mean'
          ['losses']  float32[4]  'join'  rows along axis 0
          ['small']   int32[]     'sum'
          aux={'losses': 'join', 'small': 'sum'}
        """
        check_keywords(kwargs, self.grad_fn)
        call = self._call(((params, *batch), kwargs), replicas=2)
        shares = np.ones(2)
        if weight is not None:
            spec = weight_spec(weight, call.examples, self.axis_name, 2)
            axis = split_axis(spec) or 0
            halves = np.split(np.asarray(weight, np.float32), 2, axis)
            shares = np.array([half.sum() for half in halves])

        def outputs_of(arrays: PyTree) -> PyTree:
            local_args, local_kwargs = with_arrays(on_replica(call.arguments), arrays)
            return taken_apart(self.grad_fn(*local_args, **local_kwargs))[0]

        return examined(outputs_of, call.arrays, call.specs, self.axis_name, shares)

    def _params(self, args: tuple[Any, ...]) -> PyTree:
        """Returns what gradients are taken of, arrays only: a tuple if `argnums` are several."""
        params = tuple(arrays_only(args[i]) for i in positions(args, self.argnums))
        if not np.ndim(self.argnums):
            (params,) = params
        return params

    def _call(self, arguments: Any, mesh: Any = None, replicas: int = 1) -> Call:
        """Finds the arrays among positional and named arguments, and how each is split."""
        arrays = arrays_only(arguments)
        params_at = positions(arguments[0], self.argnums)
        split, examples = split_specs(
            arguments[0], params_at, self.batch_specs, self.axis_name, mesh, replicas
        )
        specs = (split, jax.tree.map(lambda x: PartitionSpec(), arrays[1]))
        return Call(arguments, arrays, specs, examples, replicas)

    def _on_mesh(self, state: PyTree, arguments: Any, params: PyTree, weight: Any) -> Any:
        """Runs the step on every replica of a mesh."""
        axes = axis_tuple(self.axis_name)
        mesh = the_mesh(self.mesh, self.axis_name, state, arrays_only(arguments))
        replicas = replicas_on(mesh, axes)
        state_axis = axes_of_state(self.reducer, params, mesh, self.axis_name)
        check_replica_axis(state, mesh, state_axis)
        check_params(params, mesh, axes)
        call = self._call(arguments, mesh, replicas)
        weights = None
        if weight is not None:
            weights = weight_spec(weight, call.examples, self.axis_name, replicas)
            weight = jnp.asarray(weight)
        states = state_specs(state, state_axis)
        boundary = Boundary(mesh, axes)
        compute = functools.partial(self._gradients, call)
        compute = boundary.explicit(compute, typed_specs(call.arrays))
        shared = PartitionSpec()
        rows = PartitionSpec(self.axis_name)
        return call_on_replicas(
            functools.partial(self._step, compute),
            (state, call.arrays, weight),
            in_specs=(states, call.specs, weights),
            out_specs=(shared, rows, shared, states),
            types=(shared, rows, typed_specs(params), typed_specs(state)),
            boundary=boundary,
            check_vma=self.check_vma,
        )

    def _step(
        self,
        compute: Callable[[PyTree], tuple[Outputs, PyTree]],
        state: PyTree,
        arrays: PyTree,
        weight: Any,
    ) -> tuple[Outputs, list[Array], PyTree, PyTree]:
        """Makes the step of one replica.

        Args:
          compute: From this replica's arrays to outputs and gradients, both its own.
          state: The reducer's, with the row that shard_map leaves or without.
          arrays: This replica's.
          weight: How much this replica counts, or each of its examples; None if all count the same.

        Returns:
          Outputs that are equal on all replicas, rows, averaged gradients and the new state.
        """
        outputs, gradients = compute(arrays)
        if weight is not None:
            counts = jnp.asarray(weight).astype(jnp.float32)
            # A negative one is refused as a step that is not finite, also beside larger ones.
            usable = jnp.all(counts >= 0)
            weight = jnp.where(usable, jnp.sum(counts), jnp.nan)
        params = self._params(arrays[0])
        if isinstance(self.reducer, Reducer):
            means, state = self.reducer.update(gradients, state, params, weight=weight)
        else:
            shares = gradients
            if weight is not None:
                # Each link of a chain would weigh along its axis alone, and a plain one not at all.
                shares = weighted_gradients(gradients, weight, self.axis_name)
            chain = Transformation(self.reducer.init, self.reducer.update)
            means, state = chain.update(shares, state, params)
            means = in_dtypes_of(gradients, means)
        check_averaged(means, self.axis_name)
        whole, rows = reduced(outputs, weight, self.axis_name)
        return whole, rows, means, state

    def _gradients(self, call: Call, arrays: PyTree) -> tuple[Outputs, PyTree]:
        """Calls the gradient function with one replica's arrays; see `_step`."""
        local = list(arrays[0])
        for i in positions(arrays[0], self.argnums):
            # Typed as this replica's own: else JAX would add up the gradients of all.
            local[i] = as_local(local[i], self.axis_name)
        marked = (tuple(local), arrays[1])
        shared = {}
        originals = jax.tree.leaves(arrays)
        specs = jax.tree.leaves(call.specs)
        for i, leaf in enumerate(jax.tree.leaves(marked)):
            if split_axis(specs[i]) is None:
                shared[id(leaf)] = originals[i]
        args, kwargs = with_arrays(on_replica(call.arguments), marked)
        outputs, gradients = taken_apart(self.grad_fn(*args, **kwargs))
        check_loss(outputs[0], self.axis_name)
        examples = {length // call.replicas for length in call.examples.values()}
        return judged(outputs, self.aux, self.axis_name, shared, examples), gradients


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
    """Averages the gradients of any gradient function of one replica by a reducer.

    In a `jit` loop over sharded arrays the compiler averages gradients, uncompressed. This takes
    the place of the gradient function there: it runs on each replica's part of the batch alone,
    then the reducer, in a `jax.shard_map` over `axis_name` only. The gradients that come out are
    averaged global arrays, laid out as the parameters; optimizer, clipping and masks stay as they
    are. Meshes may have Auto or Explicit axes, and parameters may be sharded over any axis but
    `axis_name`. Inside a function that is mapped over `axis_name` the same call needs no mesh.

    Any function may make the gradients: `jax.value_and_grad` of the mean loss of the examples it
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
      aux: What becomes of auxiliary outputs: one word for all, or a tree that may end early.
        "mean" averages floating values; values of any dtype that JAX knows to be equal on all
        replicas stay as they are. With ``check_vma=False`` it knows none: integers, flags and keys
        that are said to be a "mean" are compared in the program, by one more all-reduce of their
        bytes, and stay as they are; if they differ, the value is NaN. "sum" adds up counts. "join"
        concatenates the rows of the examples; an integer does so along that axis instead of the
        first. "stack" adds an axis of replicas. An output without an entry is refused, with the
        line to write, unless the function returns it just as it got it. `DataParallel.outputs`
        finds out what each output is.
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
    _check_gradients_of(grad_fn, argnums)
    axis_name = named_axis(reducer, axis_name)
    check_aux(aux)
    check_flag("check_vma", check_vma)
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    return DataParallel(grad_fn, reducer, axis_name, mesh, batch_specs, aux, check_vma, argnums)


def value_and_grad(
    fun: Callable[..., Any],
    reducer: optax.GradientTransformation,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    mesh: Mesh | None = None,
    batch_specs: Any = None,
    aux: PyTree = None,
    axis_name: AxisName | None = None,
    check_vma: bool = True,
) -> DataParallel:
    """Does what `jax.value_and_grad` does, and averages the gradients by a reducer.

    For loops in `jax.jit`. Nothing but
    ``data_parallel(jax.value_and_grad(fun, argnums, has_aux), reducer, ...)``.

    Args:
      fun: The mean loss of the examples that it is given: a scalar, or (scalar, auxiliary) with
        `has_aux`. Parameters come first, or where `argnums` says.
      reducer: As for `data_parallel`.
      argnums: As for `jax.value_and_grad`.
      has_aux: As for `jax.value_and_grad`.
      mesh: As for `data_parallel`.
      batch_specs: As for `data_parallel`, for the arguments that are not differentiated.
      aux: As for `data_parallel`.
      axis_name: As for `data_parallel`.
      check_vma: As for `data_parallel`.

    Returns:
      A `DataParallel`; a call ``(state, params, *batch)`` gives ``((value, gradients), state)``.

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
    _check_gradients_of(fun, argnums)
    return data_parallel(
        jax.value_and_grad(fun, argnums, check_flag("has_aux", has_aux)),
        reducer,
        mesh=mesh,
        argnums=argnums,
        batch_specs=batch_specs,
        aux=aux,
        axis_name=axis_name,
        check_vma=check_vma,
    )


def _check_gradients_of(function: Any, argnums: Any) -> None:
    """Refuses what is not a function, as a reducer that was passed first, or names no arguments.

    Raises:
      ValueError: Saying what belongs there.
    """
    if isinstance(function, optax.GradientTransformation) or not callable(function):
        raise ValueError(
            f"The first argument must be a function, and the second the reducer, got {function!r}."
        )
    if np.atleast_1d(argnums).dtype.kind != "i":
        raise ValueError(f"`argnums` must be an integer or a tuple of them, got {argnums!r}.")
