"""Lists the tests that are near to their tolerance, with every reference moved by one rounding.

    python -m tests.perturb tests/jaxcomp/reducers --seeds 3

What a reference is given (gradients, targets, weights) is moved to neighbouring float32 numbers,
and so is all that tests draw at random; each seed moves them elsewhere. Every comparison with a
tolerance is recorded with the share of it that was used. The table has the tests that fail and
those that use more than a third: another processor may turn them red.
"""

import argparse
import collections
import concurrent.futures
import functools
import inspect
import multiprocessing
import os
import sys
import zlib

import numpy as np
import pytest

WORRYING = 1 / 3
DRAWN = ("normal", "standard_normal", "uniform", "random")


class Perturbed:
    """Runs as a plugin of pytest: moves what references get, records how tolerances are used."""

    def __init__(self, seed):
        self.seed = seed  # 0 moves nothing
        self.test = "collection"
        self.used = collections.defaultdict(float)  # by test, the largest share of a tolerance
        self.failed = set()

    def pytest_configure(self):
        """Patches what tests import, before they do; helpers must look it up in `np.testing`."""
        from tests.helpers import control, local_runs, reference

        np.testing.assert_allclose = self.recorded(np.testing.assert_allclose)
        control.record = self.record
        if self.seed:
            step = reference.Reference.step
            reference.Reference.step = self.moved_argument(step, "gradients")
            local_runs.in_numpy = self.moved_argument(local_runs.in_numpy, "targets")
            names = {name: self.moved_result(getattr(np.random.Generator, name)) for name in DRAWN}
            generator = type("Generator", (np.random.Generator,), names)
            make = np.random.default_rng
            np.random.default_rng = lambda seed=None: generator(make(seed).bit_generator)

    def pytest_runtest_logstart(self, nodeid):
        self.test = nodeid

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)

    def moved(self, values):
        """Moves numbers to neighbours in float32, up or down at random, equal arrays alike."""
        array = np.asarray(values)
        if not np.issubdtype(array.dtype, np.floating):
            return values
        # Whoever draws the same numbers twice gets the same numbers again.
        random = np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(array.tobytes())]))
        signs = random.integers(2, size=array.shape) * 2 - 1
        relative = np.asarray(np.finfo(np.float32).eps * signs, array.dtype)
        return array + relative * array

    def moved_argument(self, function, name):
        """Returns the function, called with one of its arguments moved."""
        signature = inspect.signature(function)

        def call(*arguments, **named):
            bound = signature.bind(*arguments, **named)
            bound.arguments[name] = self.moved(bound.arguments[name])
            return function(*bound.args, **bound.kwargs)

        return call

    def moved_result(self, function):
        """Returns the function, whose result is moved."""
        return lambda *arguments, **named: self.moved(function(*arguments, **named))

    def record(self, difference, allowed):
        """Notes the largest share of a tolerance that this test used."""
        difference = np.asarray(difference, np.float64)
        allowed = np.broadcast_to(np.asarray(allowed, np.float64), difference.shape)
        compared = (difference > 0) & (allowed > 0)
        shares = difference[compared] / allowed[compared]
        self.used[self.test] = max(self.used[self.test], shares.max(initial=0))

    def recorded(self, check):
        """Returns `numpy.testing.assert_allclose` that records."""

        def assert_allclose(actual, desired, rtol=1e-7, atol=0, *rest, **named):
            check(actual, desired, rtol, atol, *rest, **named)
            values = np.asarray(actual)
            expected = np.asarray(desired)
            if "f" in (values.dtype.kind, expected.dtype.kind):
                values = values.astype(np.float64)
                expected = expected.astype(np.float64)
                with np.errstate(invalid="ignore"):  # of infinite values
                    difference = np.nan_to_num(np.abs(values - expected), posinf=0)
                self.record(difference, atol + rtol * np.abs(expected))

        return assert_allclose


def run(arguments, seed):
    """Runs the tests once, in a process of its own, without what pytest prints."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    plugin = Perturbed(seed)
    code = pytest.main([*arguments, "-p", "no:xdist"], plugins=[plugin])
    return code, dict(plugin.used), plugin.failed


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=["tests"], help="as for pytest")
    parser.add_argument("--seeds", type=int, default=2, help="besides 0, which moves nothing")
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time")
    options = parser.parse_args()
    used = collections.defaultdict(float)
    failed = collections.defaultdict(list)
    # Not a `multiprocessing.Pool`, whose processes may not start others, as some tests do.
    with concurrent.futures.ProcessPoolExecutor(
        options.workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        runs = pool.map(functools.partial(run, options.tests), range(options.seeds + 1))
        for seed, (code, shares, red) in enumerate(runs):
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                sys.exit(f"pytest did not run {' '.join(options.tests)}: {code!r}")
            print(f"seed {seed}: done", file=sys.stderr, flush=True)
            for test, share in shares.items():
                used[test] = max(used[test], share)
            for test in red:
                failed[test].append(str(seed))
    print(f"{len(used)} tests compare with a tolerance, at {options.seeds + 1} seeds")
    for test, seeds in sorted(failed.items()):
        print(f"FAILED at seeds {', '.join(seeds)}: {test}")
    for test, share in sorted(used.items(), key=lambda item: -item[1]):
        if share > WORRYING:
            print(f"{share:.2f} of its tolerance: {test}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
