"""Memory beside the arguments, read from the compiled program, and the ways of large arrays.

Large arrays take other ways than the small ones of the other tests: operands of their own in an
all-reduce, residuals block by block.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from tests.helpers.classifier import grid
from tests.helpers.leaves import by_layer, random_grads, with_value, zeros
from tests.helpers.reducers import allreduce, powersgd
from tests.helpers.reference import assert_steps
from tests.helpers.runners import AXIS, first, mesh_of, placed, sharded, simulate
from tests.helpers.xla import users_program

MANY = {f"layer_{i}": (1024, 1024) for i in range(10)}


def lowered(tx, shapes, n=2):
    """Lowers an update on replicas whose gradients lie one behind the other along axis 0."""
    grads = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(tx.init, grads)
    over = (jax.P(AXIS), jaxcomp.state_specs(state, AXIS))
    laid_out = {}
    for name, (length, *rest) in shapes.items():
        laid_out[name] = jax.ShapeDtypeStruct((n * length, *rest), jnp.float32)

    def update(grads, state):
        # A mean in the place of every replica's gradient, as a training step would overwrite it.
        return jaxcomp.as_local(tx.update(grads, state), AXIS)

    step = jax.shard_map(update, mesh=mesh_of(n), in_specs=over, out_specs=over, check_vma=False)
    return jax.jit(step, donate_argnums=(0, 1)).lower(laid_out, placed(state, n))


def temporary(program, shapes):
    """Bytes beside donated arguments, as a multiple of one replica's gradients."""
    size = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    analysis = program.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= size  # donation took place
    return analysis.temp_size_in_bytes / size


@pytest.mark.parametrize(
    ("rank", "start_step", "most"),
    [(4, 0, 0.15), (4, 10, 1.15), (16, 0, 1.15), (16, 10, 1.2), (32, 0, 1.15)],
)
def test_a_step_needs_no_more_than_the_gradients_once_more(rank, start_step, most):
    tx = powersgd(rank, start_step=start_step)
    shapes = MANY | {"bias": (1024,), "scale": (512,)}
    program = users_program(lowered(tx, shapes))
    assert temporary(program, shapes) <= most
    # Ten leaves are operands of their own, and one is a flat vector of the two that are small.
    lines = [x for x in program.as_text().splitlines() if " all-reduce(" in x]
    operands = sorted(x.split(" all-reduce(")[1].split(")")[0].count("%") for x in lines)
    assert operands == ([1, 1] if start_step == 0 else [1, 1, 11])


@pytest.mark.parametrize(
    ("tx", "shapes", "most"),
    [
        (allreduce(), MANY, 1.05),
        (allreduce(comm_dtype=jnp.float16), MANY, 0.55),
        (powersgd(16), {"embedding": (4099, 512)}, 1.2),
    ],
    ids=["exact", "float16", "a leaf that is most of the tree"],
)
def test_a_sum_is_held_and_no_packed_copy(tx, shapes, most):
    assert temporary(users_program(lowered(tx, shapes)), shapes) <= most


def test_more_large_leaves_than_xla_merges_are_one_all_reduce():
    shapes = {f"layer_{i:03}": (1024 + i % 3, 520) for i in range(260)}
    text = users_program(lowered(allreduce(), shapes)).as_text()
    assert text.count(" all-reduce(") == 1


def test_a_residual_in_blocks_may_differ_over_another_axis():
    """Made where it is the same on all of "model", updated by gradients that are not."""
    tx = powersgd(16)

    def step(gradient):
        update, state = tx.update(first(first(gradient)), tx.init(jnp.zeros((1200, 1200))))
        return update[None], state.residual[None, None]

    step = sharded(
        grid(2, model=2), step, jax.P(AXIS, "model"), (jax.P("model"), jax.P(AXIS, "model"))
    )
    gradient = jax.ShapeDtypeStruct((2, 2, 1200, 1200), jnp.float32)
    update, residual = jax.eval_shape(step, gradient)
    assert update.shape == (2, 1200, 1200)
    assert residual.shape == (2, 2, 1200, 1200)


def dims(path, leaf):
    """Takes one leaf in a transposed order, that no reshape gives."""
    mixed = jaxcomp.MatrixDims(rows=(0, 2), cols=(1,))
    return mixed if path[0].key == "mixed" else by_layer(path, leaf)


# (cols, rows) of a matrix of each: of the first two the residual is made in blocks, with a rest.
LARGE = {"kernel": (1001, 640), "stack": (5, 400, 310), "mixed": (6, 30, 5)}


def matrix_of(name, tree):
    """Returns a leaf of LARGE as (rows, cols); of the stack its third matrix."""
    x = np.float64(tree[name])
    if name == "mixed":
        return np.moveaxis(x, -2, -1).reshape(*x.shape[:-3], 30, 30)
    if name == "stack":
        x = x[..., 2, :, :]
    return x.swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("mapping", "dtype"), [("vmap", None), ("shard_map", None), ("shard_map", jnp.bfloat16)]
)
def test_residuals_in_blocks_are_those_of_the_reference(mapping, dtype):
    n = 2
    rank = 9
    grads = random_grads(LARGE, n, 4)
    broken = grads | {"kernel": with_value(grads["kernel"], (1, 2, 0, 0), np.nan)}
    given = {"min_compression_rate": 0.5, "residual_dtype": dtype or jnp.float32}
    tx = powersgd(rank, start_step=1, matrix_dims=dims, **given)
    state = tx.init(zeros(LARGE))
    outputs, after = simulate(mapping, tx, broken, state)
    assert int(after.count) == 3
    for name in LARGE:
        gradients = matrix_of(name, grads)
        averages = matrix_of(name, outputs)
        residual = matrix_of(name, after.residual)
        q = state.q[name][2] if name == "stack" else state.q[name]
        at = [1, 3]  # an exact step comes first, and that of the NaN leaves no trace
        assert_steps(gradients[:, at], averages[at], residual, q, dtype=dtype)
