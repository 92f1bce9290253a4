"""Checkpoints of a run, with orbax, and with checksums, which orbax does not store.

orbax writes in the background, renames the directory when it is complete, and deletes checkpoints
beyond `keep`. So a run that is killed at any moment leaves its last complete checkpoint. But orbax
loads a flipped bit as another value, and a copied or renamed directory as another step. To detect
both, the state is stored with its step, a checksum of each leaf, and a checksum of this record.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class CheckpointError(Exception):
    """Reports a directory or checkpoint that cannot be used as asked, in one sentence."""


class Checkpoints:
    """The directory of one run. All processes make one, and call its methods together."""

    def __init__(self, directory: Path, *, keep: int, resume: bool):
        """Opens `directory`, or creates it for a new run; the last `keep` checkpoints stay.

        With `resume` an empty directory starts a new run, so that a scheduler can always start the
        same command. Without `resume` a directory with checkpoints is refused.
        """
        self._directory = directory
        if directory.exists() and not directory.is_dir():
            raise CheckpointError(f"{directory} is a file; checkpoints need a directory")
        missing = directory if resume else directory.absolute().parent
        if not missing.is_dir():
            raise CheckpointError(f"the directory {missing} does not exist")
        try:
            wait = None
            if jax.process_count() > 1:
                # Seconds to wait for a process that failed; gloo waits 30 s. They count while this
                # process writes, too, and while it is suspended.
                wait = ocp.AsyncOptions(timeout_secs=20)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True, async_options=wait
            )
            self._orbax = ocp.CheckpointManager(
                directory.absolute(), item_names=("state", "run"), options=options
            )
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be written to: {error.strerror}") from error
        if not resume and self._orbax.all_steps():
            raise CheckpointError(
                f"{directory} already holds checkpoints: add --resume, or choose another directory"
            )

    def restore(self, like: Any, must_equal: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Reads the newest checkpoint.

        Args:
          like: A tree of NumPy arrays of the same structure; its values are not used.
          must_equal: Values that must equal those of the saved run, by the names of their flags.

        Returns:
          The state, as NumPy arrays, and the values beside it; None if there is no checkpoint.

        Raises:
          CheckpointError: The checkpoint is damaged, of another run, or of another step than its
            name says. The run does not continue from an earlier checkpoint by itself.
        """
        step = self._orbax.latest_step()
        if step is None:
            return None
        path = self._directory / str(step)
        again = f"to resume from the checkpoint before it, move {path} out of {self._directory}"
        try:
            run = self._orbax.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
            run = run["run"]
            sound = run.pop("checksum") == _checksum_of(run)
        except Exception as error:
            raise CheckpointError(
                f"{path} is truncated, damaged or from another program ({_why(error)}); {again}"
            ) from error
        if not sound or run["step"] != step:
            what = f"holds step {run['step']}" if sound else "is damaged: run is not what was saved"
            raise CheckpointError(f"{path} {what}; {again}")
        saved = run["config"].get
        other = [f"{k} {saved(k)}, not {v}" for k, v in must_equal.items() if saved(k) != v]
        if other:
            raise CheckpointError(f"cannot resume: {path} is of a run with {'; '.join(other)}")
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            state = self._orbax.restore(step, args=args)["state"]
        except Exception as error:
            raise CheckpointError(f"{path} is damaged ({_why(error)}); {again}") from error
        now = checksums(state)
        wrong = [name for name in now if now[name] != run["leaves"].get(name)]
        if wrong:
            some = ", ".join(wrong[:3])
            if wrong[3:]:
                some += f" and {len(wrong) - 3} more"
            raise CheckpointError(f"{path} is damaged: {some} is not what was saved; {again}")
        return state, run

    def save(self, step: int, state: Any, about: dict[str, Any]) -> None:
        """Starts to write a checkpoint; raises an error if the one before could not be written.

        With several processes it waits until this checkpoint is written. If one process could not
        write, another one that went on would wait for it in the next step.

        Args:
          step: The number of steps done.
          state: NumPy arrays, the same on all processes.
          about: Values to store beside the state, as JSON.
        """
        run = about | {"step": step, "leaves": checksums(state)}
        run["checksum"] = _checksum_of(run)
        args = {"state": ocp.args.StandardSave(state), "run": ocp.args.JsonSave(run)}
        try:
            self._orbax.save(step, args=ocp.args.Composite(**args), force=True)
            if jax.process_count() > 1:
                self._orbax.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    def close(self) -> None:
        """Waits until the last checkpoint is written, and raises the same errors as `save`."""
        try:
            self._orbax.wait_until_finished()
            self._orbax.close()
        except Exception as error:
            raise self._not_written(error) from error

    def _not_written(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint in {self._directory} could not be written, and earlier ones are "
            f"untouched ({_why(error)})"
        )


def checksums(tree: Any) -> dict[str, str]:
    """Returns the dtype, the shape and a CRC-32 of the bytes of each leaf, by its path."""
    by_leaf = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        x = np.asarray(leaf)
        name = jax.tree_util.keystr(path)
        by_leaf[name] = f"{x.dtype}{list(x.shape)} {zlib.crc32(x.tobytes()):08x}"
    return by_leaf


def _checksum_of(run: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(run, sort_keys=True).encode())


def _why(error: BaseException) -> str:
    while error.__context__:  # after a failure orbax waits for other processes, which fails too
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
