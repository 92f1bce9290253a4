"""check passes right programs, and refuses what a reducer should have saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers import autoencoder, hlo
from tests.helpers.autoencoder import LAYOUTS, loss, new_params
from tests.helpers.classifier import grid, placed
from tests.helpers.runners import mesh_of, sharded

P = jax.P

parameters = functools.partial(autoencoder.parameters, width=256)
MESH = mesh_of(4)
PARAMS = parameters(MESH)
X = np.ones((8, 256), np.float32)


def compiled(step, *arguments):
    return jax.jit(step).lower(*arguments).compile()


def oracle_of(program):
    return sorted(hlo.collectives(program.as_text()))


def results_of(listed):
    results = []
    for collective in listed:
        results += hlo.results(collective)
    return sorted(results)


def test_every_collective_with_its_axes():
    kinds = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:8]}
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), **kinds)

    def step(x):
        rows = jax.lax.all_gather(jax.lax.psum(x, "slow"), "fast")
        both = jax.lax.psum(x, ("slow", "fast"))
        moved = jax.lax.ppermute(x, "fast", [(0, 1), (1, 0), (2, 2), (3, 3)])
        return rows.sum(0) + both + moved

    spec = P(("slow", "fast"))
    run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = placed(mesh, np.ones((8, 50), np.float32), spec)
    program = compiled(run, x)
    listed = jaxcomp.collectives(program)
    assert results_of(listed) == oracle_of(program)
    sent = {(collective.kind, collective.axes): collective.bytes for collective in listed}
    assert sent == {
        ("all-reduce", ("slow",)): 200,
        ("all-reduce", ("slow", "fast")): 200,
        ("collective-permute", ("fast",)): 200,
        ("all-gather", ("fast",)): 800,
    }
    (gathered,) = [collective for collective in listed if collective.kind == "all-gather"]
    assert gathered.as_all_reduce == 400
    assert str(gathered).startswith("all-gather of 800 bytes of f32 over ('fast',), for jit(")
    lines = str(listed).splitlines()
    assert lines[: len(listed)] == list(map(str, listed))
    assert "in all 1,000 bytes over ('fast',)" in lines[len(listed) :]
    with pytest.raises(ValueError, match=r"jax.jit\(step\).lower"):
        jaxcomp.collectives(jax.jit(step))


def test_a_program_without_a_mesh():
    nothing = jaxcomp.collectives(compiled(jnp.sin, 1.0))
    assert nothing == ()
    assert str(nothing) == "no collectives"
    with pytest.raises(ValueError, match="`mesh` is missing"):
        jaxcomp.check(compiled(jnp.sin, 1.0), NOW, new_params(256))


POWERSGD = functools.partial(jaxcomp.powersgd, axis_name="data")
REDUCERS = {
    "now": POWERSGD(1, start_step=0),
    "later": POWERSGD(1, start_step=5),
    "int8": POWERSGD(4, start_step=0, comm_dtype=jnp.int8),
    "int6 later": POWERSGD(4, start_step=5, comm_dtype="int6"),
    "quantized": jaxcomp.quantized_allreduce(axis_name="data"),
    "allreduce": jaxcomp.allreduce(axis_name="data"),
    # XLA's CPU backend makes float32 of it; a rehearsal there is not two reducers.
    "bfloat16": jaxcomp.allreduce(axis_name="data", comm_dtype=jnp.bfloat16),
    "factors in bfloat16": POWERSGD(1, start_step=0, comm_dtype=jnp.bfloat16),
}
NOW = REDUCERS["now"]
TOO_MUCH = r"sends [\d,]+ bytes over data, .* more are allowed \(allow=\)"


def checked(reducer, mesh, params, x, like=None):
    """Makes a right step, which passes."""
    run = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)
    program = compiled(run, run.init(params), params, x)
    listed = jaxcomp.check(program, reducer, like or params)
    assert results_of(listed) == oracle_of(program)
    return run


# For factors in integers a step beside another axis shows what passes, below.
IN_FLOATS = [name for name in REDUCERS if not name.startswith("int")]


@pytest.mark.parametrize("name", IN_FLOATS)
def test_what_a_reducer_sends_passes_and_twice_as_much_does_not(name):
    reducer = REDUCERS[name]
    checked(reducer, MESH, PARAMS, X)
    local = optax.stateless(lambda grads, params: jaxcomp.as_local(grads, "data"))
    again = optax.chain(reducer, local, reducer)
    run = jaxcomp.value_and_grad(loss, again, mesh=MESH, axis_name="data")
    with pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(compiled(run, run.init(PARAMS), PARAMS, X), reducer, PARAMS)


# Factors in integers take longest to compile: once in every step and once in a branch.
BESIDE = [("later", "tensor"), ("quantized", "fsdp"), ("bfloat16", "replicated")]
BESIDE += [("int6 later", "fsdp")]


@pytest.mark.parametrize(("name", "layout"), BESIDE)
def test_a_right_step_passes_beside_another_axis(name, layout):
    mesh = grid(2, model=2)
    checked(REDUCERS[name], mesh, parameters(mesh, layout), X)


# How much each reducer may send is shown above by twice as much; for layouts a pmean shows it.
AVERAGED = [("now", layout, jnp.float32) for layout in LAYOUTS]
AVERAGED += [("allreduce", "fsdp", jnp.bfloat16), ("bfloat16", "fsdp", jnp.bfloat16)]


@pytest.mark.parametrize(("name", "layout", "dtype"), AVERAGED)
def test_a_pmean_beside_another_axis_is_refused(name, layout, dtype):
    mesh = grid(2, model=2)
    reducer = REDUCERS[name]
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), parameters(mesh, layout))
    x = jnp.asarray(X, dtype)
    run = checked(reducer, mesh, params, x)

    def averaged(params, x):
        grads = jax.grad(loss)(jaxcomp.as_local(params, "data"), x)
        # XLA's CPU backend aborts at a bfloat16 all-reduce beside an automatic axis.
        return jax.lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), "data")

    pmean = sharded(mesh, averaged, (P(), P("data")), P(), axis_names={"data"})

    def both(state, params, x):
        return run(state, params, x), pmean(params, x)

    with pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(compiled(both, run.init(params), params, x), reducer, params)


def test_shapes_alone_do_beside_explicit_axes_too():
    mesh = grid(2, "explicit", model=2)
    shapes = jax.eval_shape(lambda: new_params(256))
    checked(NOW, mesh, parameters(mesh), X, like=shapes)


@pytest.mark.parametrize(("name", "behind"), [("later", False), ("now", True)])
def test_what_is_averaged_before_the_reducer_is_refused(name, behind):
    """By a pmean within the step, or by the compiler, in a jit loop as it was."""
    reducer = REDUCERS[name]
    state = jaxcomp.shard_state(reducer.init(PARAMS), MESH, "data")
    specs = jaxcomp.state_specs(state, "data")

    def update(grads, state):
        return reducer.update(jaxcomp.as_local(grads, "data"), state)

    def left_in(params, state, x):
        grads = jaxcomp.local_value_and_grad(loss, "data")(params, x)[1]
        return update(jax.lax.pmean(grads, "data"), state)

    def in_a_jit_loop(params, state, x):
        mapped = sharded(MESH, update, (P(), specs), (P(), specs))
        return mapped(jax.grad(loss)(params, x), state)

    within = sharded(MESH, left_in, (P(), specs, P("data")), (P(), specs))
    step = in_a_jit_loop if behind else within
    program = compiled(step, PARAMS, state, placed(MESH, X, P("data")))
    with pytest.raises(ValueError, match=TOO_MUCH) as error:
        jaxcomp.check(program, reducer, PARAMS)
    message = str(error.value)
    assert "\n  all-reduce of 1,050,624 bytes of f32 over ('data',), for jit(" in message
    assert "steps=" not in message  # it is not the same collectives several times


def test_a_step_without_its_reducer_is_refused():
    x = placed(MESH, X, P("data"))
    local = compiled(lambda params, x: jnp.tanh(x @ params["up"]), PARAMS, x)
    with pytest.raises(ValueError, match=r"sends 0 bytes over data, .* with powersgd\(.*\) sends "):
        jaxcomp.check(local, NOW, PARAMS)
    with pytest.raises(ValueError, match=r"`reducer` must be a jaxcomp reducer, got Gradient"):
        jaxcomp.check(local, optax.chain(NOW), PARAMS)
    rounds = jaxcomp.local_sgd(optax.sgd(0.1), sync_every=2, axis_name="data")
    with pytest.raises(ValueError, match=r"got Transformation\. .* For local SGD pass the reducer"):
        jaxcomp.check(local, rounds, PARAMS)
    with pytest.raises(ValueError, match=r"must be a compiled program.*\.lower\(.*\)\.compile\(\)"):
        jaxcomp.check(jax.jit(jnp.sin), NOW, PARAMS)
    with pytest.raises(ValueError, match="`params` must be a tree of parameters alone"):
        jaxcomp.check(local, NOW, NOW.init(PARAMS))
    with pytest.raises(ValueError, match="The mesh has no axis 'other'"):
        jaxcomp.check(local, jaxcomp.allreduce(axis_name="other"), PARAMS)
    with pytest.raises(ValueError, match="`mesh` must be a mesh"):
        jaxcomp.check(local, NOW, PARAMS, mesh=(4,))
    for bytes_allowed in (-1, "1 kB", float("nan")):
        with pytest.raises(ValueError, match="`allow` must be a finite number, at least 0"):
            jaxcomp.check(local, NOW, PARAMS, allow=bytes_allowed)


# Several steps or several networks in one program.


def descended(params, grads):
    return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads)


def one_step(run, carry, *data):
    """Takes a step of SGD: ``(state, params)`` to the same."""
    state, params = carry
    (_, grads), state = run(state, params, *data)
    return state, descended(params, grads)


def steps_in_a_scan(run, length, unroll=1):
    """Makes a program of so many steps, each with a batch of another scale."""

    def several(state, params, x, *data):
        def one(carry, scale):
            return one_step(run, carry, scale * x, *data), None

        scales = jnp.arange(1.0, 1 + length)
        return jax.lax.scan(one, (state, params), scales, unroll=unroll)[0]

    return several


def one_after_the_other(run):
    def several(state, params, x, *data):
        return one_step(run, one_step(run, (state, params), x, *data), 2 * x, *data)

    return several


def epochs(run):
    """Takes two epochs of three steps, with momentum and a batch for each."""

    def several(state, params, x, *data):
        def one(carry, batch):
            state, params, momentum = carry
            (value, grads), state = run(state, params, batch, *data)
            momentum = jax.tree.map(lambda old, grad: 0.9 * old + grad, momentum, grads)
            return (state, descended(params, momentum), momentum), value

        def epoch(carry, _):
            return jax.lax.scan(one, carry, jnp.stack([x, 2 * x, 3 * x]))

        momentum = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(epoch, (state, params, momentum), length=2)

    return several


def counted_loop(run):
    def several(state, params, *data):
        def one(_, carry):
            return one_step(run, carry, *data)

        return jax.lax.fori_loop(0, 7, one, (state, params))

    return several


def scanned(length, unroll=1):
    return functools.partial(steps_in_a_scan, length=length, unroll=unroll)


# Every kind of loop with one reducer, and every kind of reducer in one loop.
LOOPS = {
    "scan": (scanned(10), 10, "now"),
    "exact steps first": (scanned(10), 10, "later"),
    "factors in integers": (scanned(10), 10, "int8"),
    "epochs": (epochs, 6, "now"),
    "counted loop": (counted_loop, 7, "now"),
    "unrolled in part": (scanned(5, unroll=2), 5, "now"),
    "unrolled and checkpointed": (scanned(3, unroll=True), 3, "now"),
    "one after the other": (one_after_the_other, 2, "now"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_steps_are_counted_also_beside_constants_as_large_as_a_parameter(name):
    """As FedProx' start, a target network or a batch are."""
    loop, steps, reducer = LOOPS[name]
    reducer = REDUCERS[reducer]

    def distance(params, x, aside):
        return loss(params, x) + jnp.mean((params["up"] - aside["up"]) ** 2)

    if "checkpointed" in name:
        distance = jax.checkpoint(distance)
    run = jaxcomp.value_and_grad(distance, reducer, mesh=MESH, batch_specs=(P("data"), P()))
    batch = np.ones((256, 256), np.float32)  # as large as a parameter, too
    program = compiled(loop(run), run.init(PARAMS), PARAMS, batch, parameters(MESH))
    jaxcomp.check(program, reducer, PARAMS)
    jaxcomp.check(program, reducer, PARAMS, steps=steps)
    with pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(program, reducer, PARAMS, steps=steps // 2)
    with pytest.raises(ValueError, match="bytes over data, "):
        jaxcomp.check(program, reducer, PARAMS, steps=3 * steps)


def test_a_round_of_local_steps_sends_what_its_reducer_does():

    def step(params, state, x):
        return descended(params, jax.grad(loss)(params, x)), state, None

    for reducer in (NOW, None):
        options = {"axis_name": "data", "mesh": MESH, "reducer": reducer}
        run = jaxcomp.local_sgd_round(step, sync_every=4, **options)
        program = compiled(run, PARAMS, run.init(PARAMS, ()), np.ones((4, 8, 256), np.float32))
        jaxcomp.check(program, reducer or jaxcomp.allreduce(axis_name="data"), PARAMS)


def test_a_pmean_in_a_loop_of_steps_is_refused():
    run = jaxcomp.value_and_grad(loss, NOW, mesh=MESH)
    mean = sharded(MESH, lambda g: jax.lax.pmean(jaxcomp.as_local(g, "data"), "data"), P(), P())

    def averaged(*arguments):
        (value, grads), state = run(*arguments)
        return (value, mean(grads)), state

    program = compiled(steps_in_a_scan(averaged, 10), run.init(PARAMS), PARAMS, X)
    with pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(program, NOW, PARAMS)


def of_micro_batches(params, x):
    def one(total, rows):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, rows[None])), None

    total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x)
    return loss(params, x), total


def by_hand(params, x):
    y = x @ params["w"]
    return jnp.mean(y**2), {"w": 2.0 / y.size * (x.T @ y)}


@pytest.mark.parametrize(
    ("gradients", "params"),
    [(of_micro_batches, PARAMS), (by_hand, {"w": PARAMS["up"]})],
    ids=["micro-batches", "by hand"],
)
def test_any_gradients_in_a_loop_of_steps_pass(gradients, params):
    run = jaxcomp.data_parallel(gradients, NOW, mesh=MESH)
    program = compiled(steps_in_a_scan(run, 5), run.init(params), params, X)
    jaxcomp.check(program, NOW, params)


def test_the_batches_of_an_evaluation_are_no_steps():
    params = {"w": PARAMS["up"]}
    run = jaxcomp.data_parallel(by_hand, NOW, mesh=MESH)
    steps = steps_in_a_scan(run, 3)
    mean = sharded(MESH, lambda x: jax.lax.pmean(x.mean(), "data"), P("data"), P())

    def evaluated(state, params, x):
        state, params = steps(state, params, x)
        scales = jnp.arange(9.0)
        losses = jax.lax.map(lambda scale: mean(scale * (x @ params["w"])), scales)
        return state, params, losses

    jaxcomp.check(compiled(evaluated, run.init(params), params, X), NOW, params)


def test_steps_are_counted_beside_another_axis():
    mesh = grid(2, model=2)
    params = parameters(mesh, "fsdp")
    run = jaxcomp.value_and_grad(loss, REDUCERS["later"], mesh=mesh)
    program = compiled(steps_in_a_scan(run, 6), run.init(params), params, X)
    jaxcomp.check(program, REDUCERS["later"], params)


@pytest.mark.parametrize("unroll", [1, True])
def test_micro_batches_are_no_steps_unrolled_or_not(unroll):
    """Nor where the loop around them makes steps."""
    run = jaxcomp.value_and_grad(loss, NOW, mesh=MESH)

    def micro_batches(state, params, x):
        def one(carry, scale):
            state, total = carry
            (_, grads), state = run(state, params, scale * x)
            return (state, jax.tree.map(jnp.add, total, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        scales = jnp.arange(1.0, 4.0)
        (state, total), _ = jax.lax.scan(one, (state, zeros), scales, unroll=unroll)
        return (0.0, total), state

    state = run.init(PARAMS)
    with pytest.raises(ValueError, match=r"3 times as much. .* micro-batch.* pass steps=3"):
        jaxcomp.check(compiled(micro_batches, state, PARAMS, X), NOW, PARAMS)
    nested = compiled(steps_in_a_scan(micro_batches, 5), state, PARAMS, X)
    with pytest.raises(ValueError, match="one call takes 15 training steps, pass steps=15"):
        jaxcomp.check(nested, NOW, PARAMS)
    jaxcomp.check(nested, NOW, PARAMS, steps=15)


NETWORKS = [(("now", "now"), 1), (("now", "allreduce"), 5)]


@pytest.mark.parametrize(("names", "critic_steps"), NETWORKS)
def test_several_networks_in_one_program(names, critic_steps):
    """Takes several steps of the first for one of the second, as a critic and its generator do."""
    critic, generator = networks = PARAMS, autoencoder.parameters(MESH, width=128)
    reducers = [REDUCERS[name] for name in names]
    runs = [jaxcomp.value_and_grad(loss, reducer, mesh=MESH) for reducer in reducers]

    def step(states, networks, x):
        first, second = zip(states, networks, strict=True)
        first = steps_in_a_scan(runs[0], critic_steps)(*first, x)
        return tuple(zip(first, one_step(runs[1], second, x[:, :128]), strict=True))

    def three(states, networks, x):
        one = lambda carry, _: (step(*carry, x), None)  # noqa: E731
        return jax.lax.scan(one, (states, networks), length=3)[0]

    arguments = (runs[0].init(critic), runs[1].init(generator)), networks, X
    program = compiled(step, *arguments)
    jaxcomp.check(program, tuple(reducers), list(networks), steps=(critic_steps, 1))
    with pytest.raises(ValueError, match="pass lists of reducers and parameters"):
        jaxcomp.check(program, reducers[0], critic, steps=critic_steps, allow=4)
    jaxcomp.check(compiled(three, *arguments), reducers, networks)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_compressed_average_behind_an_exact_one(kind):
    """Sends whole factors, where beside an automatic axis a device sends its share."""
    fast = jaxcomp.allreduce(axis_name="fast")
    slow = jaxcomp.powersgd(16, axis_name="slow", start_step=0)
    kinds = {"axis_types": (kind,) * 2, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), ("slow", "fast"), **kinds)
    local = optax.stateless(lambda grads, params: jaxcomp.as_local(grads, "slow"))

    def step_of(*links):
        chain = optax.chain(*links)
        run = jaxcomp.value_and_grad(loss, chain, mesh=mesh, axis_name=("slow", "fast"))
        return compiled(run, run.init(params), params, X)

    params = jax.device_get(PARAMS)
    right = step_of(fast, slow)
    jaxcomp.check(right, slow, params)
    jaxcomp.check(right, fast, params)
    jaxcomp.check(right, [fast, slow], [params, params])
    # A little too much beside an automatic axis, and far too much beside an explicit one.
    exact = jaxcomp.allreduce(axis_name="slow")
    wrong = (slow, local, slow) if kind == AxisType.Auto else (exact,)
    with pytest.raises(ValueError, match=r"sends [\d,]+ bytes over slow, but"):
        jaxcomp.check(step_of(fast, *wrong), slow, params)


def test_lists_that_do_not_belong_together_are_refused():
    program = compiled(jnp.sin, 1.0)
    with pytest.raises(ValueError, match="`mesh` must be a mesh"):
        jaxcomp.collectives(program, mesh="data")
    with pytest.raises(ValueError, match=r"is a list of 2, .* params of type dict"):
        jaxcomp.check(program, [NOW, NOW], new_params())
    with pytest.raises(ValueError, match="is a list of 2, so `params` must be a list"):
        jaxcomp.check(program, [NOW, NOW], [new_params()])
    with pytest.raises(ValueError, match=r"is a list of 2, .* steps=\[1\]"):
        jaxcomp.check(program, [NOW, NOW], [new_params(), new_params()], steps=[1])
    for steps in (0, 2.0, [2.0]):
        with pytest.raises(ValueError, match="`steps` must be a positive integer"):
            jaxcomp.check(program, NOW, new_params(), steps=steps)


def test_axes_that_the_program_does_not_average_over_are_not_tried(caplog):
    shape = {"devices": jax.devices()[:8], "axis_types": (AxisType.Auto,) * 3}
    mesh = jax.make_mesh((2, 2, 2), ("data", "rows", "columns"), **shape)
    params = jax.device_get(PARAMS)
    exact = jaxcomp.value_and_grad(loss, jaxcomp.allreduce(axis_name="data"), mesh=mesh)
    program = compiled(exact, (), params, X)
    caplog.clear()
    with jax.log_compiles(), pytest.raises(ValueError, match=TOO_MUCH):
        jaxcomp.check(program, NOW, params, mesh=mesh)
    assert caplog.text.count("Finished XLA compilation") == 1
