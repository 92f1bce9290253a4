"""scan_layers: what the reducer does to each layer on its own, from within the backward scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, once, sent_bytes, text
from reducers import reducer
from runners import AXIS, mesh_of, stack

import jaxcomp
from jaxcomp._training.scan_state import as_floats, from_floats
from jaxcomp._wire.hlo import parse

REPLICAS, DEPTH, WIDTH = 2, 3, 8
REST = jaxcomp.allreduce(axis_name=AXIS)


def block(p, x, scale, key):
    """A layer that counts those before it, and draws a number of its own."""
    hidden, layer, total = x
    noise = jax.random.normal(jax.random.fold_in(key, layer), hidden.shape[-1:])
    hidden = hidden + jnp.tanh(hidden @ p["w"] + p["b"] + 0.1 * noise) * scale
    return hidden, layer + 1, total + jnp.mean(hidden**2)


def loss_of(params, x, run):
    """Both use the scale, which is one of the rest, and the input depends on the rest too."""
    start = x @ params["first"], jnp.array(0), jnp.zeros([]) + 0 * x[0, 0]
    hidden, _, total = run(params["layers"], start, params["scale"], jax.random.key(1))
    return jnp.mean((hidden @ params["last"]) ** 2) + 0.1 * total, {"hidden": hidden.mean()}


def one_by_one(params, x, *args):
    for i in range(DEPTH):
        x = block(jax.tree.map(lambda leaf, i=i: leaf[i], params), x, *args)
    return x


def parameters():
    draw = np.random.default_rng(0).normal
    normal = lambda *shape: np.float32(0.5 * draw(size=shape))  # noqa: E731
    return {
        "layers": {"w": normal(DEPTH, WIDTH, WIDTH), "b": normal(DEPTH, WIDTH)},
        "first": normal(4, WIDTH),
        "last": normal(WIDTH, 2),
        "scale": normal(WIDTH),
    }


def batches(steps=5):
    return np.random.default_rng(1).normal(size=(steps, REPLICAS, 3, 4)).astype(np.float32)


def scanned(tx, rest=REST):
    layers = jaxcomp.scan_layers(block, tx)
    loss = functools.partial(loss_of, run=layers)
    return layers.value_and_grad(loss, "layers", rest=rest, has_aux=True)


def written_out(tx, state, params, x):
    """The same step without a scan: the reducer on each layer's own gradients."""
    function = functools.partial(loss_of, run=one_by_one)
    value, grads = jaxcomp.local_value_and_grad(function, AXIS, has_aux=True)(params, x)
    rest = {name: g for name, g in grads.items() if name != "layers"}
    means, rest_state = REST.update(rest, state["rest"])
    each, states = [], []
    for i in range(DEPTH):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], grads["layers"])
        mean, new = tx.update(layer, state["layers"][i])
        each.append(mean)
        states.append(new)
    means["layers"] = jax.tree.map(lambda *x: jnp.stack(x), *each)
    return (value, means), {"layers": states, "rest": rest_state}


def mapped(mapping, step, state):
    """`step` over the replicas, and the state as it wants it."""
    axes = jaxcomp.state_axes(state)
    if mapping == "shard_map":
        specs = jaxcomp.state_specs(state, AXIS)

        def own(state, params, x):
            (value, grads), state = step(state, params, x[0])
            return (jax.tree.map(lambda v: v[None], value), grads), state

        inside = jax.shard_map(
            own,
            mesh=mesh_of(REPLICAS),
            in_specs=(specs, jax.P(), jax.P(AXIS)),
            out_specs=((jax.P(AXIS), jax.P()), specs),
        )
        return jax.jit(inside), jaxcomp.shard_state(state, mesh_of(REPLICAS), AXIS)
    if mapping == "pmap":
        devices = jax.devices()[:REPLICAS]
        inside = jax.pmap(step, AXIS, in_axes=(0, None, 0), devices=devices)

        def first_gradients(*arguments):
            (value, grads), state = inside(*arguments)
            return (value, jax.tree.map(lambda g: g[0], grads)), state

        return first_gradients, stack(state, REPLICAS)
    inside = jax.vmap(step, (axes, None, 0), ((0, None), axes), axis_name=AXIS)
    return jax.jit(inside), jaxcomp.stack_replicas(state, REPLICAS)


def trained(step, state, params, steps):
    """Losses, parameters after each step of gradient descent, and the last state."""
    history = []
    for x in steps:
        (value, grads), state = step(state, params, x)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        history.append((jax.device_get(value), jax.device_get(params)))
    return history, state


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, wanted)


@functools.cache
def expected(name):
    tx, params = reducer(name), parameters()
    layer = jax.tree.map(lambda x: x[0], params["layers"])
    rest = {name: x for name, x in params.items() if name != "layers"}
    state = {"layers": [tx.init(layer)] * DEPTH, "rest": REST.init(rest)}
    step, state = mapped("vmap", functools.partial(written_out, tx), state)
    return trained(step, state, params, batches())


@pytest.mark.parametrize(
    ("mapping", "name"),
    [
        *(("shard_map", name) for name in ("powersgd", "powersgd-late", "powersgd-alternating")),
        *(("shard_map", name) for name in ("powersgd-int8", "feedback-int8", "allreduce")),
        *(("vmap", "powersgd"), ("pmap", "powersgd")),
    ],
)
def test_gradients_and_states_are_those_of_the_reducer_on_every_layer(mapping, name):
    value_and_grad, params = scanned(reducer(name)), parameters()
    step, state = mapped(mapping, value_and_grad, value_and_grad.init(params))
    found, state = trained(step, state, params, batches())
    wanted, last = expected(name)
    assert_close(found, wanted)
    rows = REPLICAS * DEPTH if mapping == "shard_map" else None
    for field in ("residual", "q", "p", "count"):
        if field not in getattr(last["layers"][0], "_fields", ()):
            continue
        want = [getattr(layer, field) for layer in last["layers"]]
        shared = field != "residual"
        want = jax.tree.map(lambda *x, at=0 if shared else 1: np.stack(x, at), *want)
        got = getattr(state.layers, field)
        if rows and not shared:  # shard_map: the replicas' blocks, one behind the other
            got = jax.tree.map(lambda x: x.reshape(REPLICAS, DEPTH, *x.shape[1:]), got)
        elif mapping == "pmap" and shared:
            got = jax.tree.map(lambda x: x[0], got)
        assert_close(got, want)


def fragile(p, x):
    """Its gradient is infinite where ``b`` is 0, and its output is not."""
    return x + jnp.tanh(x @ p["w"]) * jnp.sqrt(p["b"])


@functools.cache
def fragile_step():
    layers = jaxcomp.scan_layers(fragile, reducer("powersgd"))

    def loss_fn(params, x):
        hidden = layers(params["layers"], x @ params["first"])
        return jnp.mean((hidden @ params["last"]) ** 2) + jnp.sqrt(params["scale"]).sum()

    value_and_grad = layers.value_and_grad(loss_fn, "layers")
    params = parameters()
    params["layers"]["b"] = np.ones_like(params["layers"]["b"])
    params["scale"] = np.ones_like(params["scale"])
    return *mapped("shard_map", value_and_grad, value_and_grad.init(params)), params


@pytest.mark.parametrize("where", ["a layer in the middle", "the rest", "the batch"])
def test_a_step_that_is_not_finite_leaves_no_trace(where):
    step, state, params = fragile_step()
    x = batches()[0]
    _, state = step(state, params, x)
    bad, x = jax.tree.map(np.copy, params), x.copy()
    if where == "the rest":
        bad["scale"][3] = 0
    elif where == "the batch":  # of one replica
        x[1, 0, 0] = np.inf
    else:  # the layers above it are reduced by then, and finite
        bad["layers"]["b"][1, 2] = 0
    (_, grads), after = step(state, bad, x)
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, np.nan), grads)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    (_, grads), after = step(state, params, batches()[1])
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert after.layers.count.tolist() == [2] * DEPTH


def test_a_replica_of_weight_0_may_hold_anything():
    value_and_grad, params = scanned(REST), parameters()
    one = batches()[0]
    two = np.stack([one[0], one[0]])
    one[1] = np.nan
    state = value_and_grad.init(params)
    weighted = jax.jit(
        jax.vmap(
            lambda x, w: value_and_grad(state, params, x, weight=w)[0][1],
            out_axes=None,
            axis_name=AXIS,
        )
    )
    assert_close(weighted(one, np.float32([3, 0])), weighted(two, np.float32([2, 2])))


@pytest.mark.parametrize(
    ("name", "sent"),
    [("powersgd", [2]), ("powersgd-late", [1, 2]), ("powersgd-alternating", [1, 1])],
)
def test_a_loop_for_each_form_of_a_step_holds_the_all_reduces_of_one_layer(name, sent):
    value_and_grad, params = scanned(reducer(name)), parameters()
    step, state = mapped("shard_map", value_and_grad, value_and_grad.init(params))
    program = text(step, state, params, batches()[0])
    if name == "powersgd":  # whose steps have one form
        counted = value_and_grad.bytes(params, replicas=REPLICAS, step=0)
        outside = sent_bytes(once(program))
        inside = sent_bytes(collectives(program)) - outside
        assert counted.bytes_after == (DEPTH - 1) * inside + outside
        assert "['layers']['w']" in [leaf.path for leaf in counted.leaves]
    module = parse(program)
    bodies = [
        [y.opcode for y in module[name]]
        for lines in module.values()
        for x in lines
        for how, name in x.calls
        if how == "body"
    ]
    loops = [opcodes for opcodes in bodies if "all-reduce" in opcodes]
    assert sorted(opcodes.count("all-reduce") for opcodes in loops) == sent
    assert not any("conditional" in opcodes for opcodes in loops)


def test_layers_outside_of_training_are_a_scan():
    layers, params = jaxcomp.scan_layers(fragile, REST), parameters()["layers"]
    params["b"] = np.abs(params["b"])
    x = batches()[0, 0] @ parameters()["first"]

    def written_out(params, x):
        for i in range(DEPTH):
            x = fragile(jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
        return x

    found, wanted = (
        jax.jit(jax.value_and_grad(lambda p, run=run: run(p, x).sum()))(params)
        for run in (layers, written_out)
    )
    assert_close(found, wanted)


def test_one_layer_needs_no_loop():
    layers = jaxcomp.scan_layers(lambda w, x: jnp.tanh(x @ w), REST)
    value_and_grad = layers.value_and_grad(lambda p, x: layers(p["w"], x).sum(), "w")
    params = {"w": np.float32(np.random.default_rng(0).normal(size=(1, 4, 4)))}
    x = batches()[0]
    state = value_and_grad.init(params)
    step = jax.vmap(value_and_grad, (None, None, 0), ((0, None), None), axis_name=AXIS)
    (_, grads), _ = jax.jit(step)(state, params, x)
    wanted = jax.grad(lambda p: jnp.tanh(x @ p["w"][0]).sum() / REPLICAS)(params)
    assert_close(grads, wanted)


def test_a_loss_may_cast_all_parameters_and_add_a_penalty_on_them():
    """What maps over the parameters sees those of the layers, and nothing of the reducer."""

    def loss(run, params, x):
        cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
        value, aux = loss_of(cast, x, run)
        return value + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)), aux

    layers, params = jaxcomp.scan_layers(block, reducer("powersgd")), parameters()
    value_and_grad = layers.value_and_grad(
        functools.partial(loss, layers), "layers", rest=REST, has_aux=True
    )
    step, state = mapped("vmap", value_and_grad, value_and_grad.init(params))
    plain, plain_state = mapped("vmap", scanned(reducer("powersgd")), value_and_grad.init(params))
    rounded = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16).astype(jnp.float32), params)
    for x in batches(2):
        (_, grads), state = step(state, params, x)
        (_, wanted), plain_state = plain(plain_state, rounded, x)
    # The penalty is the same on every replica, and is not compressed.
    wanted = jax.tree.map(lambda g, p: g + 0.2 * p, wanted, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01, atol=0.01), grads, wanted)
    np.testing.assert_array_equal(state.layers.count, plain_state.layers.count)


def test_a_saved_state_is_the_mean_over_replicas_and_not_over_layers():
    value_and_grad = scanned(reducer("powersgd"))
    state = value_and_grad.init(parameters())
    stacked = jaxcomp.stack_replicas(state, 4)
    assert stacked.layers.residual["w"].shape == (4, DEPTH, WIDTH, WIDTH)
    for given in (state, stacked):
        jax.tree.map(np.testing.assert_array_equal, jaxcomp.consolidate(given), state)


def test_parameters_on_an_explicit_axis():
    def tensor_parallel(p, x):
        hidden = jnp.tanh(x @ p["w"])
        return x + jnp.matmul(hidden, p["v"], out_sharding=jax.P(*(None for _ in x.shape)))

    layers = jaxcomp.scan_layers(tensor_parallel, reducer("powersgd"))
    value_and_grad = layers.value_and_grad(lambda p, x: layers(p["w"], x).mean(), "w")
    params = {"w": {"w": parameters()["layers"]["w"], "v": parameters()["layers"]["w"][::-1]}}
    x = np.ones((REPLICAS, 3, WIDTH), np.float32)

    split = {"w": {"w": jax.P(None, None, "model"), "v": jax.P(None, "model")}}

    def gradients(devices):
        kinds = (jax.sharding.AxisType.Explicit,) * 2
        of_mesh = jax.devices()[: REPLICAS * devices]
        mesh = jax.make_mesh((REPLICAS, devices), (AXIS, "model"), kinds, devices=of_mesh)
        placed = jax.tree.map(
            lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s)), params, split
        )
        specs = jaxcomp.state_specs(jax.eval_shape(value_and_grad.init, params), AXIS)
        mapped = jax.shard_map(
            lambda state, params, x: value_and_grad(state, params, x)[0][1],
            mesh=mesh,
            in_specs=(specs, jax.P(), jax.P(AXIS)),
            out_specs=jax.P(),
            axis_names={AXIS},
        )
        with jax.set_mesh(mesh):
            state = jaxcomp.shard_state(value_and_grad.init(placed), mesh, AXIS)
            return jax.jit(mapped)(state, placed, jax.device_put(x, jax.P(AXIS)))

    found, wanted = gradients(2), gradients(1)
    assert found["w"]["w"].sharding.spec == split["w"]["w"]
    assert_close(jax.device_get(found), jax.device_get(wanted))


def test_a_state_of_any_dtype_passes_as_floats_bit_by_bit():
    state = {
        "count": jnp.array([3, -1, 2**31 - 1]),
        "key": jax.random.split(jax.random.key(7), 3),
        "small": jnp.array([-128, 0, 127], jnp.int8),
        "flags": jnp.array([True, False]),
        "residual": jnp.array([1.5, jnp.nan], jnp.bfloat16),
    }
    floats = as_floats(state)
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(floats))
    again = from_floats(floats, state)
    for found, wanted in zip(*map(jax.tree.leaves, (again, state)), strict=True):
        assert found.dtype == wanted.dtype
        if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            found, wanted = map(jax.random.key_data, (found, wanted))
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


class TestErrors:
    @pytest.mark.parametrize("tx", [None, jaxcomp.accumulate(REST, 2)])
    def test_what_is_no_reducer(self, tx):
        with pytest.raises(ValueError, match="`reducer` must be a jaxcomp reducer"):
            jaxcomp.scan_layers(block, tx)

    def test_arguments(self):
        layers = jaxcomp.scan_layers(block, REST)
        with pytest.raises(ValueError, match="`block` must be a function"):
            jaxcomp.scan_layers(3, REST)
        with pytest.raises(ValueError, match="`fun` must be a function"):
            layers.value_and_grad(3, "layers")
        with pytest.raises(ValueError, match="`part` must be the name"):
            layers.value_and_grad(loss_of, "")
        with pytest.raises(ValueError, match=r"`rest` must have the axis_name .* 'data', got 'x'"):
            layers.value_and_grad(loss_of, "layers", rest=jaxcomp.allreduce(axis_name="x"))
        with pytest.raises(ValueError, match="`rest` must be a jaxcomp reducer"):
            layers.value_and_grad(loss_of, "layers", rest=3)

    def test_an_attribute_of_the_layers(self):
        layers = jaxcomp.scan_layers(fragile, REST)
        loss = lambda p, x: (p["layers"].w ** 2).sum()  # noqa: E731
        with pytest.raises(AttributeError, match=r"go into layers\(params, x\) as they are"):
            run_once(layers.value_and_grad(loss, "layers"))

    def test_leading_axes(self):
        layers = jaxcomp.scan_layers(fragile, REST)
        value_and_grad = layers.value_and_grad(loss_of, "layers")
        for leaf in (np.ones(2, np.float32), np.float32(1)):
            with pytest.raises(ValueError, match=r"one leading axis .*\n.*'b'"):
                layers({"w": np.ones((3, 8, 8)), "b": leaf}, np.ones(8))
        with pytest.raises(ValueError, match=r"must be floating, and \['w'\] is not"):
            value_and_grad.init({"layers": {"w": np.ones((3, 8, 8), int)}})
        with pytest.raises(ValueError, match=r"one leading axis .*\n.*\(0, 8\)"):
            value_and_grad.init({"layers": {"w": np.ones((0, 8), np.float32)}})
        with pytest.raises(ValueError, match="there is none"):
            value_and_grad.init({"layers": {}})

    def test_the_part(self):
        value_and_grad = jaxcomp.scan_layers(fragile, REST).value_and_grad(loss_of, "layers")
        with pytest.raises(ValueError, match=r"0 are called 'layers': \['blocks'\]"):
            value_and_grad.init({"blocks": np.ones((3, 8))})
        with pytest.raises(ValueError, match="2 are called 'layers'"):
            value_and_grad.init({x: {"layers": np.ones((3, 8))} for x in "ab"})

    @pytest.mark.parametrize(
        ("loss", "message"),
        [
            (lambda layers, p, x: x.mean() + 0 * p["last"].sum(), "did not call the layers"),
            (lambda layers, p, x: layers(p["layers"], layers(p["layers"], x)).sum(), "and once"),
            (lambda layers, p, x: (p["layers"]["w"] ** 2).sum(), "go into layers"),
            (lambda layers, p, x: (x @ p["layers"]).sum(), "go into layers"),
        ],
    )
    def test_what_the_loss_does_with_the_layers(self, loss, message):
        layers = jaxcomp.scan_layers(fragile, REST)
        value_and_grad = layers.value_and_grad(functools.partial(loss, layers), "layers")
        with pytest.raises(ValueError, match=message):
            run_once(value_and_grad)

    @pytest.mark.parametrize(
        "returned", [lambda x: (x, x.sum()), lambda x: x[:, :2], lambda x: x.astype(jnp.bfloat16)]
    )
    def test_a_block_that_returns_something_else(self, returned):
        layers = jaxcomp.scan_layers(lambda p, x: returned(x), REST)
        loss = lambda p, x: layers(p["layers"], x).sum()  # noqa: E731
        with pytest.raises(ValueError, match="`block` must return what it takes"):
            run_once(layers.value_and_grad(loss, "layers"))

    def test_a_state_of_other_layers(self):
        value_and_grad, params = scanned(reducer("powersgd")), parameters()
        state = value_and_grad.init(
            params | {"layers": jax.tree.map(lambda x: x[:2], params["layers"])}
        )
        with pytest.raises(ValueError, match="does not fit parameters of 3 layers"):
            run_once(value_and_grad, state)

    def test_an_averaged_loss(self):
        layers = jaxcomp.scan_layers(fragile, REST)
        loss = lambda p, x: jax.lax.pmean(layers(p["layers"], x).sum(), AXIS)  # noqa: E731
        value_and_grad = layers.value_and_grad(loss, "layers")
        step, state = mapped("shard_map", value_and_grad, value_and_grad.init(parameters()))
        with pytest.raises(ValueError, match="The loss is the same on every replica"):
            step(state, parameters(), np.ones((REPLICAS, 3, WIDTH), np.float32))


def run_once(value_and_grad, state=None):
    params = parameters()
    state = value_and_grad.init(params) if state is None else state
    x = np.ones((REPLICAS, 3, WIDTH), np.float32)
    jax.eval_shape(
        jax.vmap(value_and_grad, in_axes=(None, None, 0), axis_name=AXIS), state, params, x
    )
