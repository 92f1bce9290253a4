"""The kernels for GPUs, interpreted: the same values as plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import random_grads
from runners import AXIS, simulate

import jaxcomp
from jaxcomp._lowrank import kernels
from jaxcomp._lowrank.cholesky_qr import inverse_factors
from jaxcomp._lowrank.grouped import Grouped
from jaxcomp._lowrank.matricize import default_matrix_dims
from jaxcomp._reducers.powersgd_step import Step

LEAVES, BATCH, A, B = 2, 1, 20, 133  # no multiple of any tile


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def close(found, wanted, atol=3e-4):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=atol)


@pytest.mark.parametrize("contract_last", [True, False])
@pytest.mark.parametrize("rank", [3, 9])
def test_sum_and_product_of_one_pass(rank, contract_last):
    gradients = [normal(i, BATCH, A, B) for i in range(LEAVES)]
    residuals = [normal(10 + i, BATCH, A, B).astype(jnp.bfloat16) for i in range(LEAVES)]
    factors = normal(20, LEAVES * BATCH, B if contract_last else A, rank)
    sums, product = kernels.multiply(
        list(zip(gradients, residuals, strict=True)),
        factors,
        contract_last=contract_last,
        scale=jnp.float32(0.5),
        interpret=True,
    )
    totals = jnp.stack(gradients) + 0.5 * jnp.stack(residuals).astype(jnp.float32)
    close(jnp.stack(sums), totals, atol=1e-6)
    form = "mab,mbr->mar" if contract_last else "mab,mar->mbr"
    close(product, jnp.einsum(form, totals.reshape(-1, A, B), factors, precision="highest"))


@pytest.mark.parametrize("rank", [2, 40])
@pytest.mark.parametrize("commit", [True, False])
def test_outer_products_and_what_they_leave(rank, commit):
    first, second = normal(0, LEAVES * BATCH, A, rank), normal(1, LEAVES * BATCH, B, rank)
    product = jnp.einsum("mar,mbr->mab", first, second, precision="highest")
    product = product.reshape(LEAVES, BATCH, A, B)
    close(jnp.stack(kernels.outer(first, second, LEAVES, jnp.float32, interpret=True)), product)
    totals, olds = normal(2, LEAVES, BATCH, A, B), normal(3, LEAVES, BATCH, A, B)
    for kept in (None, jnp.float32(0.25)):
        found = kernels.unsent(
            list(totals), list(olds), first, second, jnp.array(commit), kept, interpret=True
        )
        wanted = totals - product + (0 if kept is None else kept * olds)
        close(jnp.stack(found), wanted if commit else olds, atol=3e-4 if commit else 0)


@pytest.mark.parametrize("rank", [1, 5, 16])
def test_factors_of_gram_matrices(rank):
    x = normal(0, 3, 40, rank).at[1, :, -1].set(0)
    gram = x.mT @ x
    found, lost = kernels.inverse_factors(gram, jnp.float32(0), interpret=True)
    wanted, flags = inverse_factors(gram, jnp.float32(0))
    close(found, wanted, atol=1e-6)
    np.testing.assert_array_equal(lost, flags)
    assert lost.sum() == 1


def test_pieces_of_a_vector():
    sizes = [5, 1, 2000]
    flat = jnp.arange(sum(sizes), dtype=jnp.float32)
    found = kernels.separate(flat, tuple(sizes), interpret=True)
    for piece, wanted in zip(found, jnp.split(flat, [5, 6]), strict=True):
        np.testing.assert_array_equal(piece, wanted)


SHAPES = {"a": (20, 24), "b": (20, 24), "embedding": (50, 12), "stack": (3, 16, 18), "bias": (7,)}
SHAPES |= {"turned": (6, 20, 5)}


def dims(path, leaf):
    """Each of several matrices by itself; and an order that no reshape gives."""
    if path[0].key == "stack":
        return jaxcomp.MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    if path[0].key == "turned":
        return jaxcomp.MatrixDims(rows=(0, 2), cols=(1,))
    return default_matrix_dims(path, leaf)


@pytest.mark.parametrize(
    "options",
    [
        {"start_step": 2},
        {"alternating": True, "comm_dtype": jnp.bfloat16},
        {"feedback_every": 2, "residual_dtype": jnp.bfloat16, "error_decay": 0.5},
        {"comm_dtype": jnp.int8, "bad": True},
        {"buckets": 3},
    ],
)
def test_an_update_on_a_gpu_is_that_on_a_cpu(options, monkeypatch):
    """Under pmap: the interpreter cannot tell the types of shard_map's check_vma; XLA needs not."""
    options = {"start_step": 0, "matrix_dims": dims, "min_compression_rate": 0.5} | options
    grads = random_grads(SHAPES, 2, 3)
    if options.pop("bad", False):
        grads["a"][1, 2, 0, 0] = np.nan
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    plain_run, results = Step._run, []
    for interpreted in (False, True):

        def run(self, *arguments, interpreted=interpreted):
            step = self.with_kernels(Grouped(interpret=True)) if interpreted else self
            return plain_run(step, *arguments)

        monkeypatch.setattr(Step, "run", run)
        tx = jaxcomp.powersgd(3, axis_name=AXIS, **options)
        results.append(simulate("pmap", tx, grads, tx.init(zeros)))
    (outputs, state), (other_outputs, other_state) = results
    atol = 0.05 if options.get("residual_dtype") or options.get("comm_dtype") else 1e-4
    jax.tree.map(lambda a, b: close(a, b, atol), outputs, other_outputs)
    # Factors are those of another basis of the same columns: their residuals agree.
    as_float = lambda x: np.asarray(x, np.float32)  # noqa: E731
    for a, b in zip(*map(jax.tree.leaves, (state.residual, other_state.residual)), strict=True):
        close(as_float(a), as_float(b), atol)
    assert int(state.count) == int(other_state.count)
