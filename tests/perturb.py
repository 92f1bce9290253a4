"""Which tests are near to their tolerance: runs them with every reference one rounding apart.

    python -m tests.perturb tests/jaxcomp/reducers --seeds 3

What a reference is given (gradients, targets, weights) is moved to neighbouring float32 numbers,
and so is all that tests draw at random; each seed moves them elsewhere. Every comparison with a
tolerance is recorded with the share of it that was used. The table has the tests that fail and
those that use more than a third: another processor may turn them red.
"""

import argparse
import collections
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

# By which the processes of pytest know what to do: a plugin has no arguments.
SEED = "JAXCOMP_TESTS_PERTURB_SEED"
FOLDER = "JAXCOMP_TESTS_PERTURB_FOLDER"
WORRYING = 1 / 3
DRAWN = ("normal", "standard_normal", "uniform", "random")


class Moved:
    """Moves numbers to neighbours in float32, up or down at random; seed 0 moves nothing."""

    def __init__(self, seed):
        self.seed = seed
        self.random = np.random.default_rng(seed)

    def value(self, values):
        if not self.seed:
            return values
        array = np.asarray(values)
        if not np.issubdtype(array.dtype, np.floating):
            return values
        signs = self.random.integers(2, size=array.shape) * 2 - 1
        relative = np.asarray(np.finfo(np.float32).eps * signs, array.dtype)
        return array + relative * array

    def argument(self, function, name):
        """Returns the function, called with one of its arguments moved."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*arguments, **named):
            bound = signature.bind(*arguments, **named)
            bound.arguments[name] = self.value(bound.arguments[name])
            return function(*bound.args, **bound.kwargs)

        return call

    def generator(self, make):
        """Returns `numpy.random.default_rng` whose generators draw what is moved."""
        moved = self

        class Generator(np.random.Generator):
            pass

        for name in DRAWN:

            def draw(self, *arguments, _name=name, **named):
                return moved.value(getattr(np.random.Generator, _name)(self, *arguments, **named))

            setattr(Generator, name, draw)

        @functools.wraps(make)
        def default_rng(seed=None):
            return Generator(make(seed).bit_generator)

        return default_rng


class Record:
    """The largest share of a tolerance that each test used, and where."""

    def __init__(self):
        self.test = "collection"
        self.used = {}
        self.failed = set()

    def add(self, difference, allowed):
        difference = np.asarray(difference, np.float64)
        allowed = np.broadcast_to(np.asarray(allowed, np.float64), difference.shape)
        compared = (difference > 0) & (allowed > 0)
        if not compared.any():
            return
        share = float(np.max(difference[compared] / allowed[compared]))
        if share > self.used.get(self.test, 0):
            self.used[self.test] = share

    def allclose(self, check):
        """Returns `numpy.testing.assert_allclose` that records."""

        @functools.wraps(check)
        def assert_allclose(actual, desired, rtol=1e-7, atol=0, *rest, **named):
            check(actual, desired, rtol, atol, *rest, **named)
            values = np.asarray(actual)
            expected = np.asarray(desired)
            if values.dtype.kind == "f" or expected.dtype.kind == "f":
                values = values.astype(np.float64)
                expected = expected.astype(np.float64)
                finite = np.isfinite(values) & np.isfinite(expected)
                difference = np.where(finite, np.abs(values - expected), 0)
                self.add(difference, atol + rtol * np.abs(expected))

        return assert_allclose


def pytest_configure(config):
    """Patches what tests import, before they do."""
    from tests.helpers import control, local_runs, reference

    seed = int(os.environ[SEED])
    moved = Moved(seed)
    record = Record()
    config.perturbed = record
    np.testing.assert_allclose = record.allclose(np.testing.assert_allclose)
    control.record = record.add
    reference.Reference.step = moved.argument(reference.Reference.step, "gradients")
    local_runs.in_numpy = moved.argument(local_runs.in_numpy, "targets")
    if seed:
        np.random.default_rng = moved.generator(np.random.default_rng)


def pytest_runtest_logstart(nodeid):
    for record in _records:
        record.test = nodeid


_records = []


def pytest_sessionstart(session):
    _records.append(session.config.perturbed)


def pytest_runtest_logreport(report):
    if report.failed:
        for record in _records:
            record.failed.add(report.nodeid)


def pytest_sessionfinish(session):
    record = session.config.perturbed
    about = {"used": record.used, "failed": sorted(record.failed)}
    path = Path(os.environ[FOLDER]) / f"{os.environ[SEED]}.{os.getpid()}.json"
    path.write_text(json.dumps(about))


def run(seed, folder, arguments):
    """Runs the tests once; what they print is not of interest."""
    environment = {**os.environ, SEED: str(seed), FOLDER: folder}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.perturb", *arguments]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)


def merged(folder):
    """Returns by test the largest share of a tolerance, and by test the seeds that it failed at."""
    used = collections.defaultdict(float)
    failed = collections.defaultdict(set)
    for path in sorted(Path(folder).glob("*.json")):
        seed = path.name.split(".")[0]
        about = json.loads(path.read_text())
        for test, share in about["used"].items():
            used[test] = max(used[test], share)
        for test in about["failed"]:
            failed[test].add(seed)
    return used, failed


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="as for pytest")
    parser.add_argument("--seeds", type=int, default=2, help="besides 0, which moves nothing")
    parser.add_argument("--workers", type=int, default=0, help="of pytest-xdist")
    options = parser.parse_args()
    arguments = list(options.tests)
    arguments += ["-n", str(options.workers)] if options.workers else ["-p", "no:xdist"]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds + 1):
            run(seed, folder, arguments)
            print(f"seed {seed}: done", file=sys.stderr, flush=True)
        used, failed = merged(folder)
    print(f"{len(used)} tests compare with a tolerance, at {options.seeds + 1} seeds")
    for test in sorted(failed):
        print(f"FAILED at seeds {', '.join(sorted(failed[test]))}: {test}")
    for share, test in sorted(((share, test) for test, share in used.items()), reverse=True):
        if share > WORRYING:
            print(f"{share:.2f} of its tolerance: {test}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
