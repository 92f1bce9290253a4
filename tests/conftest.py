"""Eight CPU devices, strict dtype promotion, quick compilation, one thread for each QR; all set
before JAX and NumPy start.
"""

import contextlib
import ctypes
import gc
import importlib.util
import mmap
import os
import tempfile
from pathlib import Path

from tests.helpers import xla

# For each QR: beside another worker, more threads spin for longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What was compiled serves this run only, in the modules to come and in processes that tests start.
CACHE = tempfile.TemporaryDirectory(prefix="jaxcomp-tests-", ignore_cleanup_errors=True)
xla.compile_quickly(CACHE.name)

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.helpers.runners import forget_programs  # noqa: E402

# A GPU that happens to be there is used; the replicas are CPU devices otherwise.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Tracing makes a million objects a second that its own reference counts free.
gc.set_threshold(200_000, 20, 50)

# The first example of a shape compiles, so a deadline would time the compiler; and a gate that
# lands or refuses work must not depend on the day's random seeds.
settings.register_profile("jaxcomp", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("jaxcomp")

# Without torch, jaxcomp's own tests remain; they are what must pass on every Python and jax.
TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if TORCH else ["torch_bridge", "fuzz", "jaxcomp/local/test_torch.py"]


def pytest_report_header():
    return None if TORCH else "torch is not installed: no tests of torch_bridge, no oracles"


def pytest_collection_finish():
    """Leaves what was imported out of collections, of which tracing makes many."""
    gc.collect()
    gc.freeze()


def resident():
    """Returns the bytes of this process in memory; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return 0


GROWTH = 500 << 20
kept = 0  # bytes in memory after programs were dropped last


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Drops compiled programs where much was compiled: a suite that keeps them holds gigabytes.

    A program that is needed again comes from the compilation cache.
    """
    global kept
    if resident() <= kept + GROWTH:
        return
    forget_programs()
    jax.clear_caches()
    gc.collect()
    # glibc keeps what was freed between what was not: half of it all.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
    kept = resident()


def pytest_unconfigure():
    CACHE.cleanup()


# A worker that begins one of these as the last would keep the others waiting. Roughly in the order
# of the processor time that they take.
LONGEST = """
adopt check examples docs value_and_grad programs faults migration time_to_loss in_loops
data_parallel recorded battery gpu_form reducer_bytes whole_run architectures optimizers powersgd
ddp_equivalence formats meshes memory refused round_on_mesh cluster example fuzz torch_hook
notebooks torch overhead non_finite orthogonalize adapt
"""


def pytest_collection_modifyitems(config, items):
    """Puts the longest files first for workers; xdist would begin with those of the most tests."""
    if not TORCH:
        config.hook.pytest_deselected(items=[x for x in items if x.get_closest_marker("torch")])
        items[:] = [x for x in items if not x.get_closest_marker("torch")]
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {f"test_{name}.py": i for i, name in enumerate(LONGEST.split())}
        items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture
def alone(tmp_path):
    """Opens a torch process group of one."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
