"""DiLoCo: four replicas train alone for 16 steps, then an outer optimizer joins them."""

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
START = 64  # steps with the exact average
STEPS = 512
H = 16  # local steps between two synchronisations
BATCH, CONTEXT = 256, 16

# The text is Python's own source; the model predicts a byte from the 16 before it.
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
train_text, held_out_text = np.split(text, [len(text) * 9 // 10])
optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))


def draw(text, size, seed):
    starts = np.random.default_rng(seed).integers(len(text) - CONTEXT, size=size)
    return text[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def loss_fn(params, tokens):
    x = params["bytes"][tokens[:, :-1]].reshape(len(tokens), -1)
    logits = jax.nn.relu(x @ params["hidden"]) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def local_step(params, opt_state, tokens):  # an ordinary step for one device
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def new_params():
    a, b, c = jax.random.split(jax.random.key(0), 3)
    return {
        "bytes": jax.random.normal(a, (256, 16)),
        "hidden": jax.random.normal(b, (256, 256)) / 16,
        "output": jax.random.normal(c, (256, 256)) / 16,
    }


def main():
    # As in the paper, DiLoCo begins with a model that is already trained a little. A step on the
    # whole batch equals a step with the exact average.
    params = new_params()
    exact_step = jax.jit(local_step)
    opt_state = optimizer.init(params)
    for i in range(START):
        params, opt_state, _ = exact_step(params, opt_state, draw(train_text, BATCH, (0, i)))

    # H local steps, then Nesterov momentum on the average change of the parameters.
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    diloco = jaxcomp.local_sgd_round(
        local_step, sync_every=H, axis_name="data", mesh=mesh, outer=nesterov
    )
    state = diloco.init(params, opt_state)
    train_round = jax.jit(diloco)

    exact, exact_state = params, opt_state
    for i in range(START, STEPS, H):
        tokens = draw(train_text, (H, BATCH), (0, i))
        params, state, losses = jax.block_until_ready(train_round(params, state, tokens))
        for batch in tokens:  # for comparison: the exact average in every step
            exact, exact_state, _ = exact_step(exact, exact_state, batch)
        if (i + H) % 64 == 0:
            print(f"step {i + H}: loss {losses.mean():.3f}", flush=True)

    held_out = draw(held_out_text, 8192, 1)
    evaluate = jax.jit(loss_fn)
    best = float(evaluate(exact, held_out))
    loss = float(evaluate(params, held_out))
    print(f"held-out loss {best:.4f} exact, {loss:.4f} with DiLoCo: {loss / best - 1:+.1%}")
    print(f"{diloco.bytes(params).ratio:.0f} times fewer bytes")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("diloco.py: interrupted")
