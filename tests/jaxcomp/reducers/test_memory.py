"""Memory beside the arguments, read from the compiled program, and what keeps it small.

Large arrays take other ways than the small ones of the other tests: operands of their own in an
all-reduce, residuals block by block. Here the limits are lowered, so that small arrays take them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from leaves import random_grads, with_value
from runners import AXIS, MAPPINGS, mesh_of, placed, simulate
from xla import users_program

import jaxcomp
from jaxcomp._lowrank import matrices
from jaxcomp._lowrank.matrices import default_matrix_dims
from jaxcomp._mesh import collectives

MANY = {f"layer_{i}": (1024, 1024) for i in range(10)}
SHAPES = {"kernel": (26, 40), "conv": (3, 3, 4, 14), "embedding": (50, 12), "bias": (16,)}


def lowered(tx, shapes, n=2):
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(tx.init, grads)
    specs = jaxcomp.state_specs(state, AXIS)
    laid_out = {
        name: jax.ShapeDtypeStruct((n * x.shape[0], *x.shape[1:]), x.dtype)
        for name, x in grads.items()
    }
    step = jax.shard_map(
        # A mean in the place of every replica's gradient, as a training step would overwrite it.
        lambda g, s: jaxcomp.as_local(tx.update(g, s), AXIS),
        mesh=mesh_of(n),
        in_specs=(jax.P(AXIS), specs),
        out_specs=(jax.P(AXIS), specs),
        check_vma=False,
    )
    return jax.jit(step, donate_argnums=(0, 1)).lower(laid_out, placed(state, specs, n))


def temporary(tx, shapes):
    """Bytes beside donated arguments, as a multiple of one replica's gradients."""
    size = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    analysis = users_program(lowered(tx, shapes)).memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= size  # donation took place
    return analysis.temp_size_in_bytes / size


@pytest.mark.parametrize(
    ("rank", "start_step", "most"),
    [(4, 0, 0.15), (4, 10, 1.15), (16, 0, 1.15), (16, 10, 1.2), (32, 0, 1.15)],
)
def test_a_step_needs_no_more_than_the_gradients_once_more(rank, start_step, most):
    tx = jaxcomp.powersgd(rank, axis_name=AXIS, start_step=start_step)
    assert temporary(tx, MANY) <= most


@pytest.mark.parametrize(("dtype", "most"), [(None, 1.05), (jnp.float16, 0.55)])
def test_an_exact_average_holds_its_sum_and_no_packed_copy(dtype, most):
    assert temporary(jaxcomp.allreduce(axis_name=AXIS, comm_dtype=dtype), MANY) <= most


def test_a_leaf_that_is_most_of_the_tree_is_not_held_twice():
    tx = jaxcomp.powersgd(16, axis_name=AXIS, start_step=0)
    assert temporary(tx, {"embedding": (4099, 512)}) <= 1.2


@pytest.mark.parametrize("start_step", [0, 5])
def test_large_leaves_are_operands_of_the_one_all_reduce(start_step):
    tx = jaxcomp.powersgd(4, axis_name=AXIS, start_step=start_step)
    shapes = MANY | {"bias": (1024,), "scale": (512,)}
    text = users_program(lowered(tx, shapes)).as_text()
    lines = [x for x in text.splitlines() if " all-reduce(" in x]
    # Ten leaves, and one flat vector of the two that are small.
    operands = sorted(x.split(" all-reduce(")[1].split(")")[0].count("%") for x in lines)
    assert operands == ([1, 1] if start_step == 0 else [1, 1, 11])


def test_more_large_leaves_than_xla_merges_are_one_all_reduce(monkeypatch):
    monkeypatch.setattr(collectives, "_OWN_OPERAND_BYTES", 16)
    shapes = {f"layer_{i:03}": (2 + i % 3, 8) for i in range(300)}
    tx = jaxcomp.allreduce(axis_name=AXIS)
    text = users_program(lowered(tx, shapes)).as_text()
    assert text.count(" all-reduce(") == 1


def test_a_residual_in_blocks_may_differ_over_another_axis():
    """Made where it is the same on all of "model", updated by gradients that are not."""
    kinds = {"axis_types": (jax.sharding.AxisType.Auto,) * 2, "devices": jax.devices()[:4]}
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), **kinds)
    tx = jaxcomp.powersgd(16, axis_name=AXIS, start_step=0)

    def step(gradient):
        state = tx.init(jnp.zeros((1200, 1200)))
        update, state = tx.update(gradient[0, 0], state)
        return update[None], state.residual[None, None]

    specs = {"in_specs": jax.P(AXIS, "model"), "out_specs": (jax.P("model"), jax.P(AXIS, "model"))}
    mapped = jax.shard_map(step, mesh=mesh, **specs)
    update, residual = jax.eval_shape(mapped, jax.ShapeDtypeStruct((2, 2, 1200, 1200), jnp.float32))
    assert update.shape == (2, 1200, 1200)
    assert residual.shape == (2, 2, 1200, 1200)


def close(a, b, atol):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize(
    ("mapping", "wire", "atol"),
    [*((m, None, 1e-4) for m in MAPPINGS), ("vmap", jnp.float16, 0.1), ("pmap", jnp.bfloat16, 0.5)],
)
def test_operands_of_their_own_change_no_value(mapping, wire, atol, monkeypatch):
    grads = random_grads(SHAPES, 3, 3)
    grads["bias"] = grads["bias"].astype(jnp.float16)
    grads["embedding"][1, 2, 0, 0] = np.inf
    found = []
    for large in (collectives._OWN_OPERAND_BYTES, 600):
        monkeypatch.setattr(collectives, "_OWN_OPERAND_BYTES", large // 3)
        plain = jaxcomp.error_feedback(jaxcomp.allreduce(axis_name=AXIS, comm_dtype=wire))
        compressed = jaxcomp.powersgd(2, axis_name=AXIS, start_step=1, comm_dtype=wire)
        bits = {"optimised": mapping == "shard_map" and wire is None}
        found.append([simulate(mapping, x, grads, **bits) for x in (plain, compressed)])
    jax.tree.map(lambda a, b: close(a, b, 0), found[0][0], found[1][0])
    # XLA fuses, and so rounds, the factors in two ways, and the residual carries that on.
    jax.tree.map(lambda a, b: close(a, b, atol), found[0][1], found[1][1])


def dims(path, leaf):
    """Each of several matrices by itself; or a transposed order, that no reshape gives."""
    if path[0].key == "stack":
        return jaxcomp.MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    if path[0].key == "mixed":
        return jaxcomp.MatrixDims(rows=(0, 2), cols=(1,))
    return default_matrix_dims(path, leaf)


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        *((m, {}) for m in MAPPINGS),
        ("shard_map", {"residual_dtype": jnp.bfloat16}),
    ],
)
def test_residuals_in_blocks_are_those_of_whole_products(mapping, options, monkeypatch):
    shapes = SHAPES | {"stack": (7, 20, 24), "mixed": (6, 30, 5)}
    grads = random_grads(shapes, 2, 4)
    broken = grads | {"kernel": with_value(grads["kernel"], (1, 2, 0, 0), np.nan)}
    results = []
    for block in (1 << 20, 200):  # of 200 bytes: 20, 10, 12 and 67 blocks, most with a rest
        monkeypatch.setattr(matrices, "_BLOCK_BYTES", block)
        tx = jaxcomp.powersgd(
            9,
            axis_name=AXIS,
            start_step=1,
            min_compression_rate=0.5,
            matrix_dims=dims,
            **options,
        )
        results.append([simulate(mapping, tx, g) for g in (grads, broken)])
    jax.tree.map(lambda a, b: close(a, b, 5e-2 if options else 1e-4), *results)
    for (_, state), count in zip(results[1], (4, 3), strict=True):
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))
        assert int(state.count) == count
