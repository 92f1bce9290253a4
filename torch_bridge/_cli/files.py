"""Flax checkpoints on disk: orbax directories and msgpack files, written leaf by leaf."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import jax
import numpy as np

from torch_bridge._base.atomic import replacing
from torch_bridge._base.errors import CheckpointMismatch

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

# As examples/language_model/checkpoints.py names them.
_STATE, _CONFIG = "state", "config"


def write_flax(
    path: pathlib.Path,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    force: bool = False,
) -> None:
    """Write a train state: ``*.msgpack`` with flax.serialization, else an orbax directory.

    Raises:
      CheckpointMismatch: The directory already holds a checkpoint of this step.
    """
    tree = jax.tree.map(np.asarray, dict(state))
    if path.suffix == ".msgpack":
        from flax import serialization

        with replacing(path) as file:
            _stream(file, serialization.to_state_dict(tree))
        return
    import orbax.checkpoint as ocp

    step = int(state["step"])
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(tree), config=ocp.args.JsonSave(dict(config))
    )
    with _orbax(path) as manager:
        there = step in manager.all_steps()
        if there and not force:
            raise CheckpointMismatch(
                f"{path} already holds step {step}. Choose another --out, or pass --force to "
                f"overwrite it."
            )
        if not there:
            manager.save(step, args=args)
    if there:
        _replace_step(path, step, args)


def _orbax(path: pathlib.Path) -> ocp.CheckpointManager:
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(path.absolute(), item_names=(_STATE, _CONFIG))


def _replace_step(path: pathlib.Path, step: int, args: Any) -> None:
    """Save a step that is there already: the old one goes when the new one is complete."""
    # Inside of `path`, which may be a mounted file system of its own.
    temporary = path / f".{step}.{secrets.token_hex(8)}.tmp"
    place, new, old = path / str(step), temporary / str(step), temporary / "old"
    try:
        with _orbax(temporary) as manager:
            manager.save(step, args=args)
        place.rename(old)
        try:
            new.rename(place)
        except OSError:
            old.rename(place)
            raise
    finally:
        if place.exists():  # else both are kept
            shutil.rmtree(temporary, ignore_errors=True)


def read_flax(path: pathlib.Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `write_flax` or a training script with the same state wrote.

    Raises:
      CheckpointMismatch: The checkpoint has another structure than `like`.
    """
    _refuse_pipes(path)
    template = jax.tree.map(np.asarray, dict(like))
    try:
        if path.suffix == ".msgpack":
            from flax import serialization

            restored = serialization.from_bytes(template, path.read_bytes())
        else:
            restored = _read_orbax(path, template)
        _check(restored, template)
        return restored
    except CheckpointMismatch:
        raise
    # What flax, msgpack and orbax raise on a file of another kind or structure.
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointMismatch(
            f"{path} has another structure than {{{', '.join(map(repr, like))}}} with the "
            f"opt_state of optax.chain(jaxcomp.powersgd(...), the optimizer of --like). Convert it "
            f"in Python with torch_bridge.to_torch. ({error!s:.200})"
        ) from error


def _read_orbax(path: pathlib.Path, template: Any) -> Any:
    import orbax.checkpoint as ocp

    with _orbax(path) as manager:
        if manager.latest_step() is None:
            raise CheckpointMismatch(f"{path} holds no orbax checkpoint.")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
        return manager.restore(manager.latest_step(), args=args)[_STATE]


def _refuse_pipes(path: pathlib.Path) -> None:
    """What is neither file nor folder would be waited for; also inside of an orbax directory."""
    waiting, seen = [path], set()
    while waiting:
        file = waiting.pop()
        facts = os.stat(file)
        mode, identity = facts.st_mode, (facts.st_dev, facts.st_ino)
        if stat.S_ISDIR(mode) and identity not in seen:  # links can lead in circles
            seen.add(identity)
            waiting += file.iterdir()
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise CheckpointMismatch(f"{file} is a pipe, a socket or a device, and no checkpoint.")


def _check(restored: Any, template: Any) -> None:
    """Every leaf must be an array of the shape wanted; orbax gives None for one that is missing."""
    if jax.tree.structure(restored, is_leaf=_is_nothing) != jax.tree.structure(template):
        raise ValueError("some entries are not there")
    flat = jax.tree_util.tree_flatten_with_path(restored, is_leaf=_is_nothing)[0]
    wrong = [
        jax.tree_util.keystr(path)
        for (path, leaf), wanted in zip(flat, jax.tree.leaves(template), strict=True)
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array)
        or leaf.dtype.kind in "OSU"
        or np.shape(leaf) != np.shape(wanted)
    ]
    if wrong:
        raise ValueError(f"not there, or of another kind or shape: {', '.join(wrong)}")


def _is_nothing(leaf: Any) -> bool:
    return leaf is None


def _stream(file: BinaryIO, value: Any) -> None:
    """``flax.serialization.msgpack_serialize``, without a second copy of everything in memory."""
    import msgpack  # flax depends on it
    from flax import serialization

    if isinstance(value, dict):
        file.write(msgpack.Packer().pack_map_header(len(value)))
        for key, part in value.items():
            file.write(msgpack.Packer().pack(key))
            _stream(file, part)
    else:
        file.write(serialization.msgpack_serialize(value))
