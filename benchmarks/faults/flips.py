"""Single flipped bits in a checkpoint: which of them a run would go on from without noticing."""

from __future__ import annotations

import dataclasses
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxcomp
from benchmarks.common.paths import LANGUAGE_MODEL

sys.path.insert(0, str(LANGUAGE_MODEL))
import jax
from checkpoints import Checkpoints
from data_parallel import new_state
from lm import ModelConfig, Transformer, init_params
from strategies import STRATEGIES, Options, adamw


@dataclasses.dataclass
class Flips:
    """What became of the flipped bits."""

    flips: int = 0
    noticed: int = 0  # the checkpoint before was used, and a sentence said so
    harmless: int = 0  # the newest one was used, and every leaf was what had been saved
    silent: int = 0  # the newest one was used with other values
    lost: int = 0  # no checkpoint was used


def flip_bits(checkpoints: Path, scratch: Path, *, flips: int, seed: int) -> Flips:
    """Flips one bit after the other in any file of the newest checkpoint, and resumes.

    Args:
      checkpoints: A directory with two checkpoints of a run at least.
      scratch: A folder for the damaged copies.
      flips: How many.
      seed: Of the files and bits.
    """
    rng, found = random.Random(seed), Flips()
    newest = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    expected, _ = _resumed(checkpoints)
    assert expected is not None  # the caller made them
    files = [path for path in (checkpoints / str(newest)).rglob("*") if path.is_file()]
    files = [path.relative_to(checkpoints) for path in files if path.stat().st_size]
    for _ in range(flips):
        copy = scratch / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkpoints, copy)
        file = copy / rng.choice(files)
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        try:
            result, passed_over = _resumed(copy)
        except Exception as error:
            print(f"{file.name}: {error}", flush=True)
            result, passed_over = None, []
        found.flips += 1
        found.noticed += bool(passed_over) and result is not None
        found.lost += result is None
        same = result == expected
        found.harmless += not passed_over and same
        found.silent += result is not None and not passed_over and not same
    return found


def _resumed(directory: Path) -> tuple[Any, list[str]]:
    """The values that a run would go on from, as checksums, and what it passed over."""
    checkpoints = Checkpoints(directory, every=1, keep=9, resume=True)
    try:
        return checkpoints.restored(_reader(checkpoints)), checkpoints.passed_over
    finally:
        checkpoints.close()


def _reader(checkpoints: Checkpoints) -> Callable[[int], Any]:
    def read(step: int) -> Any:
        saved = checkpoints.metadata(step)
        model = Transformer(
            ModelConfig(saved["layers"], saved["width"], saved["heads"], saved["context"])
        )
        options = Options(saved["rank"], saved["start_step"], saved["comm_dtype"])
        optimizer = adamw(saved["learning_rate"], saved["steps"])
        tx = STRATEGIES[saved["strategy"]].transformation(options, optimizer, "data")
        like = new_state(model, init_params(model, 0), tx)
        state = checkpoints.restore(step, jax.device_get(like), saved)
        return step, jaxcomp.fingerprint(state), saved

    return read
