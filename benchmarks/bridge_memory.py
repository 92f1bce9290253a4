"""Measures the peak memory to convert a large PyTorch checkpoint, torch -> Flax -> torch.

    python -m benchmarks.bridge_memory --megabytes 1024

It writes a checkpoint of that size (parameters, momentum and one rank's PowerSGD errors), converts
the checkpoint with the command line in a separate process, and prints peak memory and size.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.common.arguments import at_least, call, command_line

WIDTH = 2048
_RANK = 4
# Each weight is there three times: itself, its momentum, its error.
_BYTES_PER_LAYER = 3 * 4 * WIDTH * WIDTH
PARAMS = """\
import jax, jax.numpy as jnp
leaf = jax.ShapeDtypeStruct(({width}, {width}), jnp.float32)
params = {{f"fc{{i}}": {{"kernel": leaf}} for i in range({layers})}}
"""


def write_checkpoint(path: pathlib.Path, layers: int) -> None:
    """Writes a checkpoint in the documented form, with a recorded layout."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    import torch_bridge

    model = {f"fc{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(layers)}
    parameters = [torch.nn.Parameter(weight) for weight in model.values()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    layout = torch_bridge.BucketLayout.from_order([list(model)[::-1]], model)
    state = PowerSGDState(None, _RANK, start_powerSGD_iter=10)
    state.iter = 20
    state.error_dict = {0: torch.randn(layout.sizes[0])}
    factors = torch.randn(layers * WIDTH * _RANK)
    state.p_memory_dict = {0: factors}
    state.q_memory_dict = {0: factors.clone()}
    document = {
        "state_dict": model,
        "comm_hook_state": state,
        "optimizer": optimizer.state_dict(),
        "layout": layout.to_json(),
        "world_size": 1,
    }
    torch.save(document, path)


def convert(folder: pathlib.Path, *arguments: str) -> tuple[int, float]:
    """Runs the command line; returns its peak bytes and seconds."""
    start = time.perf_counter()
    program = [sys.executable, "-m", "torch_bridge", *arguments]
    process = subprocess.Popen(program, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"bridge_memory: {' '.join(arguments)} failed")
    return usage.ru_maxrss << 10, time.perf_counter() - start


def main() -> None:
    """Measures both directions and prints a table."""
    parser = command_line("benchmarks.bridge_memory", __doc__)
    least = at_least(int, 1)
    parser.add_argument("--megabytes", type=least, default=1024, help="size of the checkpoint")
    layers = max(1, (parser.parse_args().megabytes << 20) // _BYTES_PER_LAYER)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_checkpoint(folder / "big.pt", layers)
        (folder / "big_model.py").write_text(PARAMS.format(width=WIDTH, layers=layers))
        size = (folder / "big.pt").stat().st_size
        print(f"checkpoint: {size / 2**20:.0f} MiB, {layers} layers of {WIDTH} x {WIDTH}")
        for command in (
            "to-flax big.pt --params big_model:params --conv1d= --out run",
            "to-torch run --like big.pt --conv1d= --out back.pt",
        ):
            peak, seconds = convert(folder, *command.split())
            direction = command.partition(" ")[0]
            ratio = peak / size
            print(f"{direction:9} peak {peak / 2**20:6.0f} MiB = {ratio:.2f} x, {seconds:.1f} s")


if __name__ == "__main__":
    call(main)
