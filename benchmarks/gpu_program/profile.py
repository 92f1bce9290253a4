"""A profile of a program that never ran, to tell XLA how slow the link is.

XLA begins a transfer as late as its own estimate of the wire allows, and that is NVLink's. What it
takes on a slower link it learns from a profile of the program, which JAX gathers and uses by itself
where `JAX_ENABLE_PGLE=true` is set. Here, without a GPU, durations are computed: a kernel lasts as
long as its memory traffic at the full bandwidth after a launch, which is too little for matrix
products, so that less is hidden than could be; an all-reduce as long as a ring's.
"""

from __future__ import annotations

from benchmarks.gpu_program.count import FREE, kernel_bytes
from benchmarks.gpu_program.hlo import Module

BANDWIDTH = {"h200": 4.8e12, "a100": 2.0e12}  # bytes a second, from the data sheets
LAUNCH_MICROSECONDS = 4.0  # assumed, as by the adviser
# What compiles a program with such a profile.
OPTION = "xla_gpu_pgle_profile_file_or_directory_path"


def profile(
    module: Module, target: str, devices: int, bits_per_second: float, latency: float
) -> str:
    """The text of a profile, a line for every instruction of the entry computation.

    Args:
      module: The program, compiled without a profile.
      target: A key of `BANDWIDTH`.
      devices: In the ring.
      bits_per_second: Of the link from one device to the next.
      latency: Seconds of that link.
    """
    sizes = {x.name: x.bytes for x in module.entry.instructions}
    lines = []
    for x in module.entry.instructions:
        if x.opcode in FREE or x.opcode.endswith("-done"):
            continue
        if x.opcode == "all-reduce-start":
            steps, share = 2 * (devices - 1), x.bytes * 8 / devices
            cost = 1e6 * steps * (latency + share / bits_per_second)
        else:
            traffic = kernel_bytes(module, x, sizes)
            cost = LAUNCH_MICROSECONDS + 1e6 * traffic / BANDWIDTH[target]
        lines.append(f'costs {{ name: "{x.name}" cost_us: {cost:.2f} }}')
    return "\n".join(lines) + "\n"
