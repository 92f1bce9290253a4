"""Runs the ranks of a torch job over gloo, forked so that torch is imported only once."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(worker, world, *arguments):
    """Calls ``worker(rank, *arguments)`` in `world` processes; for the main program of a script.

    The processes are a process group, with one thread each. They connect through a file, so that
    no free port is needed, and end with their parent.

    Raises:
      ProcessRaisedException, ProcessExitedException: A process fails.
    """
    # DistributedDataParallel imports this, which takes a second; forked processes have it already.
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
