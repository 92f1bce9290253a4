"""Checkpoints of a training run: asynchronous, checked, independent of the number of devices.

What is saved is the consolidated state (see `jaxcomp.consolidate`): one copy of everything,
whatever the number of replicas, with checksums of each leaf and of each file beside it. Every
process has that copy on its host, so the first one writes it alone, and no process waits for
another. orbax writes each step into a temporary directory and renames it when it is complete, so
that a run killed at any moment leaves its last complete checkpoint usable; no older one is deleted
before the next was read back and found to be what was saved.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import quiet
from directories import CheckpointError, Unusable, check_seal, locked, saved_steps, seal
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils

import jaxcomp

T = TypeVar("T")
quiet.orbax()


class WriteError(CheckpointError):
    """A checkpoint that could not be written, or was not written as it should."""


class _Written(NamedTuple):
    """The last checkpoint of this run."""

    step: int
    like: Any  # its tree, with arrays that take no memory
    fingerprint: dict[str, str]


class _Sealing(ocp.CompositeCheckpointHandler):
    """Seals the files before the temporary directory gets the name of a complete checkpoint."""

    def finalize(self, directory: Any) -> None:
        super().finalize(directory)
        seal(Path(directory))


@ocp.args.register_with_handler(_Sealing, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """What `_Sealing` saves and restores."""


class Checkpoints:
    """A directory of checkpoints of one run.

    Attributes:
      directory: Where they are.
      every: Steps between two of them.
      also: Further steps to save after.
      passed_over: A sentence for each checkpoint that was not used because it is damaged.
    """

    def __init__(self, directory: Path, *, every: int, keep: int, resume: bool):
        """Opens `directory`, and creates it for a new run.

        Args:
          directory: Its parent must exist; for `resume`, it must itself.
          every: Steps between two checkpoints.
          keep: How many of the last ones to keep.
          resume: Continue from the last checkpoint. An empty directory then starts a new run, so
            that a job that is restarted by a scheduler can always use the same command.

        Raises:
          CheckpointError: The directory is missing or a file, is in use by another run, or holds a
            run and `resume` is False.
        """
        self.directory, self.every, self._keep = directory.absolute(), every, keep
        self.passed_over: list[str] = []
        self.also: frozenset[int] = frozenset()
        self._written: _Written | None = None
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{directory} is a file; checkpoints need a directory")
        missing = self.directory if resume else self.directory.parent
        if not missing.is_dir():
            raise CheckpointError(f"the directory {missing} does not exist")
        if not resume and next(saved_steps(self.directory), None) is not None:
            raise CheckpointError(
                f"{directory} already holds checkpoints: add --resume, or choose another directory"
            )
        me = jax.process_index()
        self._writes = me == 0
        self._lock: IO[str] | None = locked(self.directory) if self._writes else None
        # Not before: whoever had the lock may have written some, and deleted others.
        self._steps = _of_the_first(sorted(saved_steps(self.directory)))
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
        )
        handler = _Sealing(
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
            # Without OCDBT each leaf has files of its own, whose paths name it.
            state=ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone),
            config=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        )
        self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=alone)

    def due(self, step: int) -> bool:
        """Whether to save after so many steps; also the place where failed writes are noticed."""
        self.check()
        return step % self.every == 0 or step in self.also

    def restored(self, read: Callable[[int], T]) -> T | None:
        """What `read` makes of the newest checkpoint that is usable for all processes.

        Args:
          read: A function of the steps that a checkpoint has done; raises `Unusable`.

        Returns:
          Its result; None if there are no checkpoints.

        Raises:
          CheckpointError: There are checkpoints, and none is usable.
        """
        found, unusable = None, []
        for step in reversed(self._steps):
            try:
                check_seal(self.directory / str(step))
                found, problem = read(step), ""
            except Unusable as error:
                problem = str(error)
            if np.all(multihost_utils.process_allgather(np.array(not problem))):
                break
            path = self.directory / str(step)
            reason = problem or "another process cannot read it"
            self.passed_over.append(f"the checkpoint {path} is not used: {reason}")
            unusable.append(path)
        else:
            if unusable:
                raise CheckpointError(f"cannot resume: {'; '.join(self.passed_over)}")
            return None
        for path in unusable if self._writes else ():  # kept, but out of the way of this run
            path.rename(path.with_name(f"{path.name}.damaged-{int(time.time())}"))
        return found

    def metadata(self, step: int) -> dict[str, Any]:
        """What was stored beside the state of a checkpoint.

        Raises:
          Unusable: It is damaged, or not one of this program.
        """
        args = _Items(config=ocp.args.JsonRestore())
        with _reading("it is not one of this program, or damaged"):
            return self._orbax.restore(self.directory / str(step), args=args)["config"]

    def restore(self, step: int, like: TrainState, metadata: dict[str, Any]) -> TrainState:
        """The state of a checkpoint.

        Args:
          step: The steps that it has done.
          like: A fresh state of the same structure; its values are not used.
          metadata: As the method of this name gives it.

        Returns:
          The consolidated state, on the host.

        Raises:
          Unusable: It is damaged; the message names the leaves.
        """
        with _reading("it is damaged"):
            state = self._read(step, jax.device_get(like))
        try:
            jaxcomp.check_fingerprint(state, metadata["fingerprint"])
        except jaxcomp.FingerprintMismatch as error:
            raise Unusable(str(error).split(". ")[0]) from error
        return state

    def save(self, step: int, state: TrainState, metadata: dict[str, Any]) -> None:
        """Starts to write a checkpoint and returns; processes but the first do nothing.

        Args:
          step: Steps done.
          state: A consolidated state on the host.
          metadata: Stored beside it as JSON: the run's configuration, and what it has counted.

        Raises:
          WriteError: The one before could not be written.
        """
        if not self._writes:
            return
        self._finish()
        with self._writing(step):
            written = _Written(step, jax.tree.map(_empty, state), jaxcomp.fingerprint(state))
            config = ocp.args.JsonSave(metadata | {"fingerprint": written.fingerprint})
            args = _Items(state=ocp.args.PyTreeSave(state), config=config)
            self._orbax.save(self.directory / str(step), args=args)
            self._written = written

    def check(self) -> None:
        """Call it often: what fails in the background is then known at once.

        Raises:
          WriteError: A checkpoint could not be written.
        """
        if self._written:
            with self._writing(self._written.step):
                self._orbax.check_for_errors()

    def close(self) -> None:
        """Waits for what is being written.

        Raises:
          WriteError: It could not be.
        """
        try:
            self._finish()
        finally:
            with contextlib.suppress(Exception):  # what failed has been said
                self._orbax.close()
            if self._lock:
                self._lock.close()

    def _finish(self) -> None:
        """Waits for the last checkpoint, reads it back, and deletes those beyond `keep`."""
        if self._written is None:
            return
        (step, like, saved), self._written = self._written, None
        with self._writing(step):
            self._orbax.wait_until_finished()
            jaxcomp.check_fingerprint(self._read(step, like), saved)
            for old in sorted(saved_steps(self.directory))[: -self._keep]:
                shutil.rmtree(self.directory / str(old))

    def _read(self, step: int, like: Any) -> Any:
        arrays = ocp.checkpoint_utils.construct_restore_args(like)
        args = _Items(state=ocp.args.PyTreeRestore(like, restore_args=arrays))
        return self._orbax.restore(self.directory / str(step), args=args)["state"]

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._written = None
            good = [s for s in saved_steps(self.directory) if s < step]
            kept = f"that of step {max(good)} is untouched" if good else "there is none before it"
            raise WriteError(
                f"the checkpoint of step {step} could not be written, and {kept} "
                f"({_first_line(error)})"
            ) from error


def _of_the_first(steps: list[int]) -> list[int]:
    """The steps that process 0 sees, on all processes."""
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(steps))))
    padded = np.zeros(count, np.int32)
    padded[: len(steps)] = steps[:count]
    return multihost_utils.broadcast_one_to_all(padded).tolist()


@contextlib.contextmanager
def _reading(otherwise: str) -> Iterator[None]:
    # Damaged files raise whatever the parser in whose way they are raises.
    try:
        yield
    except Exception as error:
        raise Unusable(f"{otherwise} ({_first_line(error)})") from error


def _empty(leaf: Any) -> Any:
    """An array like the leaf that takes no memory; a number as it is."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) if np.ndim(leaf) else leaf


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
