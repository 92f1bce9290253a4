"""Checkpoints of a training run: asynchronous, the last few kept, independent of the device count.

What is saved is the consolidated state (see `jaxcomp.consolidate`): one copy of everything,
whatever the number of replicas. orbax writes each step into a temporary directory and renames it
when it is complete, so that a run killed at any moment leaves its last complete checkpoint usable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState


class CheckpointError(Exception):
    """A checkpoint directory that cannot be used as asked; the message is one sentence."""


class Checkpoints:
    """A directory of checkpoints of one run.

    Attributes:
      directory: Where they are.
      every: Steps between two of them.
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
          CheckpointError: The directory is missing or a file, or holds a run and `resume` is False.
        """
        self.directory, self.every = directory.absolute(), every
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{directory} is a file; checkpoints need a directory")
        missing = self.directory if resume else self.directory.parent
        if not missing.is_dir():
            raise CheckpointError(f"the directory {missing} does not exist")
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=("state", "config"),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )
        if not resume and self.latest_step is not None:
            self.close()
            raise CheckpointError(
                f"{directory} already holds checkpoints: add --resume, or choose another directory"
            )

    @property
    def latest_step(self) -> int | None:
        """Steps done by the last complete checkpoint."""
        return self._manager.latest_step()

    def metadata(self) -> dict[str, Any]:
        """What was stored beside the state of the last checkpoint.

        Raises:
          CheckpointError: It is no checkpoint of this program.
        """
        args = ocp.args.Composite(config=ocp.args.JsonRestore())
        try:
            return self._manager.restore(self.latest_step, args=args)["config"]
        except KeyError as error:
            raise CheckpointError(
                f"cannot resume: the checkpoint in {self.directory / str(self.latest_step)} is not "
                "one of this program; choose another directory"
            ) from error

    def restore(self, like: TrainState) -> TrainState:
        """The last checkpoint.

        Args:
          like: A fresh state of the same structure; its values are not used.

        Returns:
          The consolidated state, on the host.
        """
        args = ocp.args.Composite(state=ocp.args.StandardRestore(jax.device_get(like)))
        return self._manager.restore(self.latest_step, args=args)["state"]

    def save(self, step: int, state: TrainState, metadata: dict[str, Any]) -> None:
        """Starts to write a checkpoint and returns.

        Args:
          step: Steps done.
          state: A consolidated state on the host.
          metadata: Stored beside it as JSON: the run's configuration, and what it has counted.
        """
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(metadata)
        )
        self._manager.save(step, args=args)

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()
