"""Several processes, of which each holds a part of the arrays only."""

import socket
import subprocess
import sys

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jaxcomp

jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.device_put(np.ones(4, np.float32), jax.NamedSharding(mesh, jax.P()))
x = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
rows = jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, jax.P("data")), x.__getitem__)

def loss_fn(w, x):
    losses = (x @ w - 1) ** 2
    return losses.mean(), {"losses": losses}

reducer = jaxcomp.allreduce(axis_name="data")
value_and_grad = jaxcomp.value_and_grad(loss_fn, reducer, mesh=mesh, has_aux=True)
print(value_and_grad.outputs(w, rows))
"""


def test_outputs_of_arrays_that_other_processes_hold():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for index in range(2):
        command = [sys.executable, "-c", PROGRAM, address, str(index)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert "\n{'losses': 'join'}\n" in printed
