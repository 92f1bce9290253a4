"""The ranks of a torch job over gloo, which share what importing torch costs."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(worker, world, *arguments):
    """Calls ``worker(rank, *arguments)`` in as many processes; for the main program of a script.

    They are a process group, with a thread each. Gloo meets through a file, so that no port need
    be found.

    Raises:
      ProcessRaisedException, ProcessExitedException: If one fails. They end with their parent.
    """
    # DistributedDataParallel does, a second in each process: what is forked has it.
    import torch._dynamo  # noqa: F401

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        given = (worker, world, os.path.join(folder, "store"), arguments)
        mp.start_processes(_rank, args=given, nprocs=world, start_method="fork")


def _rank(rank, worker, world, store, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    worker(rank, *arguments)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's shutdown, which aborts the process
