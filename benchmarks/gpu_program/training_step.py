"""A training step of GPT-2 in plain JAX, its blocks written out, to see what XLA schedules where.

Token embedding tied to the output, no positions, no dropout; matrix products in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.gpu_program.target import AXIS, placed

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 768, 12, 50_304, 256, 8  # batch: of one device


def parameters(blocks: int) -> Any:
    """Shapes of a model of so many blocks."""

    def dense(n: int, m: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (n, m), "bias": (m,)}

    norm = {"scale": (WIDTH,), "bias": (WIDTH,)}
    block = {
        "norm_1": norm,
        "attention": dense(WIDTH, 3 * WIDTH),
        "projection": dense(WIDTH, WIDTH),
        "norm_2": norm,
        "up": dense(WIDTH, 4 * WIDTH),
        "down": dense(4 * WIDTH, WIDTH),
    }
    tree = {f"block_{i}": block for i in range(blocks)}
    tree |= {"embedding": {"embedding": (VOCABULARY, WIDTH)}, "norm": norm}
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token; tokens ``(batch, length + 1)``."""

    def blocks(x: jax.Array) -> jax.Array:
        for i in range(len(params) - 2):
            x = block(params[f"block_{i}"], x)
        return x

    return loss_around(blocks, params, tokens)


def loss_around(
    blocks: Callable[[jax.Array], jax.Array], params: Any, tokens: jax.Array
) -> jax.Array:
    """The loss of a model with these blocks between its embedding and its output."""
    table = params["embedding"]["embedding"]
    x = blocks(table[tokens[:, :-1]])
    logits = _norm(params["norm"], x).astype(jnp.bfloat16) @ table.T.astype(jnp.bfloat16)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    ).mean()


def _norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * p["scale"] + p["bias"]


def _dense(p: Any, x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) @ p["kernel"].astype(jnp.bfloat16) + p["bias"].astype(
        jnp.bfloat16
    )


def block(p: Any, x: jax.Array) -> jax.Array:
    """One layer: attention and a perceptron, each behind a norm."""
    heads = _dense(p["attention"], _norm(p["norm_1"], x)).reshape(*x.shape[:2], 3, HEADS, -1)
    mixed = jax.nn.dot_product_attention(*(heads[:, :, i] for i in range(3)), is_causal=True)
    x += _dense(p["projection"], mixed.reshape(x.shape)).astype(x.dtype)
    hidden = jax.nn.gelu(_dense(p["up"], _norm(p["norm_2"], x)))
    return x + _dense(p["down"], hidden).astype(x.dtype)


def lowered(reducer: jaxcomp.Reducer, blocks: int, mesh: jax.sharding.Mesh) -> Any:
    """The step with SGD, parameters and state donated."""
    params, tx = parameters(blocks), optax.chain(reducer, optax.sgd(0.1))
    state = jax.eval_shape(tx.init, params)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        _, grads = jaxcomp.local_value_and_grad(loss_fn, AXIS)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return lower(step, params, state, mesh)


def lower(step: Callable[..., Any], params: Any, state: Any, mesh: jax.sharding.Mesh) -> Any:
    """A step of (parameters, state, tokens) that returns the first two, which are donated."""
    specs = jaxcomp.state_specs(state, AXIS)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(jax.P(), specs, jax.P(AXIS)),
        out_specs=(jax.P(), specs),
    )
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(
        placed(params, jax.P(), mesh), placed(state, specs, mesh), placed(tokens, jax.P(AXIS), mesh)
    )
