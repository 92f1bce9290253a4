"""jaxcomp.value_and_grad in a jit loop: the losses of the shard_map form, and nothing else sent."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxcomp
from jaxcomp._wire.hlo import replica_groups

P = jax.P
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
LAYOUTS = {
    "tensor": {"up": P(None, "model"), "down": P("model"), "bias": P("model")},
    "fsdp": {"up": P("model"), "down": P("model"), "bias": P("model")},
    "replicated": {},
}
COLLECTIVE = re.compile(
    r"^.* = (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\(.*$",
    re.MULTILINE,
)


def grid(kind="auto", data=4, model=1):
    axes = {"data": data} | ({"model": model} if model > 1 else {})
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(KINDS[kind],) * len(axes),
        devices=jax.devices()[: data * model],
    )


def parameters(mesh, layout="replicated"):
    rng = np.random.default_rng(0)
    values = {
        "up": rng.normal(size=(32, 64)) / 6,
        "down": rng.normal(size=(64, 32)) / 8,
        "bias": np.zeros(64),
    }
    spec = LAYOUTS[layout]
    return {
        name: jax.device_put(x.astype(np.float32), NamedSharding(mesh, spec.get(name, P())))
        for name, x in values.items()
    }


def batches(mesh, steps=6, size=16):
    x = np.random.default_rng(1).normal(size=(steps, size, 32)).astype(np.float32)
    return [jax.device_put(row, NamedSharding(mesh, P("data"))) for row in x]


def loss(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - x) ** 2)


def typed_loss(params, x):
    """The same for a second axis that is Explicit: whole weights of FSDP, a sum after `down`."""
    if jax.typeof(params["up"]).sharding.spec[0]:
        params = {k: jax.sharding.reshard(w, P(*[None] * w.ndim)) for k, w in params.items()}
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return jnp.mean((jnp.einsum("bi,io->bo", hidden, params["down"], out_sharding=P()) - x) ** 2)


def jit_loop(value_and_grad, params, data):
    """Losses, parameters, the reducer's state and what compiles the step to be looked at."""
    optimizer = optax.sgd(0.3, momentum=0.9)
    state, opt_state = value_and_grad.init(params), optimizer.init(params)

    @jax.jit
    def step(params, opt_state, state, x):
        (value, grads), state = value_and_grad(state, params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, value

    first, losses = (params, opt_state, state, data[0]), []
    for x in data:
        params, opt_state, state, value = step(params, opt_state, state, x)
        losses.append(float(value))
    return losses, params, state, lambda: step.lower(*first).compile()


@functools.cache
def shard_map_losses(name):
    """The same training as one shard_map around the whole step, on an Auto mesh."""
    mesh = grid()
    params, data = parameters(mesh), batches(mesh)
    tx = optax.chain(REDUCERS[name](), optax.sgd(0.3, momentum=0.9))
    state = tx.init(params)
    specs = jaxcomp.state_specs(state, "data")
    state = jaxcomp.shard_state(state, mesh, "data")

    def step(params, state, x):
        value, grads = jaxcomp.local_value_and_grad(loss, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
        )
    )
    losses = []
    for x in data:
        params, state, value = step(params, state, x)
        losses.append(float(value))
    return losses


@functools.cache
def trained(kind):
    """Parameters and PowerSGD's state after the loop, and the gradients that come next."""
    mesh = grid(kind)
    value_and_grad = jaxcomp.value_and_grad(loss, REDUCERS["powersgd"](), mesh=mesh)
    _, params, state, _ = jit_loop(value_and_grad, parameters(mesh), batches(mesh))
    (_, grads), _ = jax.jit(value_and_grad)(state, params, batches(mesh)[5])
    return params, state, grads


def crossing(compiled, model):
    """Bytes of every collective that joins devices of different replicas, largest first."""
    found = []
    for match in COLLECTIVE.finditer(compiled.as_text()):
        groups = replica_groups(match[0])
        if any(a // model != b // model for group in groups for a in group for b in group):
            shapes = re.findall(r"(?:f32|s8|s32)\[([\d,]*)\]", match[1])
            found.append(4 * sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes))
    return sorted(found, reverse=True)


REDUCERS = {
    "powersgd": lambda: jaxcomp.powersgd(2, axis_name="data", start_step=0),
    "powersgd later": lambda: jaxcomp.powersgd(2, axis_name="data", start_step=3),
    "acp_sgd": lambda: jaxcomp.acp_sgd(2, axis_name="data", start_step=0),
    "int8": lambda: jaxcomp.powersgd(2, axis_name="data", start_step=0, comm_dtype=jnp.int8),
    "quantized": lambda: jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name="data")),
    "allreduce": lambda: jaxcomp.allreduce(axis_name="data"),
    "batched": lambda: jaxcomp.batched_powersgd(2, axis_name="data", start_step=1),
    "switch": lambda: jaxcomp.switch_at(
        2,
        jaxcomp.allreduce(axis_name="data"),
        jaxcomp.powersgd(2, axis_name="data", start_step=0),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REDUCERS)
def test_losses_are_those_of_the_shard_map_form(name, kind):
    mesh = grid(kind)
    value_and_grad = jaxcomp.value_and_grad(loss, REDUCERS[name](), mesh=mesh)
    losses, _, _, _ = jit_loop(value_and_grad, parameters(mesh), batches(mesh))
    np.testing.assert_allclose(losses, shard_map_losses(name), rtol=1e-6)
    assert losses[-1] < losses[0] or name == "acp_sgd"  # too few steps for half iterations


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_has_two_thin_all_reduces_over_the_data_axis(kind):
    mesh = grid(kind)
    params = parameters(mesh)
    value_and_grad = jaxcomp.value_and_grad(loss, REDUCERS["powersgd"](), mesh=mesh)
    *_, compiled = jit_loop(value_and_grad, params, batches(mesh, 1))
    first, second, *rest = crossing(compiled(), 1)
    stats = jaxcomp.powersgd(2, axis_name="data").bytes(params)
    assert sum(rest) <= 1024
    assert abs(first + second + sum(rest) - stats.bytes_after) <= 8  # the loss may ride along


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["tensor", "fsdp"])
def test_beside_sharded_weights_only_thin_factors_cross_the_data_axis(layout, kind):
    mesh = grid(kind, data=4, model=2)
    fun = typed_loss if kind == "explicit" else loss
    value_and_grad = jaxcomp.value_and_grad(fun, REDUCERS["powersgd"](), mesh=mesh)
    params = parameters(mesh, layout)
    losses, after, state, compiled = jit_loop(value_and_grad, params, batches(mesh))
    np.testing.assert_allclose(losses, shard_map_losses("powersgd"), rtol=1e-5)
    # Each device of a replica sends its share of the factors.
    first, second, *rest = crossing(compiled(), 2)
    assert first + second <= jaxcomp.powersgd(2, axis_name="data").bytes(params).bytes_after / 2 + 8
    assert sum(rest) <= 64
    for name, leaf in state.residual.items():
        if name != "bias":
            assert leaf.sharding.spec[0] == "data"
            assert leaf.addressable_shards[0].data.size == params[name].size // 2
            assert after[name].sharding.is_equivalent_to(params[name].sharding, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mesh_may_come_from_the_context(kind):
    mesh = grid(kind, data=4, model=2)
    fun = typed_loss if kind == "explicit" else loss
    given = jaxcomp.value_and_grad(fun, REDUCERS["powersgd later"](), mesh=mesh)
    expected = jit_loop(given, parameters(mesh, "tensor"), batches(mesh))[0]
    with jax.set_mesh(mesh):
        found = jaxcomp.value_and_grad(fun, REDUCERS["powersgd later"]())
        losses = jit_loop(found, parameters(mesh, "tensor"), batches(mesh))[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_init_inside_jit_gives_the_same_state(kind):
    mesh = grid(kind)
    value_and_grad = jaxcomp.value_and_grad(loss, REDUCERS["powersgd"](), mesh=mesh)
    params = parameters(mesh)
    outside, inside = value_and_grad.init(params), jax.jit(value_and_grad.init)(params)
    jax.tree.map(np.testing.assert_array_equal, outside, inside)
    here, there = inside.residual["up"], outside.residual["up"]
    assert here.sharding.is_equivalent_to(there.sharding, here.ndim)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_random_key_is_the_same_for_all_and_no_batch_of_two(make):
    mesh = grid(data=2)

    def fun(params, x, key, *, other):
        own = jax.random.fold_in(key, jax.lax.axis_index("data"))
        aux = [jax.random.bits(seed) for seed in (key, other, own)]
        return loss(params, x), aux

    reducer, params, x = REDUCERS["allreduce"](), parameters(mesh), batches(mesh)[0]
    value_and_grad = jaxcomp.value_and_grad(fun, reducer, mesh=mesh, has_aux=True, aux="stack")
    state = value_and_grad.init(params)
    ((_, aux), _), _ = jax.jit(value_and_grad)(state, params, x, make(5), other=make(6))
    (a, b), (c, d), (e, f) = map(np.asarray, aux)
    assert a == b == jax.random.bits(make(5))
    assert c == d == jax.random.bits(make(6))
    assert e != f


def test_several_argnums_and_batch_specs():
    mesh = grid()
    params, x = parameters(mesh), batches(mesh)[0]

    def fun(up, x, table, down):
        """Every replica sees the whole table and its columns of x."""
        return jnp.mean((x.T @ table["whole"] @ up @ down) ** 2)

    reducer = jaxcomp.allreduce(axis_name="data")
    specs = (P(None, "data"), {"whole": P()})
    value_and_grad = jaxcomp.value_and_grad(
        fun, reducer, mesh=mesh, argnums=(0, 3), batch_specs=specs
    )
    arguments = (params["up"], x.T, {"whole": jnp.eye(32)}, params["down"])
    state = value_and_grad.init((params["up"], params["down"]))
    (value, grads), _ = jax.jit(value_and_grad)(state, *arguments)
    expected = jax.value_and_grad(fun, argnums=(0, 3))(*jax.device_get(arguments))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (value, grads),
        expected,
    )


def test_a_function_may_map_over_other_axes_itself():
    """What a ring attention or an expert layer does within a model-parallel group."""
    mesh = grid(data=2, model=4)
    params = parameters(mesh)

    def summed(x, w):
        return jax.lax.psum(x @ w, "model")

    def fun(params, x):
        inner = jax.shard_map(
            summed, in_specs=(P(None, "model"), P("model")), out_specs=P(), axis_names={"model"}
        )
        return jnp.mean(inner(x, params["up"]) ** 2)

    value_and_grad = jaxcomp.value_and_grad(fun, REDUCERS["allreduce"](), mesh=mesh)
    x = batches(mesh)[0]
    (value, grads), _ = jax.jit(value_and_grad)(value_and_grad.init(params), params, x)
    expected = jnp.mean((np.asarray(x) @ np.asarray(params["up"])) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert float(jnp.abs(grads["up"]).max()) > 0


def test_any_transformation_that_begins_with_a_reducer():
    mesh = grid()
    params, x = parameters(mesh), batches(mesh)[0]
    tx = optax.chain(REDUCERS["powersgd"](), optax.clip_by_global_norm(1e-3))
    with pytest.raises(ValueError, match="does not say along which axis"):
        jaxcomp.value_and_grad(loss, tx, mesh=mesh)
    value_and_grad = jaxcomp.value_and_grad(loss, tx, mesh=mesh, axis_name="data")
    state = value_and_grad.init(params)
    (_, grads), state = jax.jit(value_and_grad)(state, params, x)
    np.testing.assert_allclose(optax.tree.norm(grads), 1e-3, rtol=1e-5)
    assert state[0].residual["up"].shape == (4, 32, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_state_restores_on_any_number_of_replicas(replicas, consolidated, kind):
    """The residuals of four replicas; what matters of them is their mean."""
    there = grid(kind, data=replicas)
    params, state, expected = trained(kind)
    saved = jax.device_get(jaxcomp.consolidate(state) if consolidated else state)
    moved = jax.tree.map(lambda x: jax.device_put(np.asarray(x), NamedSharding(there, P())), params)
    value_and_grad = jaxcomp.value_and_grad(loss, REDUCERS["powersgd"](), mesh=there)
    restored = value_and_grad.restore(saved, moved)
    assert restored.residual["up"].shape == (replicas, 32, 64)
    if replicas == 4 and not consolidated:
        jax.tree.map(np.testing.assert_array_equal, restored, state)
    (_, grads), _ = jax.jit(value_and_grad)(restored, moved, batches(there)[5])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), grads, expected
    )


def test_what_is_wrong_is_said_before_anything_runs():
    mesh = grid()
    reducer, params, x = REDUCERS["powersgd"](), parameters(mesh), batches(mesh)[0]
    value_and_grad = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)
    state = value_and_grad.init(params)
    with pytest.raises(ValueError, match="no mesh"):
        jaxcomp.value_and_grad(loss, reducer).init(params)
    with pytest.raises(ValueError, match="no axis 'data'"):
        jaxcomp.value_and_grad(loss, reducer, mesh=jax.make_mesh((8,), ("replica",)))
    with pytest.raises(ValueError, match="`aux` must be one of"):
        jaxcomp.value_and_grad(loss, reducer, aux="first")
    for wrong in (None, reducer):  # swapped
        with pytest.raises(ValueError, match="must be a function, and the second the reducer"):
            jaxcomp.value_and_grad(wrong, loss)
    with pytest.raises(ValueError, match=r"first argument must be the reducer's state.*'down'"):
        value_and_grad(params, state, x)
    with pytest.raises(ValueError, match=r"`mesh` must be a mesh, as jax.make_mesh.*\(8,\)"):
        jaxcomp.value_and_grad(loss, reducer, mesh=(8,))
    with pytest.raises(ValueError, match=r"call it, allreduce\(axis_name=\.\.\.\)"):
        jaxcomp.value_and_grad(loss, jaxcomp.allreduce)
    plain = jaxcomp.value_and_grad(loss, optax.sgd(0.1), mesh=mesh, axis_name="data")
    with pytest.raises(ValueError, match="different on every replica: it is no reducer"):
        plain(plain.init(params), params, x)
    with pytest.raises(ValueError, match=r"shape \(6, 32\), which .* cannot split between 4"):
        value_and_grad(state, params, jnp.zeros((6, 32)))
    with pytest.raises(ValueError, match=r"keyword argument .*'x'.* by position"):
        value_and_grad(state, params, x=x)
    with pytest.raises(ValueError, match=r"No argument is split .* not in a closure"):
        jaxcomp.value_and_grad(lambda p: loss(p, x), reducer, mesh=mesh)(state, params)
    with pytest.raises(ValueError, match="2 entries, and the function was called with 1"):
        jaxcomp.value_and_grad(loss, reducer, mesh=mesh, batch_specs=(P(), P()))(state, params, x)
    for specs, message in (
        (P(), "No argument is split"),
        (P("batch"), "names the axis 'batch'; the mesh has 'data'"),
        ((P(None, ("data", "x")),), "names the axis 'x'"),
        ("data", "such as jax.P.'data'.*got a str: 'data'"),
        (NamedSharding(mesh, P("data")), "got a NamedSharding"),
    ):
        misread = jaxcomp.value_and_grad(loss, reducer, mesh=mesh, batch_specs=specs)
        with pytest.raises(ValueError, match=message):
            misread(state, params, x)
    with pytest.raises(ValueError, match="called with 0 arguments behind the state, and argnums=0"):
        value_and_grad(state, params=params)
    with pytest.raises(ValueError, match="4 replicas need a leading axis"):
        value_and_grad(reducer.init(params), params, x)
    spread = jax.device_put(params, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"sharded over .*'data'.*, the axis of the replicas"):
        value_and_grad.init(spread)
    wrong = state._replace(q={**state.q, "up": jnp.zeros((3, 3))})
    with pytest.raises(ValueError, match=r"q\['up'\]: expected \(32, 2\), got \(3, 3\)"):
        value_and_grad.restore(wrong, params)
    first = state._replace(residual=jax.tree.map(lambda x: x[0], state.residual))
    with pytest.raises(ValueError, match="needs one leading axis of replicas"):
        value_and_grad.restore(first, params)
    with pytest.raises(ValueError, match=r"leaf \['count'\] of .* has dtype int32"):
        value_and_grad.init({**params, "count": jnp.zeros([], jnp.int32)})


def test_a_table_is_not_taken_for_a_batch():
    mesh, table = grid(), jnp.arange(8.0)
    params, x = parameters(mesh), batches(mesh)[0]

    def weighted(params, x, table):
        return loss(params, x) * table[jnp.arange(len(x)) % 8].mean()

    def value(batch_specs):
        value_and_grad = jaxcomp.value_and_grad(
            weighted, REDUCERS["allreduce"](), mesh=mesh, batch_specs=batch_specs
        )
        return jax.jit(value_and_grad)(value_and_grad.init(params), params, x, table)[0][0]

    with pytest.raises(ValueError, match=r"argument 2 has 8 rows, and .* has 16\. .*batch_specs"):
        value(None)
    with pytest.raises(ValueError, match="has 8 rows"):
        value((None, None))
    np.testing.assert_allclose(value((P("data"), P())), loss(params, x) * 1.5, rtol=1e-6)


def test_a_loss_that_averages_itself_is_refused():
    """Its gradients would be too small, by the number of replicas, and train all the same."""
    mesh = grid()
    params, x = parameters(mesh), batches(mesh)[0]

    def gradients(check_vma):
        value_and_grad = jaxcomp.value_and_grad(
            lambda params, x: jax.lax.pmean(loss(params, x), "data"),
            REDUCERS["allreduce"](),
            mesh=mesh,
            check_vma=check_vma,
        )
        return jax.jit(value_and_grad)(value_and_grad.init(params), params, x)[0][1]

    with pytest.raises(ValueError, match=r"loss is the same on every replica along 'data'"):
        gradients(check_vma=True)
    # Without types, differentiation transposes the mean to a sum, and what comes out is right.
    expected = jax.grad(loss)(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        gradients(check_vma=False),
        expected,
    )


def test_a_loop_that_begins_with_zeros_is_explained_and_works_unchecked():
    mesh = grid()
    params, x = parameters(mesh), batches(mesh)[0]

    def recurrent(params, x):
        def turn(h, _):
            return jnp.tanh((h + x) @ params["up"] + params["bias"]) @ params["down"], None

        return jnp.mean(jax.lax.scan(turn, jnp.zeros(x.shape), length=2)[0] ** 2)

    def gradients(check_vma):
        value_and_grad = jaxcomp.value_and_grad(
            recurrent, REDUCERS["allreduce"](), mesh=mesh, check_vma=check_vma
        )
        return jax.jit(value_and_grad)(value_and_grad.init(params), params, x)[0][1]

    with pytest.raises(TypeError) as error:
        gradients(check_vma=True)
    assert "check_vma=False" in error.value.__notes__[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        gradients(check_vma=False),
        jax.grad(recurrent)(params, x),
    )


def test_shardings_within_the_loss_name_the_other_axes_only():
    mesh = grid(data=2, model=2)
    params, x = parameters(mesh, "tensor"), batches(mesh)[0]

    def call(sharding):
        def constrained(params, x):
            hidden = jnp.tanh(x @ params["up"] + params["bias"])
            hidden = jax.lax.with_sharding_constraint(hidden, sharding)
            return jnp.mean((hidden @ params["down"] - x) ** 2)

        run = jaxcomp.value_and_grad(constrained, REDUCERS["allreduce"](), mesh=mesh)
        return jax.eval_shape(run, run.init(params), params, x)[0][0]

    for sharding in (
        NamedSharding(mesh, P("data", "model")),
        NamedSharding(mesh, P(None, "model")),
    ):
        with pytest.raises(ValueError, match="Auto") as error:
            call(sharding)
        assert "must not name 'data'" in error.value.__notes__[0]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Auto") as error:
        call(P("data", "model"))
    assert "must not name 'data'" in error.value.__notes__[0]
    assert call(P(None, "model")).shape == ()


def test_restore_says_what_it_was_given_and_casts_to_what_it_keeps():
    params = {"w": jnp.zeros((16, 12))}
    narrow = jaxcomp.powersgd(1, axis_name="data", residual_dtype=jnp.bfloat16)
    compressed = jaxcomp.value_and_grad(loss, narrow, mesh=grid())
    wide = jaxcomp.powersgd(1, axis_name="data").init(params)
    assert compressed.restore(wide, params).residual["w"].dtype == jnp.bfloat16
    for state, message in (
        (wide._asdict(), "must be a PowerSGDState, got a dict. .*eval_shape"),
        (None, "got a NoneType"),
        (optax.EmptyState(), "got a EmptyState.*adapt_state"),
        (narrow.init({"w": params["w"], "b": jnp.zeros(3)}), "is that of other parameters"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            compressed.restore(state, params)
        assert len(str(error.value)) < 400
