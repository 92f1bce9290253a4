"""Writes and reads Flax checkpoints: orbax directories with checksums."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.files import new_folder, no_file
from torch_bridge._base.terminal import some
from torch_bridge._pairing.leaves import without_values

# The names that examples/language_model/checkpoints.py uses.
_STATE = "state"
_CONFIG = "config"
_SUMS = "SHA256SUMS"  # a file in the step's folder, in the format of sha256sum


def write_flax(
    path: pathlib.Path, state: Mapping[str, Any], config: Mapping[str, Any], *, force: bool = False
) -> None:
    """Writes a train state as one step of an orbax directory, completely or not at all.

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
    # The temporary folder is inside `path`, because a rename must stay on one file system.
    with (
        new_folder(path),
        tempfile.TemporaryDirectory(
            prefix=f".{name}.", suffix=".tmp", dir=path, ignore_cleanup_errors=True
        ) as folder,
    ):
        # Python 3.12 makes the path absolute, but errors shall have it as the user passed it.
        folder = path / pathlib.Path(folder).name
        new = folder / name
        old = folder.with_suffix(".old")
        _save(folder, int(name), jax.tree.map(_written, dict(state)), dict(config))
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


def _written(leaf: Any) -> Any:
    """Returns a leaf as a NumPy array; a random key stays, because NumPy has no such dtype."""
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        return leaf
    return np.asarray(leaf)


def _save(folder: pathlib.Path, step: int, tree: Any, config: Any) -> None:
    args = ocp.args.Composite(state=ocp.args.StandardSave(tree), config=ocp.args.JsonSave(config))
    logger = logging.getLogger("absl")  # it would print each thread's error with its traceback
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with _orbax(folder) as manager:
            manager.save(step, args=args)
    except ValueError as error:  # tensorstore raises it for an error of the system
        of_system = re.search(r"os_error_code='(\d+)'", str(error))
        if of_system is None:
            raise
        code = int(of_system[1])
        raise OSError(code, os.strerror(code), str(folder.parent)) from error
    finally:
        logger.setLevel(level)


def _orbax(path: pathlib.Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(path.absolute(), item_names=(_STATE, _CONFIG))


class FlaxFile:
    """The newest step of an orbax directory that `write_flax` or a training script wrote.

    Attributes:
      shapes: The step's tree, with arrays that take no memory. As on the disk, a NamedTuple is a
        dictionary, and an empty part is None.
      config: What `write_flax` wrote beside the newest step that has it; else empty. A training
        script may have added later steps to the directory.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the structure of the newest step.

        Raises:
          CheckpointMismatch: The directory holds no step, or a file has another checksum.
        """
        _files(path)
        with _orbax(path) as manager:
            step = manager.latest_step()
        if step is None:
            raise CheckpointMismatch(f"{path} holds no orbax checkpoint.")
        folder = path.absolute() / str(step)
        _refuse_changes(folder)
        self._item: Any = folder
        for name in (_STATE, "default"):  # "default" is orbax's own name
            if (folder / name).exists():
                self._item = folder / name
                break
        self.shapes = self._ask(lambda orbax: without_values(orbax.metadata(self._item).tree))
        self.config = _config_of(path)

    def read(self) -> Any:
        """Reads the tree with its values, as NumPy arrays; the devices of the run do not matter."""
        args = ocp.args.StandardRestore(self.shapes)
        return self._ask(lambda orbax: orbax.restore(self._item, args=args))

    def _ask(self, question: Callable[[ocp.StandardCheckpointHandler], Any]) -> Any:
        try:
            return question(ocp.StandardCheckpointHandler())
        # The errors that orbax raises for a damaged directory, or for one of another kind.
        except (
            *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
            FileNotFoundError,
        ) as error:
            raise CheckpointMismatch(
                f"{self._item} is not a tree of arrays as orbax's StandardSave writes it. Convert "
                f"it in Python with torch_bridge.to_torch. ({error!s:.200})"
            ) from error


def _config_of(path: pathlib.Path) -> dict[str, Any]:
    """Reads the newest `config` that `write_flax` wrote into an orbax directory.

    Raises:
      CheckpointMismatch: The file is not a dictionary in JSON.
    """
    steps = {}
    for file in path.glob(f"*/{_CONFIG}/metadata"):
        # A script's config may be anything; `write_flax` writes its sums beside its own.
        if file.parts[-3].isdecimal() and (file.parents[1] / _SUMS).exists():
            steps[int(file.parts[-3])] = file
    if not steps:
        return {}
    newest = steps[max(steps)]
    try:
        config = json.loads(newest.read_text("utf-8"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise CheckpointMismatch(f"{newest} is damaged: a dictionary in JSON was expected.")
    return config


def _refuse_changes(folder: pathlib.Path) -> None:
    if not (folder / _SUMS).exists():  # training scripts write no checksums
        return
    recorded = set((folder / _SUMS).read_bytes().decode("utf-8", "replace").splitlines())
    wrong = {line.partition("  ")[2] for line in recorded.symmetric_difference(_sums(folder))}
    if wrong:
        raise CheckpointMismatch(
            f"{folder} is damaged: {some(sorted(wrong))} differ from {_SUMS}. Convert the "
            "checkpoint again, or copy it again."
        )


def _sums(folder: pathlib.Path) -> list[str]:
    """Returns a line for each file in `folder`: its SHA-256 and its path in the folder."""
    lines = []
    for path in sorted(_files(folder)):
        if path != folder / _SUMS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}")
    return lines


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Lists all files in a folder, or the one file; refuses pipes, sockets and devices."""
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
            raise CheckpointMismatch(f"{file} is {kind}, not a checkpoint.")
        elif folder not in seen:  # links may lead in circles
            seen.add(folder)
            waiting.extend(file.iterdir())
    return files
