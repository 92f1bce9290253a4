"""Unusable arguments and gradients: one clear sentence, when built or traced."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from runners import AXIS, simulate

import jaxcomp


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "`rank` must be a positive integer, got rank=0"),
        ({"rank": 1.5}, "`rank` must be a positive integer"),
        ({"rank": True}, "`rank`"),
        ({"rank": None}, "`rank`"),
        ({"start_step": -1}, "`start_step` must be a non-negative integer, got start_step=-1"),
        ({"start_step": 0.5}, "`start_step`"),
        ({"min_compression_rate": -1.0}, "`min_compression_rate`"),
        ({"min_compression_rate": float("nan")}, "`min_compression_rate`"),
        (
            {"comm_dtype": "int7"},
            "`comm_dtype` must be one of float32, bfloat16, float16, int8, int6",
        ),
        ({"comm_dtype": jnp.int16}, "`comm_dtype`"),
        ({"residual_dtype": "nonsense"}, "`residual_dtype`"),
        ({"residual_dtype": "float16"}, "`residual_dtype` must be one of float32, bfloat16"),
        ({"matrix_dims": jaxcomp.MatrixDims((), (0,), (1,))}, "`matrix_dims` must be a function"),
        ({"eps": -1e-8}, "`eps`"),
        ({"eps": "small"}, "`eps`"),
        ({"error_feedback": "yes"}, "`error_feedback` must be True or False"),
        ({"warm_start": 1}, "`warm_start`"),
        ({"seed": -1}, "`seed`"),
        ({"axis_name": ""}, "`axis_name`"),
        ({"axis_name": ()}, "`axis_name`"),
        ({"axis_name": ("a", "a")}, "`axis_name`"),
        ({"axis_name": 3}, "`axis_name`"),
    ],
)
def test_powersgd_refuses_when_built(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        jaxcomp.powersgd(**{"axis_name": AXIS, **arguments})


def test_a_state_of_another_rank_lists_every_leaf():
    params = {"a": jnp.zeros((16, 16)), "b": jnp.zeros((20, 20)), "c": jnp.zeros(3)}
    old = jaxcomp.powersgd(1, axis_name=AXIS, start_step=0).init(params)
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    grads = jax.tree.map(lambda p: jnp.zeros((2, 1, *p.shape)), params)
    with pytest.raises(ValueError, match="does not fit") as caught:
        simulate("vmap", tx, grads, old)
    assert "q['a']: expected (16, 2), got (16, 1)" in str(caught.value)
    assert "q['b']" in str(caught.value)


def test_a_state_of_another_tree_is_refused():
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    state = tx.init({"a": jnp.zeros((16, 16))})
    grads = {"b": jnp.zeros((2, 1, 16, 16))}
    with pytest.raises(ValueError, match=r"gradients \['b'\], only in the state \['a'\]"):
        simulate("vmap", tx, grads, state)


def test_a_residual_of_other_shapes_or_another_tree_is_refused():
    tx = jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS))
    update = jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS)
    state = tx.init({"w": jnp.zeros((4, 3))})
    with pytest.raises(ValueError, match=r"residual\['w'\]: expected \(2, 3\), got \(4, 3\)"):
        update({"w": jnp.zeros((2, 2, 3))}, state)
    with pytest.raises(ValueError, match="different tree structures"):
        update({"v": jnp.zeros((2, 2, 3))}, state)


def test_a_residual_that_was_not_sharded_says_how():
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    state = jaxcomp.stack_replicas(tx.init({"w": jnp.zeros((16, 16))}), 2)
    step = jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS)  # the state is not mapped
    with pytest.raises(ValueError, match=r"residual\['w'\].*rows of 2 replicas.*shard_state"):
        step({"w": jnp.zeros((2, 16, 16))}, state)


OVERFLOWS = ": a sum of 8-bit integers overflows. Use jaxcomp.quantized_allreduce, or jax"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS), decay=1.5), "`decay`"),
        (lambda: jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS), every=0), "`every`"),
        (lambda: jaxcomp.error_feedback(jaxcomp.allreduce), "got allreduce. Call one first"),
        (lambda: jaxcomp.error_feedback(optax.identity()), "wrap an average of yours in jaxcomp."),
        (lambda: jaxcomp.stacked(), "`stacked` takes names"),
        (lambda: jaxcomp.allreduce(axis_name=AXIS, comm_dtype="int4"), "`comm_dtype`"),
        (lambda: jaxcomp.allreduce(axis_name=None), "`axis_name`"),
        (lambda: jaxcomp.allreduce(axis_name=AXIS, comm_dtype=jnp.int8), OVERFLOWS),
        (lambda: jaxcomp.batched_powersgd(axis_name=AXIS, comm_dtype="int8"), OVERFLOWS),
        (
            lambda: jaxcomp.quantized_allreduce(axis_name=AXIS, block_size=0),
            "`block_size` must be a positive integer",
        ),
    ],
)
def test_the_others_refuse_when_built(build, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build()


POWERSGD = functools.partial(jaxcomp.powersgd, 2, axis_name=AXIS)
FEEDBACK, INT8 = jaxcomp.error_feedback, jaxcomp.quantized_allreduce(axis_name=AXIS)
SECOND = r"keeps a residual of its own.*error_feedback=False"


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (FEEDBACK(POWERSGD()), SECOND),
        (FEEDBACK(jaxcomp.batched_powersgd(2, axis_name=AXIS)), SECOND),
        (FEEDBACK(FEEDBACK(INT8)), SECOND),
        (POWERSGD(matrix_dims=jaxcomp.stacked("block")), "'block'.*names no part of .*blocks"),
        (
            optax.inject_hyperparams(jaxcomp.powersgd)(rank=2, axis_name=AXIS),
            r"static_args=\('rank', ...\)",
        ),
    ],
)
def test_init_refuses(tx, words):
    with pytest.raises(ValueError, match=words):
        tx.init({"blocks": {"kernel": jnp.zeros((3, 16, 16))}})


def test_a_leaf_that_is_no_array_is_named_by_init_too():
    with pytest.raises(ValueError, match=r"\['name'\] is a str and no array"):
        POWERSGD().init({"name": "resnet"})


@pytest.mark.parametrize("make", [jaxcomp.powersgd, jaxcomp.acp_sgd, jaxcomp.batched_powersgd])
def test_torchs_names_are_answered_with_ours(make):
    with pytest.raises(TypeError, match=r"matrix_approximation_rank: it is `rank` here"):
        make(axis_name=AXIS, matrix_approximation_rank=2)
    with pytest.raises(TypeError, match=r"start_powerSGD_iter: it is `start_step` here"):
        make(2, axis_name=AXIS, start_powerSGD_iter=2)
    with pytest.raises(TypeError, match=f"{make.__name__} has no argument colour"):
        make(2, axis_name=AXIS, colour="blue")


def test_a_state_that_lacks_a_factor_is_told_by_it():
    tx = jaxcomp.powersgd(2, axis_name=AXIS, start_step=0)
    params = {"a": jnp.zeros((16, 16)), "b": jnp.zeros((20, 20))}
    state = tx.init(params)
    grads = jax.tree.map(lambda p: jnp.zeros((2, *p.shape)), params)
    update = jax.vmap(tx.update, in_axes=(0, None), axis_name=AXIS)
    with pytest.raises(ValueError, match=r"'s q have different.*only among the gradients \['b'\]"):
        update(grads, state._replace(q={"a": state.q["a"]}))
    with pytest.raises(ValueError, match="does not fit") as caught:
        update(grads, state._replace(q=state.q | {"b": state.q["b"][:, :1]}))
    assert "axis of replicas" not in str(caught.value)
