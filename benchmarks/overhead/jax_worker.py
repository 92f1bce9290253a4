"""Times jaxcomp's update alone on one core; a worker of `benchmarks.overhead`.

It reads a job as JSON from standard input, and prints one JSON line for the copy bandwidth and one
for every rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

import jaxcomp
from benchmarks.card.updates import AXIS, Update, seconds_of
from benchmarks.overhead.trees import size


def main() -> None:
    """Answers the job on standard input."""
    job = json.loads(sys.stdin.read())
    words = size(job["shapes"])
    source = np.ones(words, np.float32)
    target = np.zeros(words, np.float32)
    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "device": device.device_kind, "platform": device.platform}
    print(json.dumps({"kind": "versions", **versions}), flush=True)
    for rank in job["ranks"]:
        # The floor is measured beside every figure that is compared with it.
        copies = seconds_of(lambda: np.copyto(target, source), 3, job["steps"])
        print(json.dumps({"kind": "copy", "rank": rank, "seconds": copies}), flush=True)
        step = Update(jaxcomp.powersgd(rank, axis_name=AXIS, start_step=0), job["shapes"])
        row: dict[str, Any] = {"kind": "update", "rank": rank}
        row["seconds"] = seconds_of(step, job["warmup"], job["steps"])
        row["temporary_bytes"] = step.temporary_bytes
        row["compile_seconds"] = step.compile_seconds
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
