"""data_parallel and value_and_grad: what is wrong is one sentence, before anything runs."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from numpy.testing import assert_allclose

import jaxcomp
from tests.helpers.autoencoder import loss, new_params
from tests.helpers.classifier import grid, placed, stepped
from tests.helpers.leaves import close, equal, normal
from tests.helpers.reducers import powersgd, reducer
from tests.helpers.runners import first
from tests.helpers.tables import rows

P = jax.P
MESH = grid(4)
REDUCER = powersgd(2)
PARAMS = new_params()
X = normal(16, 32, seed=2)


@functools.cache
def state():
    return jaxcomp.shard_state(REDUCER.init(PARAMS), MESH, "data")


def make(fun=loss, tx=REDUCER, mesh=MESH, **options):
    return jaxcomp.value_and_grad(fun, tx, mesh=mesh, **options)


CASES = {
    "no mesh": (
        lambda: jaxcomp.value_and_grad(loss, REDUCER).init(PARAMS),
        r"no mesh\. Place the state with jaxcomp.shard_state",
    ),
    "another mesh": (lambda: make(mesh=jax.make_mesh((8,), ("replica",))), "no axis 'data'"),
    "a shape": (lambda: make(mesh=(8,)), "`mesh` must be a mesh, as jax.make_mesh.* a tuple"),
    "aux": (lambda: make(aux="first"), "`aux` must be one of"),
    "aux in an array": (lambda: make(aux=np.arange(2)), "`aux` must be one of"),
    "no function": (lambda: make(None, loss), "must be a function, and the second the reducer"),
    "no gradients": (
        lambda: jaxcomp.data_parallel(loss, REDUCER, mesh=MESH)(state(), PARAMS, X),
        r"must return \(value, gradients\)",
    ),
    "argnums": (lambda: make(argnums="w"), "`argnums` must be an integer or a tuple of them"),
    "argnums twice": (
        lambda: make(argnums=(0, -2))(state(), PARAMS, X),
        "names one of 2 arguments twice",
    ),
    "a reducer along another axis": (
        lambda: make(mesh=grid(2, model=2), axis_name=("data", "model"), check_vma=False),
        r"`axis_name` is \('data', 'model'\), and the reducer averages along 'data'",
    ),
    "uncalled": (lambda: make(loss, jaxcomp.allreduce), r"call it, allreduce\(axis_name=\.\.\.\)"),
    "a chain": (
        lambda: make(loss, optax.chain(REDUCER, optax.sgd(0.1))),
        "does not say along which axis",
    ),
    "an optimizer": (
        lambda: stepped(make(loss, optax.sgd(0.1), axis_name="data"), PARAMS, X),
        "different on every replica along 'data': it is not a reducer",
    ),
    "a part left as it is": (
        lambda: make(
            tx=optax.masked(REDUCER, {"up": True, "down": False, "bias": True}),
            axis_name="data",
            check_vma=False,
        ).init(PARAMS),
        r"the gradient \['down'\] different on every replica along 'data'",
    ),
    "a text for parameters": (
        lambda: make().init("model"),
        "init takes the parameters, as arrays or their shapes, got str",
    ),
    "outputs of shapes": (
        lambda: make().outputs(PARAMS, jax.ShapeDtypeStruct((16, 32), jnp.float32)),
        r"`batch` has only a shape at \[0\]: pass the arrays of a run",
    ),
    "outputs of a state": (
        lambda: make().outputs(state(), PARAMS, X),
        r"outputs takes the parameters first, .* got a PowerSGDState",
    ),
    "parameters first": (
        lambda: make()(PARAMS, state(), X),
        r"first argument must be the reducer's state.*'down'",
    ),
    "no state": (lambda: make()(PARAMS, X), "first argument must be the reducer's state"),
    "no state of a reducer without one": (
        lambda: make(tx=reducer("allreduce"))(PARAMS, X),
        "first argument must be the reducer's state.*'down'.* holds none",
    ),
    "a list": (
        lambda: make()(state(), PARAMS, X.tolist()),
        "Argument 1 is a list of Python numbers, .*np.asarray",
    ),
    "labels in a list": (
        lambda: make(lambda p, x, y: loss(p, x))(state(), PARAMS, X, [1.0] * 16),
        "Argument 2 is a list of Python numbers",
    ),
    "a constant": (
        lambda: make(lambda params, x: jnp.float32(1))(state(), PARAMS, X),
        "depends neither on the parameters nor on the examples, or `fun` averages it",
    ),
    "six rows": (
        lambda: make()(state(), PARAMS, jnp.zeros((6, 32))),
        r"shape \(6, 32\), which .* cannot split between 4",
    ),
    "five rows for two halves": (
        lambda: make().outputs(PARAMS, jnp.zeros((5, 32))),
        r"shape \(5, 32\), which .* cannot split between 2",
    ),
    "by keyword": (lambda: make()(state(), PARAMS, x=X), r"keyword argument .*'x'.* by position"),
    "no parameters": (
        lambda: make()(state(), params=PARAMS),
        "called with 0 arguments after the state, and argnums=0",
    ),
    "a closure": (
        lambda: make(lambda p: loss(p, X))(state(), PARAMS),
        r"No argument is split .* not in a closure",
    ),
    "no array": (
        lambda: make(lambda p, x: loss(p, X))(state(), PARAMS, iter(X)),
        r"Beside the parameters it got: .*iterator\. Pass the batch as an array of JAX or NumPy",
    ),
    "consolidated": (
        lambda: make()(REDUCER.init(PARAMS), PARAMS, X),
        "4 replicas need a leading axis",
    ),
    "a number of Python": (
        lambda: jax.jit(make(lambda params, x: loss(params[0], x) * params[1]))(
            make().init((PARAMS, 0.5)), (PARAMS, 0.5), X
        ),
        r"(?s)\[1\]: only the parameters have this leaf.* a Python number must be an array",
    ),
    "weights in a dict": (
        lambda: make()(state(), PARAMS, X, weight={"mask": np.ones(16)}),
        "`weight` must hold real numbers, got a dict",
    ),
    "a weight in words": (
        lambda: make()(state(), PARAMS, X, weight="equal"),
        "`weight` must hold real numbers, got a str",
    ),
    "outputs inside jit": (
        lambda: jax.jit(lambda x: (make().outputs(PARAMS, X), x)[1])(1.0),
        "inside of jax.jit there are none yet",
    ),
    "a text of NumPy": (
        lambda: make().init({"w": np.array(["a", "b"])}),
        r"The leaf \['w'\] is a ndarray of <U1 and not an array",
    ),
    "spread": (
        lambda: make().init(placed(MESH, PARAMS, P("data"))),
        r"sharded over .*'data'.*, the axis of the replicas",
    ),
    "an integer": (
        lambda: make().init(PARAMS | {"count": jnp.zeros([], jnp.int32)}),
        r"leaf \['count'\] of .* has dtype int32",
    ),
    "restored of another rank": (
        lambda: make().restore(state()._replace(q=state().q | {"up": jnp.zeros((3, 3))}), PARAMS),
        r"q\['up'\]: expected \(32, 2\), got \(3, 3\)",
    ),
    "restored of one replica": (
        lambda: make().restore(state()._replace(residual=first(state().residual)), PARAMS),
        "needs one leading axis of replicas",
    ),
    "restored without classes": (
        lambda: make().restore(REDUCER.init(PARAMS)._asdict(), PARAMS),
        "must be a PowerSGDState, got a dict. .*eval_shape",
    ),
    "restored None": (lambda: make().restore(None, PARAMS), "got a NoneType"),
    "restored of another reducer": (
        lambda: make().restore(optax.EmptyState(), PARAMS),
        "got a EmptyState.*adapt_state",
    ),
    "held for fewer parameters": (
        lambda: make()({"held": REDUCER.init({"up": PARAMS["up"]})}, PARAMS, X),
        r"(?s)does not fit the parameters:.*q\['down'\]: only the parameters have this leaf",
    ),
    "restored of other parameters": (
        lambda: make().restore(REDUCER.init({"up": PARAMS["up"]}), PARAMS),
        r"(?s)residual\['bias'\]: only the parameters have this leaf.* new state, init\(params\)",
    ),
}
SPECS = {
    "two": ((P(), P()), "2 entries, and the function was called with 1"),
    "shared": (P(), "No argument is split"),
    "no axis": (P("batch"), "names the axis 'batch'; the mesh has 'data'"),
    "one of two": ((P(None, ("data", "x")),), "names the axis 'x'"),
    "other containers": ({"x": P("data")}, "must be a tree like the arguments"),
    "a string": ("data", "such as jax.P.'data'.*got a str: 'data'"),
    "a sharding": (NamedSharding(jax.make_mesh((1,), ("data",)), P("data")), "a NamedSharding"),
}


OTHER_NAMES = rows(r"""
data_parallel | has_aux | jax\.value_and_grad, .* `aux` says here how
data_parallel | donate_argnums | pass it to the jax\.jit around the step
value_and_grad | in_specs | it is `batch_specs` here
value_and_grad | allow_int | its result to jaxcomp.data_parallel
powersgd | average | all reducers average
powersgd | matrix_approximation_rank | it is `rank` here
powersgd | start_powerSGD_iter | it is `start_step` here
batched_powersgd | matrix_approximation_rank | it is `rank` here
batched_powersgd | start_powerSGD_iter | it is `start_step` here
accumulate | every_k_schedule | it is `every_k` here
local_sgd | outer_optimizer | it is `outer` here
local_sgd_round | period | it is `sync_every` here
advise | replicas | it is `workers` here
shard_state | axis | it is `axis_name` here
consolidate | axis | it is `axis_name` here
state_specs | axis_names | it is `axis_name` here
stack_replicas | world_size | it is `replicas` here
check | colour | it has compiled, reducer, params, mesh, allow, steps
""")


@pytest.mark.parametrize(("function", "name", "message"), OTHER_NAMES)
def test_names_of_other_libraries_are_answered_with_ours(function, name, message):
    with pytest.raises(TypeError, match=f"^{function} has no argument {name}: .*{message}"):
        getattr(jaxcomp, function)(**{name: 1})


def test_a_batch_with_texts_is_refused_outside_of_jit():
    run = jaxcomp.value_and_grad(loss, reducer("allreduce"), mesh=grid(2))
    batch = {"x": normal(4, 32), "name": np.array(["a", "b", "c", "d"])}
    with pytest.raises(
        ValueError, match=r"\['name'\] of argument 1 has dtype <U1, .* Leave it out"
    ):
        run((), new_params(), batch)


def test_every_public_function_answers_an_unknown_argument():
    run = jaxcomp.local_sgd_round(print, sync_every=2, axis_name="data")
    functions = [REDUCER.bytes, make().init, make().restore, run.init, run.__call__]
    for module in (jaxcomp, jaxcomp.extend):
        for name in module.__all__:
            # What it does not know itself, this one passes to jax.value_and_grad.
            if name != "local_value_and_grad":
                functions.append(getattr(module, name))
    for function in filter(inspect.isroutine, functions):
        match = f"^{function.__name__} has no argument colour: it has (?!self)"
        with pytest.raises(TypeError, match=match):
            function(colour=1)


@pytest.mark.parametrize(("attempt", "message"), CASES.values(), ids=CASES)
def test_one_sentence(attempt, message):
    with pytest.raises(ValueError, match=message) as error:
        attempt()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(("specs", "message"), SPECS.values(), ids=SPECS)
def test_batch_specs_that_do_not_fit(specs, message):
    with pytest.raises(ValueError, match=message) as error:
        make(batch_specs=specs)(state(), PARAMS, X)
    assert len(str(error.value)) < 400


def test_restore_casts_to_what_the_reducer_keeps():
    params = {"w": jnp.zeros((16, 12))}
    narrow = powersgd(1, residual_dtype=jnp.bfloat16)
    wide = powersgd(1).init(params)
    assert make(tx=narrow).restore(wide, params).residual["w"].dtype == jnp.bfloat16


def test_shapes_of_parameters_are_enough_for_a_state():
    run = make()
    shapes = jax.eval_shape(lambda: PARAMS)
    equal(run.init(shapes), run.init(PARAMS))
    equal(run.restore(REDUCER.init(PARAMS), shapes), run.init(PARAMS))


def test_a_table_is_not_taken_for_a_batch():
    table = jnp.arange(8.0)

    def weighted(params, x, table):
        return loss(params, x) * table[jnp.arange(len(x)) % 8].mean()

    def value(batch_specs):
        run = make(weighted, reducer("allreduce"), batch_specs=batch_specs)
        return stepped(run, PARAMS, X, table)[0]

    with pytest.raises(ValueError, match=r"argument 2 has 8 rows, and .* has 16\. .*batch_specs"):
        value(None)
    with pytest.raises(ValueError, match="has 8 rows"):
        value((None, None))
    assert_allclose(value((P("data"), P())), loss(PARAMS, X) * 1.5, rtol=1e-6)


def averaged(params, x):
    """Makes gradients that are too small, by the number of replicas, and train all the same."""
    return jax.lax.pmean(loss(params, x), "data")


def recurrent(params, x):
    def turn(h, _):
        return jnp.tanh((h + x) @ params["up"]) @ params["down"], None

    return jnp.mean(jax.lax.scan(turn, jnp.zeros(x.shape), length=2)[0] ** 2)


def drawn(params, x):
    widths = jax.random.gamma(jax.random.key(0), jnp.abs(params["up"]) + 1)
    return jnp.mean((x @ widths) ** 2) + loss(params, x)


@pytest.mark.parametrize(
    ("fun", "whole", "error", "message"),
    [
        (averaged, loss, ValueError, "loss is the same on every replica along 'data'"),
        (recurrent, recurrent, TypeError, "check_vma=False"),
        (drawn, drawn, TypeError, "jaxcomp.as_local gives the type to arrays"),
    ],
)
def test_what_the_types_refuse_is_right_without_them(fun, whole, error, message):
    """Differentiates a mean, which becomes a sum there; a loop may begin with zeros."""
    unchecked = make(fun, reducer("allreduce"), check_vma=False)
    close(stepped(unchecked, PARAMS, X)[1], jax.grad(whole)(PARAMS, X), rtol=1e-4)
    with pytest.raises(error) as raised:
        stepped(make(fun, reducer("allreduce")), PARAMS, X)
    assert message in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def test_shardings_within_the_loss_name_the_other_axes_only():
    mesh = grid(2, model=2)

    def call(sharding):
        def constrained(params, x):
            return loss(params, jax.lax.with_sharding_constraint(x, sharding))

        run = make(constrained, reducer("allreduce"), mesh=mesh)
        return jax.eval_shape(run, run.init(PARAMS), PARAMS, X)[0][0]

    both = P("data", "model")
    with jax.set_mesh(mesh):
        for sharding in (NamedSharding(mesh, both), NamedSharding(mesh, P(None, "model")), both):
            with pytest.raises(ValueError, match="Auto") as error:
                call(sharding)
            assert "must not name 'data'" in error.value.__notes__[0]
    assert call(P(None, "model")).shape == ()


def test_differentiating_through_a_call_needs_auto_axes():
    """Differentiates the loss that a call returns, which JAX can do on a mesh with Auto axes."""

    def gradient(kind):
        mesh = jax.make_mesh((2, 2), ("data", "model"), (kind, kind), devices=jax.devices()[:4])
        run = make(tx=reducer("allreduce"), mesh=mesh)
        return jax.jit(jax.grad(lambda params: run((), params, X)[0][0]))(PARAMS)

    close(gradient(AxisType.Auto), jax.grad(loss)(PARAMS, X), rtol=1e-4)
    with pytest.raises(NotImplementedError, match="Closing over inputs") as error:
        gradient(AxisType.Explicit)
    assert "cannot differentiate through this call" in error.value.__notes__[0]


def test_gradients_in_other_containers_need_auto_axes():
    """Makes them as nnx.value_and_grad does, which returns a State for a module."""

    def listed(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, list(gradients.values())

    def gradients(kind):
        mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
        run = jaxcomp.data_parallel(listed, reducer("allreduce"), mesh=mesh)
        return run((), PARAMS, X)[0][1]

    close(gradients(AxisType.Auto), list(jax.grad(loss)(PARAMS, X).values()), rtol=1e-4)
    with pytest.raises(ValueError, match="out_shardings") as error:
        gradients(AxisType.Explicit)
    notes = "".join(error.value.__notes__)
    assert "must have the leaves and containers of the parameters" in notes


MISSPELT = """weights weigths weight_ sampleWeight wgt num_examples wieght ewight waights weigt
wight weigh weighting loss_weihgt Weight example_weights"""


@pytest.mark.parametrize("name", MISSPELT.split())
def test_a_weight_under_another_name_is_not_lost_in_the_loss(name):
    """Calls a loss that takes what it does not know."""
    run = make(lambda params, x, **rest: loss(params, x))
    for call in (functools.partial(run, state()), run.outputs):
        with pytest.raises(ValueError, match=f"no argument `{name}`"):
            call(PARAMS, X, **{name: np.float32(2)})
        with pytest.raises(ValueError, match=f"no argument `{name}`"):
            call(PARAMS, X, **{name: np.ones(len(X))})


def test_what_is_near_weight_or_what_the_loss_names_itself_goes_to_it():
    near = ("height", "width", "weight_decay", "wavelength", "growth")

    def loss_of_more(params, x, weights, **named):
        assert set(named) == set(near)
        return loss(params, x) * weights

    named = dict.fromkeys(near, np.float32(1))
    value, _ = stepped(make(loss_of_more), PARAMS, X, weights=np.float32(2), **named)
    assert_allclose(value, 2 * loss(PARAMS, X), rtol=1e-6)


@pytest.mark.parametrize(
    "weight", [np.ones(8, np.complex64), jax.random.split(jax.random.key(0), 8)]
)
def test_weights_that_are_no_real_numbers_are_refused(weight):
    with pytest.raises(ValueError, match="`weight` must hold real numbers"):
        make(loss)(state(), PARAMS, X, weight=weight)


def test_weights_may_be_a_list_which_jit_makes_one_of_tracers():
    step = make()
    (value, _), _ = jax.jit(step)(state(), PARAMS, X, weight=[1, 2, 0, 3])
    (expected, _), _ = jax.jit(step)(state(), PARAMS, X, weight=np.array([1, 2, 0, 3]))
    assert value == expected


def test_a_negative_weight_is_not_lost_in_the_sum_of_others():
    weight = np.ones(len(X), np.float32)
    weight[1] = -0.5
    _, gradients = stepped(make(loss), PARAMS, X, weight=weight)
    assert all(np.isnan(leaf).all() or not leaf.any() for leaf in jax.tree.leaves(gradients))


def test_gradients_of_other_shapes_than_the_parameters_are_refused():
    def one_each(params, x):
        gradient_of = jax.vmap(jax.grad(loss), in_axes=(None, 0))
        return loss(params, x), gradient_of(params, x[:, None])

    run = jaxcomp.data_parallel(one_each, reducer("allreduce"), mesh=MESH)
    with pytest.raises(ValueError, match="averaged over this replica's examples"):
        run(run.init(PARAMS), PARAMS, X)
