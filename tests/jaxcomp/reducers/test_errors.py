"""Unusable arguments and gradients: one clear sentence, when built or traced."""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.leaves import zeros
from tests.helpers.reducers import allreduce, batched, feedback, powersgd, quantized
from tests.helpers.runners import AXIS, sharded, updated


@pytest.mark.parametrize(
    ("argument", "values", "message"),
    [
        ("rank", [0, 1.5, True, None], "must be a positive integer"),
        ("start_step", [-1, 0.5], "must be a non-negative integer, got "),
        ("min_compression_rate", [-1.0, float("nan")], ""),
        (
            "comm_dtype",
            ["int7", jnp.int16, {"w": jnp.int8}],
            "must be one of float32, bfloat16, float16, int8, int6",
        ),
        ("residual_dtype", ["nonsense", "float16"], "must be one of float32, bfloat16"),
        ("matrix_dims", [jaxcomp.MatrixDims((), (0,), (1,))], "must be a function"),
        ("eps", [-1e-8, "small"], ""),
        ("error_feedback", ["yes"], "must be True or False"),
        ("warm_start", [1], "must be True or False"),
        ("seed", [-1, jax.random.key(0), jnp.arange(2)], ""),
        ("axis_name", ["", (), ("a", "a"), 3], ""),
    ],
)
def test_powersgd_refuses_when_built(argument, values, message):
    for value in values:
        with pytest.raises(ValueError, match=f"`{argument}` {message}"):
            jaxcomp.powersgd(**{"axis_name": AXIS, argument: value})


def averaged_when(value):
    return jax.vmap(lambda x: jaxcomp.average(x, AXIS, when=value), axis_name=AXIS)(jnp.ones(2))


def first_update(tx):
    """Calls the update of two replicas, outside of jit, so that a schedule returns numbers."""
    params = zeros({"w": (24, 16)})
    grads = zeros({"w": (2, 24, 16)})
    return jax.vmap(lambda g: tx.update(g, tx.init(params), params), axis_name=AXIS)(grads)


SGD = optax.sgd(0.1)
LINK = {"workers": 4, "bandwidth": "1Gbit", "step_time": "20ms"}
MATRIX = jax.random.normal(jax.random.key(0), (24, 16))
local_adam = functools.partial(jaxcomp.scale_by_local_adam, axis_name=AXIS)
local_sgd = functools.partial(jaxcomp.local_sgd, axis_name=AXIS)
# Each function with the arguments for which it gets one of the numbers; it must refuse all of them.
NUMBERS = [math.nan, math.inf, -1, True, "four", 1 + 1j, np.array([2, 3]), jax.random.key(0)]
TAKES_A_NUMBER = {
    "b1": lambda x: local_adam(b1=x),
    "b2": lambda x: local_adam(b2=x),
    "eps": lambda x: local_adam(eps=x),
    "decay": lambda x: first_update(feedback(allreduce(), decay=lambda count: x)),
    "sync_every": lambda x: first_update(local_sgd(SGD, sync_every=lambda count: x)),
    "fragment_update_alpha": lambda x: jaxcomp.local_sgd_round(
        print, sync_every=4, axis_name=AXIS, fragment_update_alpha=x
    ),
    "replicas": lambda x: jaxcomp.extend.BlockLayout.of(100, x, 8),
    "block_size": lambda x: jaxcomp.extend.BlockLayout.of(100, 2, x),
    "rank": lambda x: jaxcomp.extend.plan_leaves(MATRIX, x, 2.0),
    "min_compression_rate": lambda x: jaxcomp.extend.is_compressed(24, 16, 1, x),
    "ratio": lambda x: jaxcomp.ranks_by_spectrum(MATRIX, ratio=x),
    "bandwidth": lambda x: jaxcomp.advise("124M", **LINK | {"bandwidth": x}),
    "step_time": lambda x: jaxcomp.advise("124M", **LINK | {"step_time": x}),
    "tokens": lambda x: jaxcomp.advise("124M", **LINK, tokens=x),
}


@pytest.mark.parametrize("value", NUMBERS, ids=str)
@pytest.mark.parametrize("argument", TAKES_A_NUMBER)
def test_numbers_outside_of_their_range_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=f"^`{argument}` must be "):
        TAKES_A_NUMBER[argument](value)


def test_bounds_are_told():
    with pytest.raises(ValueError, match="`b1` must be a finite number, at least 0 and below 1, g"):
        local_adam(b1=1.0)
    with pytest.raises(ValueError, match=r"`decay` must be .*, at least 0 and at most 1, got 1"):
        first_update(feedback(allreduce(), decay=lambda count: 1.5))
    with pytest.raises(ValueError, match="`eps` must be a finite number"):
        jax.jit(lambda eps: jaxcomp.extend.orthogonalize(MATRIX[:, :2], eps))(jnp.ones(2))
    for value in (0.5, 1, "yes", jnp.array([True, True])):
        with pytest.raises(ValueError, match="`when` must be a single True or False"):
            averaged_when(value)
    for value in (True, np.True_, jnp.array(True)):
        assert averaged_when(value).tolist() == [1.0, 1.0]


OVERFLOWS = ": a sum of 8-bit integers overflows. Use jaxcomp.quantized_allreduce, or jax"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: feedback(allreduce(), decay=1.5), "`decay`"),
        (lambda: feedback(allreduce(), every=0), "`every`"),
        (lambda: feedback(jaxcomp.allreduce), "got allreduce. Call one first"),
        (lambda: feedback(optax.identity()), "wrap an average of yours in jaxcomp."),
        (lambda: jaxcomp.stacked(), "`stacked` takes names"),
        (lambda: allreduce(comm_dtype="int4"), "`comm_dtype`"),
        (lambda: allreduce(axis_name=None), "`axis_name`"),
        (lambda: allreduce(comm_dtype=jnp.int8), OVERFLOWS),
        (lambda: batched(comm_dtype="int8"), OVERFLOWS),
        (lambda: quantized(block_size=0), "`block_size` must be a positive integer"),
        (
            lambda: jaxcomp.allreduce(axis_name=AXIS, comm_dtype=np.array(["float16"])),
            "`comm_dtype` must be one of",
        ),
        (
            lambda: powersgd(2).init({"w": np.array(["a"])}),
            "['w'] is a ndarray of <U1 and not an array",
        ),
        (lambda: powersgd(2**70), "`rank` must be below 2,147,483,648, got rank=11"),
        (lambda: powersgd(2, start_step=10**10), "`start_step` must be below 2,147,483,648"),
        (lambda: powersgd(2, seed=2**70), "`seed` must be below 9,2"),
        (lambda: powersgd(lambda path: 4), "`rank` must be a function of (path, leaf), got"),
        (lambda: powersgd(2, matrix_dims=lambda: None), "must be a function of (path, leaf) or N"),
        (lambda: feedback(allreduce(), decay=lambda: 1.0), "`decay` must be a function of (coun"),
        (lambda: local_sgd(SGD, sync_every=lambda: 4), "`sync_every` must be a function of (cou"),
        (lambda: jaxcomp.extend.is_compressed("64", 64, 4, 2.0), "`rows` must be a non-negative"),
        (lambda: jaxcomp.extend.orthogonalize("matrix"), "with r <= n, got a str of shape ()"),
        (lambda: jaxcomp.extend.orthogonalize(MATRIX.T), "got a float32 of shape (16, 24)"),
        (lambda: jaxcomp.extend.with_leaves({"w": MATRIX}, []), "each of the 1 floating leaves"),
        (lambda: powersgd(2).init({"name": "resnet"}), "['name'] is a str and not"),
        (lambda: feedback(allreduce()).init({"name": "resnet"}), "['name'] is a str and not"),
        (lambda: batched().init(["resnet"]), "[0] is a str and not"),
        (lambda: allreduce().init({"layers": [jnp.sin]}), "[0] is a PjitFunction and not"),
    ],
)
def test_the_others_refuse(build, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build()


@pytest.mark.parametrize("tx", [powersgd(2), batched(2), feedback(quantized())])
def test_a_second_residual_is_refused_when_built(tx):
    with pytest.raises(ValueError, match=r"keeps a residual of its own.*error_feedback=False"):
        feedback(tx)


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (powersgd(2, matrix_dims=jaxcomp.stacked("block")), "'block'.*names no part of .*blocks"),
        # The rank is looked at before it is asked how the leaf is a matrix.
        (
            powersgd(lambda *_: 0, matrix_dims=lambda *_: None),
            r"positive integer or None, got 0 for the leaf \['blocks'\]",
        ),
        (
            optax.inject_hyperparams(jaxcomp.powersgd)(rank=2, axis_name=AXIS),
            r"static_args=\('rank', ...\)",
        ),
    ],
)
def test_init_refuses(tx, words):
    with pytest.raises(ValueError, match=words):
        tx.init({"blocks": {"kernel": jnp.zeros((3, 16, 16))}})


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"blocks": (24, 16)}, r"would compress nothing in \['blocks'\].*shape \(24, 16\)"),
        ({"blocks": {"w": (24, 16), "b": (24,)}}, r"nothing in .*\['blocks'\]\['w'\] of shape"),
        ({"blocks": {"w": (3, 24, 16), "head": (24, 16)}}, r"differ: .*\['head'\] of shape"),
        ({"blocks": {"w": (3, 24, 16), "scale": ()}}, r"differ: .*\['scale'\] of shape \(\)"),
    ],
    ids=["a matrix", "one layer", "a leaf beside the layers", "a scalar"],
)
def test_stacked_refuses_leaves_without_an_axis_of_layers(shapes, words):
    tx = powersgd(2, matrix_dims=jaxcomp.stacked("blocks"))
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    with pytest.raises(ValueError, match=words):
        tx.init(params)
    with pytest.raises(ValueError, match="`matrix_dims` must be a function"):
        jaxcomp.stacked("blocks", matrix_dims="blocks")


def test_stacked_warns_of_layers_that_no_rank_compresses():
    """At rank 1 the factors of (8, 4) have 12 values, less than half of 32."""
    tx = powersgd(1, matrix_dims=jaxcomp.stacked("blocks"))
    tx.init({"blocks": {"w": jnp.zeros((3, 8, 4))}})
    words = r"compresses nothing of \['blocks'\]\['w'\] of shape \(3, 4, 4\)"
    with pytest.warns(UserWarning, match=words):
        tx.init({"blocks": {"w": jnp.zeros((3, 4, 4)), "large": jnp.zeros((3, 16, 16))}})


TX = powersgd(2)
TWO = {"a": (16, 16), "b": (20, 20)}
STATE = TX.init(zeros(TWO))
OTHER = TX.init(zeros({"c": (16, 16)}))
FED_BACK = feedback(allreduce())
RESIDUAL = FED_BACK.init(zeros({"w": (4, 3)}))


@pytest.mark.parametrize(
    ("tx", "state", "shapes", "words"),
    [
        (
            powersgd(1), STATE, TWO,
            # No word of an axis of replicas, and every leaf.
            r"(?s)does not fit(?!.*axis of replicas).*q\['a'\]: expected \(16, 1\), got \(16, 2\)"
            r".*q\['b'\]",
        ),
        (
            TX, OTHER, TWO,
            r"(?s)q\['a'\]: only the par.*q\['c'\]: only the state has(?!.*adapt)",
        ),
        (
            TX, STATE._replace(q={"a": STATE.q["a"]}), TWO,
            r"q\['b'\]: only the parameters have this leaf",
        ),
        (
            TX, jaxcomp.stack_replicas(STATE, 2), TWO,
            r"residual\['a'\].*rows of 2 replicas.*shard_state",
        ),
        (
            FED_BACK, RESIDUAL, {"w": (2, 3)},
            r"(?s)residual\['w'\]: expected \(2, 3\), got \(4, 3\).*Make the state with init",
        ),
        (
            powersgd(2, min_compression_rate=9), STATE, TWO,
            r"(?s)residual\['a'\]: expected none, got .*convert it with jaxcomp.adapt_state",
        ),
        (FED_BACK, RESIDUAL, {"v": (4, 3)}, r"residual\['w'\]: only the state has this leaf"),
        (
            TX, TX.init(zeros(TWO | {"bias": (3,)})), TWO,
            r"(?s)q\['bias'\]: only the state has(?!.*axis of replicas)",
        ),
        (TX, STATE, TWO | {"bias": (3,)}, r"q\['bias'\]: only the parameters have this leaf"),
    ],
    ids=["rank", "tree", "a factor", "rows", "shape", "masked", "name", "no gradient", "no place"],
)  # fmt: skip
def test_a_state_that_does_not_fit_the_gradients_is_refused(tx, state, shapes, words):
    grads = {name: jnp.zeros((2, *shape)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS), grads, state)


class Moving(NamedTuple):
    """State of a reducer that a user wrote."""

    momentum: jax.Array
    residuals_expected: jax.Array

    per_replica = ("momentum",)


@pytest.mark.parametrize(("field", "advised"), [("momentum", True), ("residuals_expected", False)])
def test_only_per_replica_leaves_are_told_of_an_axis_of_replicas(field, advised):
    def init(params):
        return Moving(jnp.zeros(3), jnp.zeros(3))

    tx = jaxcomp.Reducer(init, lambda updates, state, params=None: None, AXIS)
    state = init(None)._replace(**{field: jnp.zeros((5, 1, 3))})
    with pytest.raises(ValueError, match=rf"{field}: expected \(3,\), got") as error:
        jax.vmap(lambda g: tx.update(g, state)[0], axis_name=AXIS)(jnp.ones((2, 3)))
    assert ("axis of replicas" in str(error.value)) == advised


def test_what_a_users_reducer_returns_has_the_names_of_the_gradients():
    """By position, the gradients of two leaves would be swapped without a word."""

    def renamed(updates, state, params=None, **extra_args):
        other = {"z": updates["a"], "b": updates["b"]}
        return jaxcomp.Reduction(other, state, other, jnp.array(True))

    tx = jaxcomp.Reducer(lambda params: optax.EmptyState(), renamed, AXIS)
    with pytest.raises(ValueError, match="'z'"):
        updated(tx, {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))})


def plain(updates):
    return jaxcomp.Reduction(updates, optax.EmptyState(), updates, jnp.array(True))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda updates: (updates, optax.EmptyState()),
            "must return a jaxcomp.Reduction, got a tu",
        ),
        (lambda updates: None, "must return a jaxcomp.Reduction, got a NoneType"),
        (
            lambda updates: plain(updates)._replace(updates={"a": updates["a"][:1]}),
            r"`updates` of a Reduction must .*\(2, 3\)}, got {.*: \(1, 3\)}",
        ),
        (lambda updates: plain(updates)._replace(sent=None), "`sent` of a Reduction must have the"),
        (lambda updates: plain(updates)._replace(finite=None), "`finite` of .* got None"),
        (
            lambda updates: plain(updates)._replace(finite=1.0),
            "`finite` of a Reduction must be a b",
        ),
    ],
)
def test_what_a_users_reducer_must_not_return(function, words):
    def reduce(updates, state, params=None, **extra_args):
        return function(updates)

    tx = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, AXIS)
    with pytest.raises(ValueError, match=words):
        updated(tx, {"a": jnp.ones((4, 2, 3))})


def test_a_reducer_is_made_of_functions():
    with pytest.raises(
        ValueError, match=r"`reduce` must be a function of \(updates, state, params\), got N"
    ):
        jaxcomp.Reducer(optax.init_empty_state, None, AXIS)  # type: ignore[arg-type]


def test_a_gradient_of_another_shape_is_told_before_what_is_the_same_everywhere():
    def step(params):
        return TX.update({"w": jnp.zeros((3, 3))}, TX.init(params), params)

    mapped = sharded(2, step, jax.P(), jax.P())
    with pytest.raises(ValueError, match=r"gradient of \['w'\] has shape \(3, 3\), the parameter"):
        jax.eval_shape(mapped, {"w": jnp.zeros((4, 4))})
    with pytest.raises(ValueError, match=r"If it is a constant, mark it: jaxcomp\.as_local"):
        jax.eval_shape(mapped, {"w": jnp.zeros((3, 3))})


def test_gradients_that_are_summed_already_are_refused_with_a_remedy_for_all_axes():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    tx = jaxcomp.allreduce(axis_name=("a", "b"))
    for varies, along in ((jax.P(), "a"), (jax.P("a"), "b")):
        run = sharded(mesh, lambda g: tx.update(g, optax.EmptyState())[0], varies, jax.P())
        remedy = rf"along '{along}'.*local_value_and_grad\(loss, \('a', 'b'\)\)"
        with pytest.raises(ValueError, match=remedy):
            run(jnp.ones(4))
