"""Flax checkpoints on disk: orbax directories with checksums."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.files import no_file
from torch_bridge._base.terminal import some
from torch_bridge._pairing.leaves import hollow

# As examples/language_model/checkpoints.py names them.
_STATE, _CONFIG = "state", "config"
_SUMS = "SHA256SUMS"  # in a step's folder, as sha256sum writes and checks them


def write_flax(
    path: pathlib.Path, state: Mapping[str, Any], config: Mapping[str, Any], *, force: bool = False
) -> None:
    """Writes a train state as a step of an orbax directory.

    Raises:
      CheckpointMismatch: The directory already holds a checkpoint of this step.
      OSError: The disk is full, for example.
    """
    name = str(int(state["step"]))
    place = path / name
    if place.exists() and not force:
        raise CheckpointMismatch(
            f"{path} already holds step {name}. Choose another --out, or pass --force to "
            f"overwrite it."
        )
    path.mkdir(parents=True, exist_ok=True)
    # Inside of `path`, which may be a mounted file system of its own.
    with tempfile.TemporaryDirectory(
        prefix=f".{name}.", suffix=".tmp", dir=path, ignore_cleanup_errors=True
    ) as folder:
        new, old = pathlib.Path(folder, name), pathlib.Path(f"{folder}.old")
        _save(new.parent, int(name), jax.tree.map(np.asarray, dict(state)), dict(config))
        (new / _SUMS).write_text("".join(f"{line}\n" for line in _sums(new)))
        if place.exists():
            place.rename(old)
        try:
            new.rename(place)
        except OSError:
            if old.exists():
                old.rename(place)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _save(folder: pathlib.Path, step: int, tree: Any, config: Any) -> None:
    args = ocp.args.Composite(state=ocp.args.StandardSave(tree), config=ocp.args.JsonSave(config))
    logger = logging.getLogger("absl")  # which shows the error of each thread, with its traceback
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with _orbax(folder) as manager:
            manager.save(step, args=args)
    except ValueError as error:  # what tensorstore makes of an error of the system
        for code in (errno.ENOSPC, errno.EDQUOT):
            if f"'{code}'" in str(error):
                raise OSError(code, os.strerror(code), str(folder.parent)) from error
        raise
    finally:
        logger.setLevel(level)


def _orbax(path: pathlib.Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(path.absolute(), item_names=(_STATE, _CONFIG))


class FlaxFile:
    """The newest step of what `write_flax` or a training script wrote, in whatever structure.

    Attributes:
      shapes: Its tree, of arrays that take no memory. Named tuples are dictionaries, as they are on
        the disk, and what is empty is None.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the structure.

        Raises:
          CheckpointMismatch: There is none, or files of it are not what was written.
        """
        _files(path)
        with _orbax(path) as manager:
            step = manager.latest_step()
        if step is None:
            raise CheckpointMismatch(f"{path} holds no orbax checkpoint.")
        folder = path.absolute() / str(step)
        _refuse_changes(folder)
        items = (folder / name for name in (_STATE, "default"))  # the latter of a script's own
        self._item: Any = next((item for item in items if item.exists()), folder)
        self.shapes = self._ask(lambda orbax: hollow(orbax.metadata(self._item).tree))

    def read(self) -> Any:
        """Reads the tree with its values, as NumPy arrays whatever devices they were on."""
        args = ocp.args.StandardRestore(self.shapes)
        return self._ask(lambda orbax: orbax.restore(self._item, args=args))

    def _ask(self, question: Callable[[ocp.StandardCheckpointHandler], Any]) -> Any:
        try:
            return question(ocp.StandardCheckpointHandler())
        # What orbax raises on a directory of another kind, or a damaged one.
        except (
            *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
            FileNotFoundError,
        ) as error:
            raise CheckpointMismatch(
                f"{self._item} is no tree of arrays as orbax's StandardSave writes it. Convert it "
                f"in Python with torch_bridge.to_torch. ({error!s:.200})"
            ) from error


def _refuse_changes(folder: pathlib.Path) -> None:
    if not (folder / _SUMS).exists():  # a step that a training script wrote has none
        return
    recorded = set((folder / _SUMS).read_bytes().decode("utf-8", "replace").splitlines())
    wrong = {line.partition("  ")[2] for line in recorded.symmetric_difference(_sums(folder))}
    if wrong:
        raise CheckpointMismatch(
            f"{folder} is damaged: {some(sorted(wrong))} are not what {_SUMS} says. Convert it "
            "again, or copy it again from where it is whole."
        )


def _sums(folder: pathlib.Path) -> list[str]:
    """Writes a line for each file in `folder`: its SHA-256, and its name there."""
    lines = []
    for path in sorted(_files(folder)):
        if path != folder / _SUMS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}")
    return lines


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Lists every file in a folder, or the one; anything that would be waited for is refused."""
    waiting = [path]
    seen = set()
    files = []
    while waiting:
        file = waiting.pop()
        kind = no_file(file)
        folder = file.resolve()
        if kind is None:
            files.append(file)
        elif not file.is_dir():
            raise CheckpointMismatch(f"{file} is {kind}, and no checkpoint.")
        elif folder not in seen:  # links lead in circles
            seen.add(folder)
            waiting.extend(file.iterdir())
    return files
