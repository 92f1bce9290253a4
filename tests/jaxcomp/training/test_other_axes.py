"""value_and_grad beside FSDP and tensor parallelism: what crosses the other axis of the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from classifier import KINDS, grid, placed
from xla import users_program

import jaxcomp

P = jax.P
WIDTH = 256
ROWS, COLUMNS, WHOLE = P("model", None), P(None, "model"), P(None, None)
# How weights and examples lie, and how many examples. Of tensor parallelism activations cross the
# axis, a language model's worth of tokens; of FSDP the weights, whatever the batch. As in flax's
# lm1b, tensor parallelism leaves one kind of weights whole.
LAYOUTS = {
    "tensor": ({"mix": WHOLE, "up": COLUMNS, "down": ROWS}, P("data"), 4 * 1024),
    "fsdp": ({"mix": ROWS, "up": ROWS, "down": ROWS}, P(("data", "model")), 32),
}


def plain(w, x):
    x = x + jnp.tanh(x @ w["mix"])
    return jnp.mean((x + jax.nn.gelu(x @ w["up"]) @ w["down"] - 1) ** 2)


def loss_for(layout, kind):
    if kind == "auto":
        return plain

    def tensor(w, x):
        rows = jax.typeof(x).sharding.spec[0]
        x = x + jnp.tanh(jnp.einsum("bd,de->be", x, w["mix"], out_sharding=P(rows, None)))
        hidden = jnp.einsum("bd,df->bf", x, w["up"], out_sharding=P(rows, "model"))
        out = jnp.einsum("bf,fd->bd", jax.nn.gelu(hidden), w["down"], out_sharding=P(rows, None))
        return jnp.mean((x + out - 1) ** 2)

    def fsdp(w, x):
        return plain(jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, WHOLE), w), x)

    return {"tensor": tensor, "fsdp": fsdp}[layout]


def by_axis(compiled):
    """Bytes in terms of an all-reduce along each axis."""
    found = jaxcomp.collectives(compiled)
    return {
        name: sum(x.as_all_reduce for x in found if name in x.axes) for name in ("data", "model")
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_other_axis_carries_at_most_a_twentieth_more_than_without_compression(layout, kind):
    mesh = grid(4, kind, model=2)
    specs, rows, examples = LAYOUTS[layout]
    shapes = {"mix": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {name: placed(mesh, np.ones(x, "f4"), specs[name]) for name, x in shapes.items()}
    x = placed(mesh, np.ones((examples, WIDTH), "f4"), rows)
    fun = loss_for(layout, kind)
    tx = jaxcomp.powersgd(4, axis_name="data", start_step=0)
    compressed = jaxcomp.value_and_grad(fun, tx, mesh=mesh)
    with jax.set_mesh(mesh):
        state = compressed.init(params)
        exact, ours = (
            by_axis(users_program(jax.jit(step).lower(*arguments)))
            for step, arguments in (
                (jax.value_and_grad(fun), (params, x)),
                (compressed, (state, params, x)),
            )
        )
    assert 0 < ours["model"] <= 1.05 * exact["model"]
    # Half of the factors on each device of a replica, and the loss.
    assert ours["data"] <= tx.bytes(params).bytes_after / 2 + 8
    assert exact["data"] >= sum(leaf.nbytes for leaf in params.values()) / 2
