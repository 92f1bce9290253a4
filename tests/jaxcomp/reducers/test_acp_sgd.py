"""`acp_sgd`: one factor and one all-reduce a step."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives
from leaves import COMPRESSED, SHAPES, as_matrix, random_grads, zeros
from reference import Alternating
from runners import AXIS, MAPPINGS, lower_update, simulate

import jaxcomp

# Always the same one for the same arguments, so that tests share what is compiled for it.
shared = functools.cache(jaxcomp.acp_sgd)


def reducer(rank=2, start_step=0, **kwargs):
    return shared(rank, axis_name=AXIS, start_step=start_step, **kwargs)


@pytest.mark.parametrize(("mapping", "rank"), [("vmap", 1), *((m, 4) for m in MAPPINGS)])
def test_equals_the_numpy_reference(mapping, rank):
    n, steps = 3, 7
    grads = random_grads(SHAPES, n, steps)
    tx = reducer(rank, min_compression_rate=1.0)
    state = tx.init(zeros())
    outputs, final = simulate(mapping, tx, grads, state)
    for name in COMPRESSED:
        matrices = as_matrix(name, grads[name])
        reference = Alternating(n, *matrices.shape[2:], state.q[name])
        for t in range(steps):
            expected = reference.step(matrices[:, t])
            np.testing.assert_allclose(as_matrix(name, outputs[name][t]), expected, atol=3e-5)
        residual = as_matrix(name, final.residual[name])
        np.testing.assert_allclose(residual, reference.residual, atol=3e-5)
        for factor, expected in ((final.p[name], reference.p), (final.q[name], reference.q)):
            np.testing.assert_allclose(np.abs(factor), np.abs(expected), atol=2e-4)
    np.testing.assert_allclose(outputs["bias"], grads["bias"].mean(0), rtol=1e-6)
    assert isinstance(final.p["bias"], optax.MaskedNode)
    assert int(final.count) == steps


def test_each_side_takes_one_all_reduce():
    params = {f"layer_{i}": jnp.zeros((64, 32)) for i in range(5)} | {"bias": jnp.zeros(8)}
    tx = reducer()
    # One in each branch of the conditional, of which a step takes one.
    assert sorted(collectives(lower_update(tx, params, 4).compile().as_text())) == [
        ("all-reduce", "f32", 5 * 2 * 32 + 8),
        ("all-reduce", "f32", 5 * 2 * 64 + 8),
    ]
    two_sided = jaxcomp.powersgd(2, axis_name=AXIS).bytes(params)
    assert tx.bytes(params).bytes_after - 32 == (two_sided.bytes_after - 32) // 2
