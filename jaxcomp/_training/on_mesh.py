"""Helpers of functions that map themselves over the replicas of a mesh, inside `jax.jit`.

`data_parallel` and the rounds of local SGD use them, so both find a mesh, refuse arguments and
explain JAX's errors in the same way. `call_on_replicas` makes the `jax.shard_map` (`jax.vmap` for a
single replica); the rest is around it. What a user wrote is a function of global arrays in
`jax.jit`, and an error inside the `shard_map` speaks of things that the user never wrote, so known
ones get a note.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp._base.checks import check_axis_name, is_compiling
from jaxcomp._base.leaves import leaf_name, named_dtype
from jaxcomp._base.typing import Axes, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, axis_tuple, mesh_axes, varying
from jaxcomp._mesh.meshes import (
    check_mesh_axes,
    context_mesh,
    known_sharding,
    over_axes,
    replicas_on,
    typed_specs,
)
from jaxcomp._mesh.per_replica import OWNER, PER_REPLICA, REPLICATED, leaves_marked
from jaxcomp._reducers.reducer import Reducer, check_averaged
from jaxcomp._states.place import check_not_spread, known_spec, state_specs
from jaxcomp._training.arguments import Inputs, weight_spec


def the_mesh(users_mesh: Any, axis_name: AxisName, *trees: PyTree) -> Any:
    """Returns the mesh from the user, from the context, or from the arrays of `trees`.

    Raises:
      ValueError: If there is no mesh, or it lacks an axis.
    """
    mesh = users_mesh or context_mesh()
    names = set(axis_tuple(axis_name))
    for leaf in jax.tree.leaves(trees):
        # The least sure, because an array may also lie on another mesh with this axis.
        known = getattr(known_sharding(leaf), "mesh", None)
        if mesh is None and names.issubset(getattr(known, "axis_names", ())):
            mesh = known
    if mesh is None:
        raise ValueError(
            "There is no mesh. Place the state with jaxcomp.shard_state(state, mesh, axis_name), "
            "pass mesh=, or call this under jax.set_mesh(mesh)."
        )
    check_mesh_axes(mesh, axis_name)
    return mesh


def check_params(params: PyTree, mesh: Any, axes: Axes) -> None:
    """Refuses parameters that are sharded over the axis of the replicas.

    Raises:
      ValueError: If it finds one; the message names the leaf.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        check_not_spread(path, leaf, known_spec(leaf, mesh), axes)


def check_differentiable(params: PyTree) -> None:
    """Refuses parameters that have no gradient: counters, keys, masks.

    Raises:
      ValueError: If it finds one; the message names the leaf.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = named_dtype(path, leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"The leaf {leaf_name(path)} of the parameters has dtype {dtype} and no gradient. "
                "Differentiate only trained leaves, with nnx.split(model, nnx.Param, ...) or "
                "eqx.partition(model, eqx.is_inexact_array), and pass the rest as another argument "
                "of `fun`."
            )


# Patterns of JAX's errors inside of the `jax.shard_map`, which users did not write; and advice. The
# first pattern that is found counts.
_NOTES = {
    # "^$" is an AssertionError of JAX without a text.
    "^$|Unhandled OpSharding type|only AbstractMesh exists": (
        "If this is not an assertion of yours, it is one of JAX, as with "
        "jax.ensure_compile_time_eval in a mapped function, under jax.set_mesh or with Explicit "
        "axes. Compute constants with NumPy (np.arange); or pass mesh= to jaxcomp.data_parallel, "
        "with Auto axes, instead of jax.set_mesh. Or as with a pmean over an axis of jax.vmap, "
        "which Equinox's BatchNorm has: pass check_vma=False."
    ),
    "^ManualAxisType": (
        "This is a fault of JAX: on a mesh with another axis, jnp.zeros_like does not accept a "
        "shape from jax.eval_shape whose type is local to a replica, and jnp.interp, searchsorted "
        "and expm make such shapes. Pass check_vma=False to jaxcomp.data_parallel; or, for a "
        "zeros_like of yours, write jaxcomp.as_local(jnp.zeros(shape.shape, shape.dtype), "
        "axis_name), or zeros_like of the array itself."
    ),
    "do_update (?:.|\n)*reject_update": (
        "optax.apply_if_finite and conditionally_transform choose between the average and this "
        "replica's own gradients: put them around the optimizer, after jaxcomp.data_parallel, and "
        "pass the reducer itself to data_parallel. A step that is not finite leaves its state as "
        "it was."
    ),
    "manual axis types|to have matching type": (
        "In jaxcomp.data_parallel, parameters and split arrays have a type that is local to each "
        "replica. The carried values of a loop and the results of a custom_vjp must keep this "
        "type, and the key of jax.random.gamma needs it if they are its parameters. zeros_like(x) "
        "has the type of x, zeros(shape) does not, and jaxcomp.as_local gives the type to arrays "
        "that every replica gets whole. Or pass check_vma=False: the gradients are the same, but "
        "then only jaxcomp.check detects a pmean of your own."
    ),
    r"Closing over inputs to shard_map(?:.|\n)*Manual": (
        "JAX cannot differentiate through this call on a mesh that has a further Explicit axis. "
        "Make the mesh with Auto axes: axis_types=(jax.sharding.AxisType.Auto, ...)."
    ),
    "Closing over inputs to shard_map": (
        "The function closes over an array on a mesh with Explicit axes. Pass the array as an "
        "argument after the batch: scalars and random keys are the same for all replicas."
    ),
    "Going from `Manual` AxisType": (
        "A layer calls jax.sharding.auto_axes, as flax's Embed does with out_sharding=; JAX does "
        "not allow that in a mapped function. Call the layer without out_sharding."
    ),
    "manual_axis_type|AxisType.Manual|only refer to Auto axes|context mesh": (
        "In jaxcomp.data_parallel a function runs on one replica; its shardings must not name "
        "{axes}, nor hold a mesh with that axis: write jax.P(None, 'model') instead of "
        "NamedSharding(mesh, P('data', 'model')), and remove the axis from the rules for logical "
        "names."
    ),
    r"reshard out_shardings\[2\]": (
        "On a mesh with Explicit axes the gradients must have the leaves and containers of the "
        "parameters. nnx.value_and_grad(model) returns a State: pass nnx.state(model, nnx.Param) "
        "and merge it in the loss, as docs/adopt.md shows. Or make the mesh with Auto axes: "
        "axis_types=(jax.sharding.AxisType.Auto, ...)."
    ),
    "Received incompatible devices": (
        "An argument of jaxcomp.data_parallel is on other devices than the mesh, as after "
        "jax.device_put(x, device). Put all arguments on the mesh: jax.device_put(x, "
        "jax.NamedSharding(mesh, jax.P())), or jax.P({axes}) for a batch."
    ),
    "only valid for values of rank at least": (
        "flax's DenseGeneral with nn.with_partitioning fails like this if a mesh is set, as inside "
        "jaxcomp.data_parallel: it makes a kernel of two axes with a specification of three. Name "
        "its axes with nn.with_logical_partitioning, or apply a module without metadata; only init "
        "needs the metadata."
    ),
}


def call_on_replicas(
    function: Callable[..., tuple[PyTree, PyTree, PyTree, PyTree]],
    state: PyTree,
    arrays: PyTree,
    weight: Any,
    *,
    inputs: Inputs,
    params: PyTree,
    mesh: Any,
    axis_name: AxisName,
    state_axis: AxisName,
    compiled: dict[Any, Any],
    check_vma: bool = True,
) -> Any:
    """Calls a function of one replica in a `jax.shard_map` over all replicas.

    A single replica beside other axes takes `jax.vmap` instead. Explicit axes are Auto for the
    function. Outside of `jax.jit` the call is compiled, as one program.

    Args:
      function: A function of one replica's state, arrays and weight. It returns values that are
        equal on all replicas, rows, a tree like the parameters, and the new state.
      state: The state of all replicas.
      arrays: A tree of global arrays.
      weight: All replicas' weights, or None.
      inputs: How the arrays are split, and all else that the function depends on. If a static value
        has no hash, each call outside of `jax.jit` compiles.
      params: The parameters.
      mesh: The mesh.
      axis_name: The axis or axes of the replicas.
      state_axis: Those along which the state differs.
      compiled: What was compiled outside of `jax.jit`, by all that it depends on. Each object that
        calls has its own dictionary, so that what it compiled is freed with it.
      check_vma: As for `jax.shard_map`.

    Raises:
      ValueError: If the state is for another number of replicas, parameters are sharded over the
        axis of the replicas, or weights do not fit.
    """
    axes = axis_tuple(axis_name)
    replicas = replicas_on(mesh, axes)
    states_needed = replicas_on(mesh, state_axis)
    for name, leaf in leaves_marked(state, PER_REPLICA, OWNER).items():
        if np.shape(leaf)[:1] != (states_needed,):
            raise ValueError(
                f"The leaf {name} of the state has shape {np.shape(leaf)}, and {states_needed} "
                "replicas need a leading axis of that length. Place the state with "
                f"jaxcomp.shard_state(state, mesh, {state_axis!r})."
            )
    check_params(params, mesh, axes)
    weights = None
    if weight is not None:
        weights = weight_spec(weight, inputs.examples, axis_name, replicas)
        weight = jnp.asarray(weight)
    on_host = all(jax.typeof(x).sharding.mesh.empty for x in jax.tree.leaves(arrays))
    if on_host and mesh_axes(AxisType.Explicit, mesh):
        # Arrays of NumPy do not tell a program its devices, and Explicit axes need them.
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), inputs.specs)
        arrays = jax.device_put(arrays, shardings)
    operands = (state, arrays, weight)
    with _explained(axes):
        is_outside = not is_compiling()
        key = None
        if is_outside:
            key = _key_of((inputs, mesh, jax.tree.map(jax.typeof, operands)))
            if key in compiled:
                return compiled[key](*operands)
        run = _mapped(
            function,
            (state_specs(state, state_axis), inputs.specs, weights),
            (params, state),
            mesh,
            axis_name,
            check_vma=check_vma,
        )
        if is_outside:
            run = jax.jit(run)
        if key is not None:
            compiled[key] = run
        return run(*operands)


def _key_of(tree: PyTree) -> Any:
    """Returns a key of all leaves of a tree; None if a leaf has no hash."""
    leaves, treedef = jax.tree.flatten(tree)
    # With their types, because 1 == 1.0 == True.
    key = (treedef, tuple(leaves), tuple(map(type, leaves)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _mapped(
    function: Callable[..., Any],
    specs: tuple[PyTree, PyTree, PyTree],
    like: tuple[PyTree, PyTree],
    mesh: Any,
    axis_name: AxisName,
    *,
    check_vma: bool,
) -> Callable[..., Any]:
    """Maps a function of one replica over all replicas of a mesh, with all axes Auto around it.

    Args:
      function: As for `call_on_replicas`.
      specs: The PartitionSpecs of states, arrays and weights.
      like: The parameters and the state, whose types the results get.
      mesh: The mesh.
      axis_name: The axis or axes of the replicas.
      check_vma: As for `jax.shard_map`.
    """
    axes = axis_tuple(axis_name)
    shared = PartitionSpec()
    rows = PartitionSpec(axis_name)
    explicit = mesh_axes(AxisType.Explicit, mesh)
    single = replicas_on(mesh, axes) == 1 and mesh.size > 1
    if single:
        # XLA refuses an all-reduce of one replica if an array is sharded over another axis
        # ("Cross-partition allreduce must be in (partial) manual partitioning mode"). Under
        # `jax.vmap` an average over the replicas is a sum without a collective.
        mapped: Callable[..., Any] = only_replica(function, axes)
    else:
        mapped = jax.shard_map(
            function,
            mesh=None if explicit else mesh,  # of the context, where Explicit axes are Auto
            in_specs=specs,
            out_specs=(shared, rows, shared, specs[0]),
            axis_names=set(axes),
            check_vma=check_vma,
        )
    if explicit:
        # JAX before 0.12 gathers inputs and outputs of a `jax.shard_map` along further Explicit
        # axes, and no JAX reshards along Explicit axes by itself. So all axes are Auto around it.
        types = (shared, rows, *map(typed_specs, like))
        # Types name only Explicit axes, and the axes of the replicas may be Auto.
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, over_axes(spec, explicit)), types)
        mapped = jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=shardings)
    if not single:
        return mapped

    def in_mesh(*inputs: Any) -> Any:
        # The mesh of the context inside `jax.jit` is abstract already.
        with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
            return mapped(*inputs)

    return in_mesh


@contextlib.contextmanager
def _explained(axes: Sequence[str]) -> Iterator[None]:
    """Adds the note from `_NOTES` to an error of JAX, if one fits."""
    try:
        yield
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        for words, note in _NOTES.items():
            if re.search(words, str(error)):
                error.add_note(note.replace("{axes}", " or ".join(map(repr, axes))))
                break
        raise


def only_replica(function: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    """Maps a function of one replica over axes of length 1, so that it takes global arrays."""
    if not axes:
        return function
    mapped = function
    for name in axes:
        mapped = jax.vmap(mapped, in_axes=None, axis_name=name, axis_size=1)

    def run(*inputs: Any) -> Any:
        results = mapped(*inputs)
        # Each vmap has put an axis of length 1 in front.
        return jax.tree.map(lambda x: x.reshape(x.shape[len(axes) :]), results)

    return run


def axes_of_state(
    reducer: Any, params: PyTree, mesh: Any, axis_name: AxisName, *, check_vma: bool
) -> AxisName:
    """Finds the axes of the replicas along which a reducer's state differs.

    The state of a `Reducer` differs along the axes of the reducer. In a chain of an exact average
    along one axis and a compressed average along another, it differs along the second axis only.
    This is read from the types of the chain's results, because the chain itself does not say it.
    The types also show a transformation that leaves some gradients as they are, such as
    `optax.masked` of a reducer.

    Args:
      reducer: A transformation.
      params: The parameters: arrays, or other objects with ``shape`` and ``dtype``.
      mesh: The mesh.
      axis_name: All axes of the replicas.
      check_vma: True if the step runs with ``check_vma=True``, and so refuses a transformation that
        leaves gradients as they are.

    Raises:
      ValueError: If gradients or replicated leaves of the state differ along an axis.
    """
    names = axis_tuple(axis_name)
    if isinstance(reducer, Reducer) or (len(names) == 1 and check_vma):
        return axis_name

    state_specs(jax.eval_shape(reducer.init, params), axis_name)  # refuses optax.MultiSteps
    along: set[frozenset[str]] = set()
    apart: dict[str, list[str]] = {}  # replicated leaves that differ

    def note() -> None:
        # Not zeros_like, which would keep shardings of the user's mesh.
        zeros = jax.tree.map(lambda x: jnp.zeros(np.shape(x), x.dtype), params)
        means, state = reducer.update(as_local(zeros, axis_name), reducer.init(zeros), zeros)
        check_averaged(means, axis_name)
        along.update(map(varying, leaves_marked(state, PER_REPLICA, OWNER).values()))
        for name, leaf in leaves_marked(state, REPLICATED).items():
            if varying(leaf):
                apart[name] = sorted(varying(leaf))

    # The same mesh with Auto axes: Explicit ones would only take part in types that are not asked
    # for, and `jax.set_mesh` allows no mesh of another size inside of it.
    automatic = jax.sharding.AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names)
    mapped = jax.shard_map(note, in_specs=(), out_specs=PartitionSpec(), axis_names=set(names))
    with jax.sharding.use_abstract_mesh(automatic), _explained(names):
        jax.eval_shape(mapped)
    if apart or len(along) > 1:
        raise ValueError(
            "The state of `reducer` differs along several axes of the replicas: "
            f"{apart or sorted(map(sorted, along))}. Average exactly along the fast axis first, "
            "and after that compress, or accumulate, along the slow axis: optax.chain("
            'jaxcomp.allreduce(axis_name="fast"), jaxcomp.powersgd(axis_name="slow")).'
        )
    common = tuple(filter(frozenset().union(*along).__contains__, names))  # in the user's order
    if len(common) == 1:
        return common[0]
    return common or axis_name


def named_axis(reducer: Any, axis_name: AxisName | None) -> AxisName:
    """Returns the axis of the replicas.

    Raises:
      ValueError: If `reducer` is not a transformation, has no axis, or has another axis than
        `axis_name`.
    """
    if not (hasattr(reducer, "init") and hasattr(reducer, "update")):
        made = getattr(reducer, "__name__", None)
        hint = ""
        if callable(reducer) and made:
            hint = f": call it, {made}(axis_name=...)"
        raise ValueError(f"`reducer` must be a jaxcomp reducer, got {reducer!r}{hint}.")
    if axis_name is None:
        axis_name = getattr(reducer, "axis_name", None)
    if axis_name is None:
        raise ValueError(
            f"A {type(reducer).__name__} does not say along which axis it reduces. Pass a jaxcomp "
            "reducer; or, for a chain that begins with one, axis_name=."
        )
    check_axis_name(axis_name)
    own_axis = getattr(reducer, "axis_name", axis_name)
    if set(axis_tuple(own_axis)) != set(axis_tuple(axis_name)):
        raise ValueError(
            f"`axis_name` is {axis_name!r}, and the reducer averages along {own_axis!r}. Make the "
            "reducer with the axes of all replicas; or average exactly along the fast axis and "
            "then compress along the slow axis, as docs/meshes.md shows: optax.chain("
            'jaxcomp.allreduce(axis_name="fast"), jaxcomp.powersgd(axis_name="slow")).'
        )
    return axis_name
