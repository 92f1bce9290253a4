"""Times torch's `powerSGD_hook` with world size 1, for `benchmarks.overhead` and `.card`.

It reads a job as JSON from standard input, and prints one JSON line for every rank.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook


class Bucket:
    """A bucket with the methods that the hook calls, without DDP and a model.

    One flat buffer holds all gradients; the hook's output replaces it.
    """

    def __init__(self, shapes: dict[str, list[int]], device: str):
        sizes = list(map(math.prod, shapes.values()))
        self._buffer = torch.randn(sum(sizes), device=device)
        self._gradients = []
        for part, shape in zip(self._buffer.split(sizes), shapes.values(), strict=True):
            self._gradients.append(part.view(shape))

    def buffer(self) -> torch.Tensor:
        """Returns all gradients, one after the other."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of the buffer."""
        return self._gradients

    def index(self) -> int:
        """Returns the index of the only bucket."""
        return 0

    def is_last(self) -> bool:
        """Returns True, so that the hook counts an iteration."""
        return True


def hook_seconds(job: dict[str, Any], rank: int, device: str) -> list[float]:
    """Returns the seconds of each compressed step."""
    state = hook.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=2)
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
    device = job["device"]
    if device == "cpu":
        torch.set_num_threads(1)
    print(json.dumps({"kind": "versions", "torch": torch.__version__}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        backend = {"cpu": "gloo", "cuda": "nccl"}[device]
        store = f"file://{folder}/store"  # which torch removes itself
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        for rank in job["ranks"]:
            seconds = hook_seconds(job, rank, device)
            print(json.dumps({"kind": "update", "rank": rank, "seconds": seconds}), flush=True)
    # gloo's threads can end in each other's way ("Resource deadlock avoided", rarely), and all that
    # was measured is printed: leave without the farewells of the libraries.
    os._exit(0)


if __name__ == "__main__":
    main()
