"""The ranks of a torch job, which share what importing torch costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_ranks(worker: Callable[..., None], world: int, *arguments: Any) -> None:
    """Calls ``worker(rank, *arguments)`` in as many processes; for the main program of a script.

    Raises:
      ProcessRaisedException, ProcessExitedException: If one fails. They end with their parent.
    """
    # DistributedDataParallel does, a second in each process: what is forked has it.
    import torch._dynamo  # noqa: F401

    mp.start_processes(worker, args=arguments, nprocs=world, start_method="fork")
