"""Single flipped bits in the newest checkpoint: which of them a run would go on from.

    python -m benchmarks.faults.flips CHECKPOINTS SCRATCH FLIPS SEED

Prints one JSON object for each.
"""

from __future__ import annotations

import json
import os
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

State = tuple[int, dict[str, str]]  # a step and the checksums of its leaves


def main() -> None:
    """The command line."""
    checkpoints, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    flips, rng = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    steps = sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    resumed = resumer(checkpoints, steps[-1])
    newest, _ = resumed(checkpoints)
    shutil.copytree(checkpoints, scratch, dirs_exist_ok=True)
    shutil.rmtree(scratch / str(steps[-1]))
    before, _ = resumed(scratch)
    for _ in range(flips):
        shutil.rmtree(scratch)
        shutil.copytree(checkpoints, scratch, copy_function=os.link)
        file, where = flip(scratch / str(steps[-1]), rng)
        found: State | None = None
        try:
            found, passed_over = resumed(scratch)
        except Exception as error:
            passed_over = [f"{type(error).__name__}: {error}"]
        result = outcome(found, passed_over, newest, before, where)
        said = [sentence.replace(str(scratch), "") for sentence in passed_over]
        print(
            json.dumps({"file": file, "where": where, "outcome": result, "said": said}), flush=True
        )


def flip(checkpoint: Path, rng: random.Random) -> tuple[str, str]:
    """One bit of one file; first a kind of file, so that the few large ones are not all there is.

    Returns:
      The kind, and the file's path in the checkpoint.
    """
    kinds: dict[str, list[Path]] = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.stat().st_size:
            values = path.name.replace(".", "").isdecimal()
            kinds.setdefault("values of a leaf" if values else path.name, []).append(path)
    kind = rng.choice(sorted(kinds))
    file = rng.choice(kinds[kind])
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.unlink()  # the original has the same inode
    file.write_bytes(content)
    return kind, str(file.relative_to(checkpoint))


def outcome(
    found: State | None, passed_over: list[str], newest: State, before: State, where: str
) -> str:
    """What became of a flipped bit.

    "passed over": a sentence named the file and the checkpoint before was used, or "passed over,
    file unnamed"; "harmless": the newest one was used, every leaf as saved. The rest must not be:
    "lost", no checkpoint was used, and "silent", other values were.
    """
    if found is None:
        return "lost"
    if not passed_over:
        return "harmless" if found == newest else "silent"
    if found != before:
        return "silent"
    return "passed over" if where in passed_over[0] else "passed over, file unnamed"


def resumer(checkpoints: Path, step: int) -> Callable[[Path], tuple[State, list[str]]]:
    """A function that resumes from a directory as a run does.

    It returns what the run would go on from, and the sentences about what it passed over.
    """
    saved = json.loads((checkpoints / str(step) / "config" / "metadata").read_text())
    model = Transformer(
        ModelConfig(saved["layers"], saved["width"], saved["heads"], saved["context"])
    )
    options = Options(saved["rank"], saved["start_step"], saved["comm_dtype"])
    optimizer = adamw(saved["learning_rate"], saved["steps"])
    tx = STRATEGIES[saved["strategy"]].transformation(options, optimizer, "data")
    like = jax.device_get(new_state(model, init_params(model, 0), tx))

    def resumed(directory: Path) -> tuple[State, list[str]]:
        opened = Checkpoints(directory, every=1, keep=9, resume=True)

        def read(step: int) -> State:
            state: Any = opened.restore(step, like, opened.metadata(step))
            return step, jaxcomp.fingerprint(state)

        try:
            found = opened.restored(read)
        finally:
            opened.close()
        assert found is not None  # there are checkpoints, or `restored` raises
        return found, opened.passed_over

    return resumed


if __name__ == "__main__":
    main()
