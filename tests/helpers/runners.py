"""Runs an Optax transformation on several replicas under each of JAX's three mappings.

One compiled step is called for every step. Each run also asserts that the state keeps its
structure, shapes and dtypes, so that one compilation is enough for all steps.
"""

import jax
import numpy as np
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.leaves import zeros_of_one
from tests.helpers.xla import optimised as as_users_get_it

MAPPINGS = ("vmap", "pmap", "shard_map")
AXIS = "data"
WHOLE = jax.P()


def mesh_of(n, axis=AXIS):
    return jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def sharded(mesh, function, in_specs, out_specs, **options):
    """Returns a jitted `jax.shard_map` over a mesh, or over `mesh` devices along AXIS."""
    if isinstance(mesh, int):
        mesh = mesh_of(mesh)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return jax.jit(mapped)


def first(tree):
    """Returns the only entry of arrays whose leading axis has length 1."""
    return jax.tree.map(lambda x: x[0], tree)


def stack(tree, n):
    """Repeats each leaf `n` times along a new leading axis, as flax.jax_utils.replicate does."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (n, *np.shape(x))), jax.device_get(tree))


def spread(tree, n):
    """Places one entry of arrays ``(n, ...)`` on each device, as pmap places its outputs."""
    return jax.device_put(tree, jax.NamedSharding(mesh_of(n), jax.P(AXIS)))


def steps_of(grads):
    """Splits a tree of ``(n, steps, *shape)`` arrays into one tree of ``(n, *shape)`` per step."""
    grads = jax.device_get(grads)
    count = jax.tree.leaves(grads)[0].shape[1]

    def step(index):
        return jax.tree.map(lambda g: np.asarray(g[:, index]), grads)

    return [step(index) for index in range(count)]


def simulate(mapping, tx, grads, state=None, params=None, *, optimised=False, **extra):
    """Updates `tx` with gradients ``(n, steps, *shape)`` over AXIS, with one compiled step.

    The run begins with a consolidated state, by default the initial state. `optimised` compiles as
    for a user. The outputs are asserted to be equal on all replicas, under shard_map by
    check_vma=True.

    Returns the outputs ``(steps, *shape)`` and the state as NumPy arrays. Per-replica leaves of the
    state are ``(n, *shape)``.
    """
    n = jax.tree.leaves(grads)[0].shape[0]
    if state is None:
        state = tx.init(zeros_of_one(grads))
    axes = jaxcomp.state_axes(state)
    state, specs = start(mapping, state, n)
    outputs = []
    for gradients in steps_of(grads):
        arguments = (gradients, state, params, extra)
        before = types_of(state)
        output, state = _compiled(mapping, tx, n, specs, arguments, optimised)(*arguments)
        assert types_of(state) == before
        outputs.append(jax.device_get(output))
    outputs = jax.tree.map(lambda *steps: np.stack(steps), *outputs)
    state = jax.device_get(state)
    if mapping == "shard_map":
        return outputs, state
    outputs = jax.tree.map(lambda x: _replicated(x.swapaxes(0, 1)), outputs)

    def without_copies(axis, leaf):
        return leaf if axis == 0 else _replicated(leaf)

    return outputs, jax.tree.map(without_copies, axes, state, is_leaf=lambda x: x is None)


def start(mapping, state, n):
    """Places a consolidated state as a step expects it; returns the state and its specs."""
    if mapping == "shard_map":
        return jaxcomp.shard_state(state, mesh_of(n), AXIS), jaxcomp.state_specs(state, AXIS)
    state = stack(state, n)
    if mapping == "pmap":
        state = spread(state, n)
    return state, None


def _replicated(x):
    """Returns the first replica's entry; asserts that all replicas' entries are equal."""
    np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    return x[0]


def types_of(tree):
    """Returns a tree's structure, shapes and dtypes, for comparison."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), str(jax.dtypes.result_type(x))) for x in leaves)


_programs = {}


def forget_programs():
    _programs.clear()


def _compiled(mapping, tx, n, specs, arguments, optimised):
    """Returns the compiled step; equal transformations and shapes share one."""
    key = (mapping, tx, n, optimised, types_of(arguments))
    if key not in _programs:
        program = _mapped(mapping, tx, n, specs)
        if optimised:
            program = as_users_get_it(program.lower(*arguments))
        elif mapping != "pmap":  # pmap's executables need the arguments of the shard_map inside
            program = program.lower(*arguments).compile()
        _programs[key] = program
    return _programs[key]


def _mapped(mapping, tx, n, specs):
    def step(grads, state, params, extra):
        return tx.update(grads, state, params, **extra)

    return over_replicas(mapping, step, n, specs, shared=2)


def over_replicas(mapping, step, n, specs, shared=0, out=WHOLE):
    """Maps one replica's step, ``(own, state, *shared) -> (outputs, state)``, over all replicas.

    `own` and the outputs have a leading axis of replicas. Under shard_map, outputs whose spec is
    `WHOLE` have none, because check_vma has proved that they are equal on all replicas. `shared` is
    the number of arguments after `own` and the state, which are the same for all replicas.
    """
    over = {"axis_name": AXIS, "in_axes": (0, 0, *[None] * shared)}
    if mapping == "vmap":
        return jax.jit(jax.vmap(step, **over))
    if mapping == "pmap":
        return jax.pmap(step, devices=jax.devices()[:n], **over)

    def with_axis(spec, outputs):
        if spec == WHOLE:
            return outputs
        return jax.tree.map(lambda x: x[None], outputs)

    def local(own, state, *rest):
        outputs, state = step(first(own), state, *rest)
        return jax.tree.map(with_axis, out, outputs), state

    return sharded(n, local, (jax.P(AXIS), specs, *[WHOLE] * shared), (out, specs))


def updated(tx, grads, params=None, **extra):
    """Returns the outputs of one update from the initial state, for gradients ``(n, *shape)``."""

    def update(grads):
        return tx.update(grads, tx.init(grads), params, **extra)[0]

    return jax.jit(jax.vmap(update, axis_name=AXIS))(grads)


def lower_update(tx, shapes, n, platforms=None, **extra):
    """Lowers one update of `n` replicas from the shapes of the parameters, without gradients."""
    shapes = jax.eval_shape(lambda: shapes)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), shapes)
    state = jax.eval_shape(tx.init, shapes)
    mapped = _mapped("shard_map", tx, n, jaxcomp.state_specs(state, AXIS))
    traced = mapped.trace(grads, placed(state, n), None, extra)
    return traced.lower(lowering_platforms=platforms)


def placed(state, n):
    """Returns the shapes of a state after `jaxcomp.shard_state`."""
    return jax.eval_shape(lambda state: jaxcomp.stack_replicas(state, n), state)
