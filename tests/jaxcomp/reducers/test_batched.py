"""`batched_powersgd` against the nine steps in the documentation of torch's hook."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import random_grads
from runners import AXIS, MAPPINGS, simulate

import jaxcomp

SHAPES = {"bias": (7,), "dense": (9, 5), "kernel": (2, 3, 4, 3)}


class NineSteps:
    """torch's documentation of batched_powerSGD_hook, step by step, in float64.

    The residual is the replica's own, as everywhere in this package; outputs do not depend on it.
    """

    def __init__(self, n, size, q):
        self.side = int(np.ceil(np.sqrt(size)))
        self.errors = np.zeros((n, self.side, self.side))
        self.q = np.asarray(q, np.float64)

    def step(self, vectors):
        matrices = np.zeros_like(self.errors)
        for matrix, vector in zip(matrices, vectors, strict=True):  # 1: square, padded with zeros
            matrix.reshape(-1)[: vector.size] = vector
        matrices += self.errors
        q = np.linalg.qr(self.q)[0]  # 2: Q, orthogonalised
        p = (matrices @ q).sum(0)  # 3, 4: P = MQ, all-reduced
        p = np.linalg.qr(p)[0]  # 5: orthogonalised
        own = matrices.transpose(0, 2, 1) @ p  # 6: Q = M^T P
        self.q = own.mean(0)  # 7: all-reduced
        self.errors = matrices - p @ own.transpose(0, 2, 1)
        return (p @ self.q.T).reshape(-1)[: vectors.shape[1]]  # 8, 9: M = P Q^T, truncated


@pytest.mark.parametrize(("mapping", "rank"), [("vmap", 1), *((m, 3) for m in MAPPINGS)])
def test_equals_the_nine_steps(mapping, rank):
    n, steps = 3, 4
    grads = random_grads(SHAPES, n, steps)
    tx = jaxcomp.batched_powersgd(rank, axis_name=AXIS, start_step=0)
    state = tx.init(jax.tree.map(lambda x: x[0, 0], grads))

    def flat(tree, keep):
        parts = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
        return np.concatenate([x.reshape(*x.shape[:keep], -1) for x in parts], axis=-1)

    vectors = flat(grads, 2)
    oracle = NineSteps(n, vectors.shape[-1], state.q)
    outputs, final = simulate(mapping, tx, grads, state)
    for t in range(steps):
        np.testing.assert_allclose(flat(outputs, 1)[t], oracle.step(vectors[:, t]), atol=2e-5)
    np.testing.assert_allclose(final.residual, oracle.errors, atol=2e-5)


def test_leaves_of_other_dtypes():
    grads = {"a": jnp.ones((2, 1, 3), jnp.bfloat16), "b": jnp.ones((2, 1, 4, 4), jnp.float32)}
    tx = jaxcomp.batched_powersgd(5, axis_name=AXIS, start_step=0)
    outputs, _ = simulate("vmap", tx, grads, tx.init({"a": jnp.zeros(3), "b": jnp.zeros((4, 4))}))
    assert outputs["a"].dtype == jnp.bfloat16
    np.testing.assert_allclose(outputs["b"], 1, atol=1e-5)
