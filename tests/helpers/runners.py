"""Runs an Optax transformation on several replicas under each of JAX's three mappings.

One step is compiled and called for every step; each of these runs also asserts that its state keeps
structure, shapes and dtypes, so that one compilation serves every step.
"""

import jax
import numpy as np
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.leaves import zeros_of_one
from tests.helpers.xla import optimised as as_users_get_it

MAPPINGS = ("vmap", "pmap", "shard_map")
AXIS, WHOLE = "data", jax.P()


def mesh_of(n, axis=AXIS):
    return jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def sharded(mesh, function, in_specs, out_specs, **options):
    """Returns a jitted `jax.shard_map` over a mesh, or over AXIS of so many devices."""
    if isinstance(mesh, int):
        mesh = mesh_of(mesh)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return jax.jit(mapped)


def first(tree):
    """Takes this replica's entry of arrays with a leading axis of length 1."""
    return jax.tree.map(lambda x: x[0], tree)


def stack(tree, n):
    """Returns what a script gets from flax.jax_utils.replicate."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (n, *np.shape(x))), jax.device_get(tree))


def spread(tree, n):
    """Places arrays ``(n, ...)`` as the outputs of pmap are, one entry on each device."""
    return jax.device_put(tree, jax.NamedSharding(mesh_of(n), jax.P(AXIS)))


def steps_of(grads):
    """Splits a tree of ``(n, steps, *shape)`` into one of ``(n, *shape)`` for each step."""
    grads = jax.device_get(grads)
    count = jax.tree.leaves(grads)[0].shape[1]

    def step(index):
        return jax.tree.map(lambda g: np.asarray(g[:, index]), grads)

    return [step(index) for index in range(count)]


def simulate(mapping, tx, grads, state=None, params=None, *, optimised=False, **extra):
    """Feeds gradients ``(n, steps, *shape)`` to `tx` over AXIS, in one program compiled for a step.

    It begins with a consolidated state, by default the initial one, and may be compiled as for a
    user. Outputs ``(steps, *shape)`` are asserted to be equal on all replicas, under shard_map by
    check_vma=True; they come in NumPy, with the state, of whose leaves those that are per-replica
    are ``(n, *shape)``.
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
    """Places a consolidated state as a step would; returns it, and its specs."""
    if mapping == "shard_map":
        return jaxcomp.shard_state(state, mesh_of(n), AXIS), jaxcomp.state_specs(state, AXIS)
    state = stack(state, n)
    if mapping == "pmap":
        state = spread(state, n)
    return state, None


def _replicated(x):
    """Takes one of the replicas' entries, which must be equal."""
    np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    return x[0]


def types_of(tree):
    """Returns structure, shapes and dtypes, to compare."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), str(jax.dtypes.result_type(x))) for x in leaves)


_programs = {}


def forget_programs():
    _programs.clear()


def _compiled(mapping, tx, n, specs, arguments, optimised):
    """Returns the executable of one step, the same for the same transformation and shapes."""
    key = (mapping, tx, n, optimised, types_of(arguments))
    if key not in _programs:
        program = _mapped(mapping, tx, n, specs)
        if optimised:
            program = as_users_get_it(program.lower(*arguments))
        elif mapping != "pmap":  # whose executables want the arguments of the shard_map inside
            program = program.lower(*arguments).compile()
        _programs[key] = program
    return _programs[key]


def _mapped(mapping, tx, n, specs):
    def step(grads, state, params, extra):
        return tx.update(grads, state, params, **extra)

    return over_replicas(mapping, step, n, specs, shared=2)


def over_replicas(mapping, step, n, specs, shared=0, out=WHOLE):
    """Maps a step of one replica, from `own` and a state to outputs and a state, over all.

    What is a replica's own has a leading axis of them, and so have outputs, but for those that are
    `WHOLE` under shard_map, where check_vma has proved that they are the same everywhere. Behind
    `own` and the state come so many `shared` arguments.
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
    """Updates each replica once, from its initial state: gradients ``(n, *shape)`` to averages."""

    def update(grads):
        return tx.update(grads, tx.init(grads), params, **extra)[0]

    return jax.jit(jax.vmap(update, axis_name=AXIS))(grads)


def lower_update(tx, shapes, n, platforms=None, **extra):
    """Lowers one update of `n` replicas for gradients ``(n, *shape)`` that nobody has to make."""
    shapes = jax.eval_shape(lambda: shapes)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), shapes)
    state = jax.eval_shape(tx.init, shapes)
    mapped = _mapped("shard_map", tx, n, jaxcomp.state_specs(state, AXIS))
    traced = mapped.trace(grads, placed(state, n), None, extra)
    return traced.lower(lowering_platforms=platforms)


def placed(state, n):
    """Returns the shapes of a state after shard_state."""
    return jax.eval_shape(lambda state: jaxcomp.stack_replicas(state, n), state)
