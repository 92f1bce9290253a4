"""A whole training step of GPT-2 small: forward and backward in bfloat16, Adam, and a reducer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from benchmarks.card.updates import AXIS, queued_ms, tree
from benchmarks.overhead.trees import Shapes

_HEADS = 12
_VOCABULARY = 50257


def strategies(quick: bool) -> dict[str, Any]:
    """Lists what averages gradients, by name; None averages nothing."""
    rank_32 = jaxcomp.powersgd(32, axis_name=AXIS, start_step=0)
    every = {"none": None, "rank 32": rank_32}
    if quick:
        return every
    return every | {
        "rank 4": jaxcomp.powersgd(4, axis_name=AXIS, start_step=0),
        "rank 128": jaxcomp.powersgd(128, axis_name=AXIS, start_step=0),
        "rank 32, int6": jaxcomp.powersgd(32, axis_name=AXIS, start_step=0, comm_dtype="int6"),
        "all-reduce": jaxcomp.allreduce(axis_name=AXIS),
    }


def initial(shapes: Shapes) -> dict[str, Any]:
    """Draws parameters; norms begin as the identity."""
    params = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if name.endswith("scale"):
            params[name] = jnp.ones(shape)
        elif name.endswith("bias"):
            params[name] = jnp.zeros(shape)
        else:
            params[name] = 0.02 * jax.random.normal(jax.random.key(i), shape)
    return params


def loss(params: dict[str, Any], tokens: Any) -> Any:
    """Returns the mean cross-entropy of the next token."""
    half = {name: x.astype(jnp.bfloat16) for name, x in params.items()}
    length = tokens.shape[1] - 1
    x = half["tokens/embedding"][tokens[:, :-1]] + half["positions/embedding"][:length]
    for layer in range(sum(name.endswith("qkv/kernel") for name in params)):
        x = block(half, f"block_{layer}", x)
    x = normalised(half, "final_norm", x)
    logits = jnp.einsum("btd,vd->btv", x, half["tokens/embedding"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def block(params: dict[str, Any], name: str, x: Any) -> Any:
    """Applies one layer of the transformer."""
    batch, length, width = x.shape
    heads = min(_HEADS, width // 32)
    qkv = dense(params, f"{name}/qkv", normalised(params, f"{name}/norm_0", x))
    q, k, v = jnp.split(qkv.reshape(batch, length, 3 * heads, width // heads), 3, axis=2)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + dense(params, f"{name}/attention_out", mixed.reshape(batch, length, width))
    inner = dense(params, f"{name}/mlp_in", normalised(params, f"{name}/norm_1", x))
    return x + dense(params, f"{name}/mlp_out", jax.nn.gelu(inner))


def dense(params: dict[str, Any], name: str, x: Any) -> Any:
    """Multiplies with a kernel and adds a bias."""
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def normalised(params: dict[str, Any], name: str, x: Any) -> Any:
    """Applies layer normalisation."""
    wide = jax.nn.standardize(x.astype(jnp.float32), axis=-1).astype(x.dtype)
    return wide * params[f"{name}/scale"] + params[f"{name}/bias"]


class Step:
    """A training step with one reducer, or none."""

    def __init__(self, reducer: Any, mesh: Any):
        self._optimizer = optax.adamw(3e-4)
        self._averaged = None
        if reducer is not None:
            self._averaged = jaxcomp.value_and_grad(loss, reducer, mesh=mesh)

    def init(self, params: Any) -> Any:
        """Makes the state: the reducer's and the optimizer's."""
        kept = self._averaged.init(params) if self._averaged else ()
        return kept, self._optimizer.init(params)

    def __call__(self, params: Any, state: Any, tokens: Any) -> Any:
        """Returns parameters and state after one step, and the loss before it."""
        kept, inner = state
        if self._averaged:
            (value, grads), kept = self._averaged(kept, params, tokens)
        else:
            value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, inner = self._optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), (kept, inner), value


def timed(name: str, reducer: Any, mesh: Any, small: bool) -> dict[str, Any]:
    """Compiles and times the step with one reducer; eight sequences of 1,024 on each device."""
    batch, length = (2, 16) if small else (8, 1024)
    sequences = batch * mesh.size
    params = jax.device_put(initial(tree(small)), jax.sharding.NamedSharding(mesh, jax.P()))
    tokens = jax.random.randint(jax.random.key(1), (sequences, length + 1), 0, _VOCABULARY)
    tokens = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, jax.P(AXIS)))
    step = Step(reducer, mesh)
    state = step.init(params)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()
    seconds = time.perf_counter() - start
    held = [(params, state)]
    del params, state
    losses = []

    def once() -> Any:
        *after, value = compiled(*held[0], tokens)
        held[0] = tuple(after)
        losses.append(value)
        return value

    row: dict[str, Any] = {"kind": "step", "reducer": name, "devices": mesh.size}
    row["compile_s"] = seconds
    row["tokens"] = sequences * length
    row["queued_ms"] = queued_ms(once, 2 if small else 20)
    row["losses"] = [float(losses[0]), float(losses[-1])]
    row["right"] = all(math.isfinite(value) for value in row["losses"])
    return row


def rows(small: bool, quick: bool, devices: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each reducer on one device."""
    del devices
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for name, reducer in strategies(quick).items():
        yield timed(name, reducer, mesh, small)
