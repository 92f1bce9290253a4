"""A data-parallel `jit` loop with and without compression: four lines differ, marked (1) to (4).

It checks what the step sends, and restores its checkpoint on half as many replicas.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp


def loss_fn(params, x, y):
    """Returns the mean loss of the examples."""
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def batch(mesh, step, size=256):
    """Draws one global batch, split over the data axis."""
    x = np.random.default_rng(step).normal(size=(size, 64)).astype(np.float32)
    y = np.sin(x @ np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8)
    return jax.device_put((x, y), jax.NamedSharding(mesh, jax.P("data")))


def training(mesh):
    """Makes the training step, its gradient function, the optimizer and the reducer."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    reducer = jaxcomp.powersgd(rank=4, axis_name="data", start_step=0)
    value_and_grad = jaxcomp.value_and_grad(loss_fn, reducer, mesh=mesh)  # (1) jax.value_and_grad

    @jax.jit
    def step(params, opt_state, reducer_state, x, y):  # (2) takes and returns reducer_state
        (loss, grads), reducer_state = value_and_grad(reducer_state, params, x, y)  # (3)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, reducer_state, loss

    return step, value_and_grad, optimizer, reducer


def main():
    """Trains, checks the compiled step, and continues with fewer replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    steps = parser.parse_args().steps
    if steps < 3:
        parser.error(f"--steps must be at least 3, got {steps}")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    step, value_and_grad, optimizer, reducer = training(mesh)

    weights = jax.random.normal(jax.random.key(0), (64, 512)) / 8
    params = {"in": weights, "out": jnp.zeros((512, 64))}
    params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    opt_state, reducer_state = optimizer.init(params), value_and_grad.init(params)  # (4)
    state = (params, opt_state, reducer_state)
    compiled = step.lower(*state, *batch(mesh, 0)).compile()
    print(jaxcomp.check(compiled, reducer, params))
    for index in range(steps):
        *state, loss = jax.block_until_ready(step(*state, *batch(mesh, index)))
        if (index + 1) % (steps // 3) == 0:
            print(f"step {index + 1:4}  loss {loss:.4f}", flush=True)

    replicas = mesh.size // 2 or 1
    half = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    saved = jax.device_get(state)  # a checkpoint with one residual for each replica
    step, value_and_grad, *_ = training(half)
    params, opt_state = jax.device_put(saved[:2], jax.NamedSharding(half, jax.P()))
    reducer_state = value_and_grad.restore(saved[2], params)
    *_, loss = step(params, opt_state, reducer_state, *batch(half, steps))
    print(f"on {half.size} replicas: loss {loss:.4f}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("jit_loop.py: interrupted")
