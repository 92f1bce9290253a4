"""Trains for 60 steps and saves. A second call continues, on any number of replicas.

python examples/resume.py checkpoints --replicas 4
python examples/resume.py checkpoints --replicas 2
"""

import argparse
import logging
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jaxcomp

STEPS, BATCH = 60, 64

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("directory", type=Path, help="where the checkpoints are")
parser.add_argument("--replicas", type=int, default=4, help="(default: %(default)s)")
arguments = parser.parse_args()
if arguments.replicas < 1 or BATCH % arguments.replicas:
    parser.error(f"--replicas must divide the batch of {BATCH}, got {arguments.replicas}")
try:
    arguments.directory.mkdir(parents=True, exist_ok=True)
except OSError as error:
    parser.error(f"{arguments.directory}: {error.strerror}; checkpoints need a directory")

jax.config.update("jax_num_cpu_devices", arguments.replicas)  # does nothing where there are GPUs
devices = jax.devices()
if len(devices) < arguments.replicas:
    parser.error(
        f"--replicas {arguments.replicas}, and JAX sees {len(devices)} {devices[0].platform} "
        "devices; give fewer replicas, or set JAX_PLATFORMS=cpu"
    )
mesh = jax.make_mesh((arguments.replicas,), ("data",), devices=devices[: arguments.replicas])


def draw(step):  # depends on the step only: a resumed run sees the same data
    a, b = jax.random.split(jax.random.key(step))
    x, noise = jax.random.normal(a, (BATCH, 32)), jax.random.normal(b, (BATCH, 64))
    return x, jnp.tanh(x @ jax.random.normal(jax.random.key(0), (32, 64)) / 8) + noise / 4


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["output"] - y) ** 2)


optimizer = optax.adam(3e-3)
reducer = jaxcomp.powersgd(rank=8, axis_name="data", start_step=0)
value_and_grad = jaxcomp.value_and_grad(loss_fn, reducer, mesh=mesh)


@jax.jit
def train_step(params, opt_state, reducer_state, x, y):
    (loss, grads), reducer_state = value_and_grad(reducer_state, params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, reducer_state, loss


keys = jax.random.split(jax.random.key(0))
params = {
    "hidden": jax.random.normal(keys[0], (32, 128)) / 6,
    "output": jax.random.normal(keys[1], (128, 64)) / 11,
}
state = (params, optimizer.init(params), reducer.init(params))

manager = ocp.CheckpointManager(arguments.directory.absolute())
start = manager.latest_step() or 0
if start:
    state = manager.restore(start, args=ocp.args.StandardRestore(jax.device_get(state)))
params, opt_state, reducer_state = state
reducer_state = jaxcomp.shard_state(reducer_state, mesh, "data")  # a residual for each replica

try:
    for done in range(start + 1, start + STEPS + 1):
        state = train_step(params, opt_state, reducer_state, *draw(done))
        params, opt_state, reducer_state, loss = jax.block_until_ready(state)
        if done % 10 == 0:
            print(f"{arguments.replicas} replicas, step {done}: loss {loss:.6f}", flush=True)
except KeyboardInterrupt:
    sys.exit(f"resume.py: interrupted; the last checkpoint is of step {start}")

# Only the mean of the residuals matters: one state for any number of replicas.
state = jax.device_get((params, opt_state, jaxcomp.consolidate(reducer_state)))
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax also logs the traceback of an error
try:
    manager.save(start + STEPS, args=ocp.args.StandardSave(state))
    manager.close()  # waits for the files
except (OSError, ValueError) as error:  # such as a full disk
    sys.exit(f"resume.py: not saved, the last checkpoint is of step {start} ({error})")
