"""Trains a small language model on four replicas: with exact gradients, then with compressed."""

import argparse
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jaxcomp

argparse.ArgumentParser(description=__doc__).parse_args()  # there is nothing to choose
jax.config.update("jax_num_cpu_devices", 4)  # leave out where there are GPUs
mesh = jax.make_mesh((jax.device_count(),), ("data",))
STEPS, BATCH, CONTEXT = 300, 512, 16

# The text is Python's own source; the model predicts a byte from the 16 before it.
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
train_text, held_out_text = np.split(text, [len(text) * 9 // 10])


def draw(text, size, seed):
    starts = np.random.default_rng(seed).integers(len(text) - CONTEXT, size=size)
    return text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def loss_fn(params, tokens):
    x = params["bytes"][tokens[:, :-1]].reshape(len(tokens), -1)
    logits = jax.nn.relu(x @ params["hidden"]) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def train(reducer):
    a, b, c = jax.random.split(jax.random.key(0), 3)
    params = {
        "bytes": jax.random.normal(a, (256, 32)),
        "hidden": jax.random.normal(b, (512, 512)) / 23,
        "output": jax.random.normal(c, (512, 256)) / 23,
    }
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
    value_and_grad = jaxcomp.value_and_grad(loss_fn, reducer, mesh=mesh)  # instead of JAX's
    opt_state, reducer_state = optimizer.init(params), value_and_grad.init(params)

    @jax.jit
    def train_step(params, opt_state, reducer_state, tokens):
        (loss, grads), reducer_state = value_and_grad(reducer_state, params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, reducer_state, loss

    for i in range(STEPS):
        state = train_step(params, opt_state, reducer_state, draw(train_text, BATCH, (0, i)))
        params, opt_state, reducer_state, loss = jax.block_until_ready(state)
        if i % 100 == 99:
            print(f"step {i + 1}: loss {loss:.3f}")
    held_out_loss = jax.jit(loss_fn)(params, draw(held_out_text, 8192, 1))
    return held_out_loss, reducer.bytes(params, replicas=4, steps=STEPS)


def main():
    exact, _ = train(jaxcomp.allreduce(axis_name="data"))
    reducer = jaxcomp.powersgd(32, axis_name="data", start_step=0, comm_dtype="int6")
    loss, sent = train(reducer)
    print(f"held-out loss {exact:.4f} exact, {loss:.4f} compressed: {loss / exact - 1:+.1%}")
    print(f"{sent.bytes_after:,} bytes in all, {sent.ratio:.1f} times fewer bytes than exact")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("quickstart.py: interrupted")
