"""`data_parallel`: a gradient function and a reducer in one `jax.shard_map` over the replicas.

It corresponds to torch's `register_comm_hook`: any function can make the gradients. They are
returned averaged, as global arrays, and the optimizer does not change.

A call goes `__call__`, which finds the reducer's state in what it was passed; `_on_mesh`, which
finds the mesh and how every array is split; then, on each replica, `_step`: gradients, reducer,
outputs. Inside a function that is already mapped `_step` runs at once. The other files of this wing
answer one question each: `arguments` how the batch is split, `on_mesh` how to map and what JAX's
errors mean, `outputs` how values of the replicas are combined, `hold_state` where the state is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxcomp._base.checks import answers_other_names, check_flag, is_compiling, is_traced
from jaxcomp._base.leaves import arrays_only, check_values
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, axis_tuple, is_bound
from jaxcomp._mesh.meshes import (
    check_mesh_axes,
    explicit_inside,
    replicas_on,
    split_axis,
    typed_specs,
)
from jaxcomp._mesh.per_replica import is_reducer_state, reducer_states
from jaxcomp._reducers.reducer import averaging, check_averaged
from jaxcomp._reducers.transformation import Transformation
from jaxcomp._states.place import shard_state
from jaxcomp._training.arguments import (
    Inputs,
    arguments_of_replica,
    check_keywords,
    positions,
    read_inputs,
    weight_spec,
)
from jaxcomp._training.examine import examined
from jaxcomp._training.hold_state import is_state_itself, state_in
from jaxcomp._training.on_mesh import (
    axes_of_state,
    call_on_replicas,
    check_differentiable,
    check_params,
    named_axis,
    the_mesh,
)
from jaxcomp._training.outputs import (
    as_array,
    as_outputs,
    check_aux,
    check_loss,
    combined,
    one_level,
    put_together,
    taken_apart,
)
from jaxcomp._training.stacked_layers import note_stacked_layers


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, so jax.jit accepts it
class DataParallel:
    """Computes averaged gradients when it is called; `data_parallel` makes such an object."""

    grad_fn: Callable[..., Any]
    reducer: Transformation  # a `Reducer`, or a chain that begins with one
    axis_name: AxisName
    mesh: Mesh | None
    batch_specs: Any
    aux: PyTree
    check_vma: bool
    argnums: int | tuple[int, ...]  # positions of the parameters
    # Not an argument, so `dataclasses.replace` gives a copy a dictionary of its own.
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @answers_other_names
    def init(self, params: PyTree) -> PyTree:
        """Makes the reducer's state before the first step, on the mesh.

        It is the same as ``jaxcomp.shard_state(reducer.init(params), mesh, axis_name)``.

        Args:
          params: The parameters; a tuple if there are several `argnums`. Arrays with the shardings
            of training, tracers, or `jax.ShapeDtypeStruct`.

        Returns:
          Global arrays. A per-replica leaf has shape ``(n, *leaf)`` for ``n`` replicas. It is
          sharded over `axis_name`, and its other axes as those of its parameter.

        Raises:
          ValueError: If there is no mesh, there are no arrays, or parameters are sharded over
            `axis_name`.
        """
        arrays = arrays_only(params)
        state = self.reducer.init(arrays)
        if not jax.tree.leaves(arrays):
            raise ValueError(
                f"init takes the parameters, as arrays or their shapes, got {one_level(params)}."
            )
        mesh = the_mesh(self.mesh, self.axis_name, arrays)
        check_params(arrays, mesh, axis_tuple(self.axis_name))
        check_differentiable(arrays)
        note_stacked_layers(arrays, state)
        return shard_state(state, mesh, self._axes_of_state(arrays, mesh))

    @answers_other_names
    def restore(self, state: PyTree, params: PyTree) -> PyTree:
        """Places the state of a checkpoint on this mesh, after comparing it with the parameters.

        Args:
          state: A state that is consolidated or of any number of replicas; or a tree that holds it,
            as for a call.
          params: The parameters, as for `init`.

        Returns:
          The same state or tree on the mesh. Over other mesh axes, the leaves of the reducer's
          state are sharded as `init` would do it.

        Raises:
          ValueError: If a leaf's shape does not fit; the message lists all such leaves.
        """
        params = arrays_only(params)
        mesh = the_mesh(self.mesh, self.axis_name, params)
        axes = self._axes_of_state(params, mesh)
        fresh = self.reducer.init(params)
        if is_state_itself(state, self.reducer) or not reducer_states(state):
            return shard_state(state, mesh, axes, like=fresh)
        # First the whole tree, because other states in it have rows too; then the reducer's state
        # again, which alone can be compared with a fresh one.
        tree = shard_state(state, mesh, axes)
        placed, put_back = state_in(tree, self.reducer, params)
        return put_back(shard_state(placed, mesh, axes, like=fresh))

    def __call__(self, state: PyTree, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        """Returns value and averaged gradients.

        Call it inside `jax.jit` with global arrays; or inside a function that is mapped over
        `axis_name` with the arrays of one replica, without a mesh. Outside of both it is
        compiled as by `jax.jit`, so values in closures stay those of the first call. Arguments that
        are not arrays are static: others compile again, and one that has no hash always does.

        Args:
          state: The reducer's state, from `init`, `restore`, `shard_state` or the last call; or a
            tree that holds it, such as a TrainState with `hold_state` in its optimizer.
          *args: The arguments of the gradient function, parameters first.
          weight: Weights of examples or replicas, for gradients and means: a mask or counts with
            the axis along which the batch is split, which are summed for each replica; or an array
            of shape (replicas,). A replica with weight 0 is ignored. None if all have the same
            weight.
          **kwargs: Keyword arguments of the gradient function: scalars, random keys, or objects
            that are not arrays.

        Returns:
          ``((value, gradients), state)``, or ``(((value, auxiliary), gradients), state)``. The
          value is the mean over the replicas. In a mapped function each replica gets only its own
          rows of auxiliary outputs.

        Raises:
          ValueError: If there is no mesh, an argument does not fit its specification, no argument
            is split between the replicas, parameters are sharded over `axis_name`, the state is for
            another number of replicas, or an auxiliary output has no entry in `aux`.
        """
        params = self._params(args)
        check_keywords(kwargs, self.grad_fn)
        state, put_back = state_in(state, self.reducer, params)
        if is_bound(self.axis_name):
            # Arrays are those of this replica already, and a batch is not cut again.
            arguments = (*args, kwargs)
            compute = functools.partial(self._gradients, self._inputs(arguments, None, 1))
            arrays = arrays_only(arguments)
            equal, rows, means, state = self._step(compute, state, arrays, weight)
        else:
            equal, rows, means, state = self._on_mesh(state, (*args, kwargs), params, weight)
        return (put_together(equal, rows), means), put_back(state)

    def outputs(self, params: PyTree, *batch: Any, weight: Any = None, **kwargs: Any) -> PyTree:
        """Finds out whether outputs are means, sums or rows, and prints a table.

        Call it once, outside of `jax.jit`, with a small batch of an even number of examples. It
        runs the whole batch as one replica and its halves as two, and compares: a mean is the mean
        of the halves' values, a sum is their sum, and rows are the rows of both halves. For an
        output that is none of these, use "stack" or return something else. Halves with similar
        values decide little. A function that draws random numbers must draw the same ones in all
        runs: pass a suitable key or dropout rate.

        Args:
          params: The parameters, as for the call.
          *batch: As for the call.
          weight: As for the call.
          **kwargs: As for the call.

        Returns:
          The tree for ``aux=``, with None where no word fits; None without auxiliary outputs.

        Raises:
          ValueError: If the loss is not a mean over its examples, the batch cannot be halved or is
            traced, or an output is not a number. (A loss that divides by a constant, such as the
            size of the global batch, is too small by the number of replicas, and so are its
            gradients.)

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
        if is_reducer_state(params):
            kind = type(params).__name__
            raise ValueError(
                f"outputs takes the parameters first, without the reducer's state, got a {kind}."
            )
        check_values("params", params)
        check_values("batch", batch)
        arguments = (params, *batch, kwargs)
        inputs = self._inputs(arguments, None, 2)
        arrays = arrays_only(arguments)
        # Inside of `jax.jit` the arguments may come from a closure.
        if is_compiling() or any(map(is_traced, jax.tree.leaves((arrays, weight)))):
            raise ValueError(
                "outputs compares numbers, and inside of jax.jit there are none yet. Call it once "
                "before, outside, with arrays."
            )
        if weight is None:
            weight = np.ones(2)  # one for each half
        axis = split_axis(weight_spec(weight, inputs.examples, self.axis_name, 2))
        halves = np.split(np.asarray(weight, np.float32), 2, axis or 0)
        weights = np.array(list(map(np.sum, halves)))

        def outputs_of(arrays: PyTree) -> PyTree:
            *args, kwargs = arguments_of_replica(inputs.static, arrays)
            value, *auxiliary = taken_apart(self.grad_fn(*args, **kwargs))[0]
            return [value, *(jax.tree.map_with_path(as_array, tree) for tree in auxiliary)]

        return examined(outputs_of, arrays, inputs.specs, self.axis_name, weights)

    def _params(self, args: tuple[Any, ...]) -> PyTree:
        """Returns the arrays of the parameters; a tuple if there are several `argnums`."""
        params = tuple(arrays_only(args[i]) for i in positions(args, self.argnums))
        if not np.ndim(self.argnums):
            (params,) = params
        return params

    def _axes_of_state(self, params: PyTree, mesh: Any) -> AxisName:
        """Finds out along which axes the reducer's state differs."""
        return axes_of_state(self.reducer, params, mesh, self.axis_name, check_vma=self.check_vma)

    def _inputs(self, arguments: Any, mesh: Any, replicas: int) -> Inputs:
        """Finds the arrays among positional and keyword arguments, and how each is split."""
        at = positions(arguments[:-1], self.argnums)
        return read_inputs(arguments, at, self.batch_specs, self.axis_name, mesh, replicas)

    def _on_mesh(self, state: PyTree, arguments: Any, params: PyTree, weight: Any) -> Any:
        """Runs the step on every replica of a mesh."""
        axes = axis_tuple(self.axis_name)
        arrays = arrays_only(arguments)
        mesh = the_mesh(self.mesh, self.axis_name, state, arrays)
        inputs = self._inputs(arguments, mesh, replicas_on(mesh, axes))
        # Only the user's function sees Explicit axes; `call_on_replicas` makes them Auto for the
        # rest.
        compute = functools.partial(self._gradients, inputs)
        compute = explicit_inside(compute, typed_specs(arrays), mesh, axes)
        return call_on_replicas(
            functools.partial(self._step, compute),
            state,
            arrays,
            weight,
            inputs=inputs,
            params=params,
            mesh=mesh,
            axis_name=self.axis_name,
            state_axis=self._axes_of_state(params, mesh),
            compiled=self.compiled,
            check_vma=self.check_vma,
        )

    def _step(
        self,
        compute: Callable[[PyTree], tuple[tuple[PyTree, ...], PyTree]],
        state: PyTree,
        arrays: PyTree,
        weight: Any,
    ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """Runs the step of one replica.

        Args:
          compute: A function of this replica's arrays that returns its outputs and gradients.
          state: The reducer's state, with or without the rows that shard_map leaves.
          arrays: This replica's arrays.
          weight: The weight of this replica, or of each of its examples; None for equal weights.

        Returns:
          Outputs that are equal on all replicas, rows of outputs, averaged gradients, the new
          state.
        """
        outputs, gradients = compute(arrays)
        if weight is not None:
            counts = jnp.asarray(weight).astype(float)  # float32, or float64 if JAX has it
            # A negative weight makes the step not finite, even if the sum is positive.
            usable = jnp.all(counts >= 0)
            weight = jnp.where(usable, jnp.sum(counts), jnp.nan)
        params = self._params(arrays[:-1])
        means, state = self.reducer.update(gradients, state, params, weight=weight)
        check_averaged(means, self.axis_name)
        equal, rows = combined(outputs, weight, self.axis_name)
        return equal, rows, means, state

    def _gradients(self, inputs: Inputs, arrays: PyTree) -> tuple[tuple[PyTree, ...], PyTree]:
        """Calls the gradient function with one replica's arrays; returns outputs and gradients."""
        local = list(arrays)
        for i in inputs.params_at:
            # Marked as this replica's own: else JAX would sum the gradients of all replicas.
            local[i] = as_local(local[i], self.axis_name)
        marked = tuple(local)
        *args, kwargs = arguments_of_replica(inputs.static, marked)
        values, gradients = taken_apart(self.grad_fn(*args, **kwargs))
        check_loss(values[0], self.axis_name)
        examples: set[int] = set()
        # A function may return an argument. It gets the marked array, whose type says that replicas
        # differ, so an array that every replica gets whole is recognised by its identity, and
        # replaced by the one from before the marking.
        shared: dict[int, Any] = {}
        trees = map(jax.tree.leaves, (arrays, marked, inputs.specs))
        for before, array, spec in zip(*trees, strict=True):
            axis = split_axis(spec)
            if axis is None:
                shared[id(array)] = before
            else:
                examples.add(array.shape[axis])
        return as_outputs(values, self.aux, self.axis_name, shared, examples), gradients


@answers_other_names
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
    """Wraps a gradient function so that a reducer averages its gradients over the replicas.

    In a `jit` loop over sharded arrays the compiler averages gradients without compression. Use the
    result of this function in place of your gradient function: it runs the function on each
    replica's part of the batch and then the reducer, in a `jax.shard_map` over `axis_name` only. It
    returns averaged gradients as global arrays with the shardings of the parameters; optimizer,
    clipping and masks stay as they are. Meshes may have Auto or Explicit axes, and parameters may
    be sharded over any axis but `axis_name`. Inside a function that is mapped over `axis_name` the
    same call needs no mesh.

    Any function may make the gradients of the mean loss over its examples: `jax.value_and_grad`,
    that of nnx or Equinox, one with loss scaling (which must unscale before it returns), a scan
    that accumulates over micro-batches, per-example clipping.

    Args:
      grad_fn: A function of parameters and one replica's part of the batch. It returns
        ``(value, gradients)``, ``((value, auxiliary), gradients)`` or
        ``(value, auxiliary, gradients)``. The value is a floating scalar, the mean over the
        examples; the gradients are a tree like the parameters.
      reducer: A `Reducer`, or an Optax chain that begins with one (then pass `axis_name`). The call
        returns the updates of a chain that ends with an optimizer, in place of gradients.
      mesh: The mesh; None takes the mesh of `jax.set_mesh`, else that of the state's arrays.
      argnums: Positions of the parameters, as for `jax.value_and_grad`.
      batch_specs: How the other arguments are split between the replicas: a PartitionSpec for all
        of them, or a tuple with one (or a tree) for each. None uses the known shardings of the
        arrays, else axis 0, whose length must then be equal for all of them. Shardings over Auto
        axes are not known inside `jax.jit`, so a batch that is split along another axis needs its
        PartitionSpec. Scalars and random keys are the same on all replicas. For a different key on
        each replica (dropout), use ``jax.random.fold_in(key, jax.lax.axis_index(axis_name))``. Mesh
        axes other than `axis_name` are left to the compiler.
      aux: How auxiliary outputs are combined: one word for all, or a tree (or a prefix of it) of
        words. "mean" averages floating and complex values; values of any dtype that JAX knows to be
        equal on all replicas stay as they are. With ``check_vma=False`` JAX knows no such values. A
        "mean" of integers, flags or keys is then compared between the replicas, with one more
        all-gather of their bytes: equal ones stay as they are, and if they differ, the loss is NaN.
        "sum" adds. "join" concatenates the rows of the examples along axis 0; an integer does so
        along that axis. "stack" adds an axis of replicas. An output without an entry is refused,
        and the error shows the line to write; only an argument that the function returns unchanged
        needs no entry. `DataParallel.outputs` finds the words.
      axis_name: The axis or axes of the replicas; None takes those of the reducer.
      check_vma: Let JAX prove that the gradients are equal on all replicas. Pass False for a
        function that JAX cannot type: loops that begin with ``zeros(shape)``, as in most recurrent
        layers.

    Returns:
      A `DataParallel`: a call ``(state, params, *batch, weight=None)`` returns
      ``((value, gradients), state)``; ``init(params)`` returns the state as global arrays, and
      ``restore`` returns that of a checkpoint.

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
    _check_function(grad_fn, argnums)
    axis_name = named_axis(reducer, axis_name)
    check_aux(aux)
    check_flag("check_vma", check_vma)
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    averages = averaging(reducer, axis_name)
    return DataParallel(grad_fn, averages, axis_name, mesh, batch_specs, aux, check_vma, argnums)


@answers_other_names
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
    """Differentiates like `jax.value_and_grad`, and averages the gradients with a reducer.

    It is for loops in `jax.jit`, and short for
    ``data_parallel(jax.value_and_grad(fun, argnums, has_aux), reducer, ...)``.

    Args:
      fun: A function that returns the mean loss over its examples: a scalar, or (scalar, auxiliary)
        with `has_aux`. Parameters come first, or at the positions `argnums`.
      reducer: As for `data_parallel`.
      argnums: As for `jax.value_and_grad`.
      has_aux: As for `jax.value_and_grad`.
      mesh: As for `data_parallel`.
      batch_specs: As for `data_parallel`, for the arguments that are not differentiated.
      aux: As for `data_parallel`.
      axis_name: As for `data_parallel`.
      check_vma: As for `data_parallel`.

    Returns:
      A `DataParallel`; a call ``(state, params, *batch)`` returns ``((value, gradients), state)``.

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
    _check_function(fun, argnums)
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


def _check_function(function: Any, argnums: Any) -> None:
    """Refuses an object that is not a function, such as a reducer, and unusable `argnums`.

    Raises:
      ValueError: In these cases.
    """
    if isinstance(function, optax.GradientTransformation) or not callable(function):
        raise ValueError(
            f"The first argument must be a function, and the second the reducer, got {function!r}."
        )
    if np.atleast_1d(argnums).dtype.kind != "i":  # bools are no positions
        raise ValueError(f"`argnums` must be an integer or a tuple of them, got {argnums!r}.")
