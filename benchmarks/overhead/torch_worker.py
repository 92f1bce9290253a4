"""Times torch's `powerSGD_hook` alone with world size 1; a worker of `benchmarks.overhead`.

Reads a job as JSON from standard input and prints one JSON line for every rank.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook


class Bucket:
    """What the hook asks of DDP's bucket, without a model around it.

    One flat buffer holds all gradients; the hook's output takes its place.
    """

    def __init__(self, shapes: dict[str, list[int]], device: str):
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        self._buffer = torch.randn(sum(sizes), device=device)
        parts = self._buffer.split(sizes)
        self._gradients = [
            part.view(shape) for part, shape in zip(parts, shapes.values(), strict=True)
        ]

    def buffer(self) -> torch.Tensor:
        """Returns all gradients, one after the other."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of the buffer."""
        return self._gradients

    def index(self) -> int:
        """Names the only bucket."""
        return 0

    def is_last(self) -> bool:
        """Tells that the hook may count an iteration."""
        return True


def hook_seconds(job: dict[str, Any], rank: int, device: str) -> list[float]:
    """Returns the seconds of each compressed step."""
    state = hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=2
    )
    bucket: Any = Bucket(job["shapes"], device)
    taken = []
    # The first two iterations are plain averages, the third draws the factors.
    for _ in range(3 + job["warmup"] + job["steps"]):
        start = time.perf_counter()
        hook.powerSGD_hook(state, bucket).wait()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken[-job["steps"] :]


def main() -> None:
    job = json.loads(sys.stdin.read())
    logging.disable(logging.INFO)  # the hook reports its settings once a bucket
    device = "cuda" if job["platform"] == "gpu" else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    print(json.dumps({"kind": "versions", "torch": torch.__version__}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"  # which torch removes itself
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        for rank in job["ranks"]:
            taken = hook_seconds(job, rank, device)
            print(f"torch rank {rank}: {1e3 * statistics.median(taken):.1f} ms", file=sys.stderr)
            print(json.dumps({"kind": "update", "rank": rank, "seconds": taken}), flush=True)
    # gloo's threads can end in each other's way ("Resource deadlock avoided", rarely), and all that
    # was measured is printed: leave without the farewells of the libraries.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
