"""Flax checkpoints on disk: orbax directories and msgpack files, written leaf by leaf."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch

# As examples/language_model/checkpoints.py names them.
_STATE, _CONFIG = "state", "config"


def write_flax(path: pathlib.Path, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write a train state: ``*.msgpack`` with flax.serialization, else an orbax directory.

    Raises:
      CheckpointMismatch: the directory already holds a checkpoint of this step.
    """
    tree = jax.tree.map(np.asarray, _plain_containers(state))
    if path.suffix == ".msgpack":
        from flax import serialization

        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            _stream(file, serialization.to_state_dict(tree))
        os.replace(temporary, path)
        return
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path.absolute(), item_names=(_STATE, _CONFIG)) as manager:
        step = int(state["step"])
        if step in manager.all_steps():
            raise CheckpointMismatch(f"{path} already holds step {step}; choose another --out.")
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree), config=ocp.args.JsonSave(dict(config))
        )
        manager.save(step, args=args)


def read_flax(path: pathlib.Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `write_flax` or a training script with the same state wrote.

    Raises:
      CheckpointMismatch: the checkpoint has another structure than `like`.
    """
    template = jax.tree.map(np.asarray, _plain_containers(like))
    try:
        if path.suffix == ".msgpack":
            from flax import serialization

            return serialization.from_bytes(template, path.read_bytes())
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(path.absolute(), item_names=(_STATE, _CONFIG)) as manager:
            if manager.latest_step() is None:
                raise CheckpointMismatch(f"{path} holds no orbax checkpoint.")
            args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
            restored = manager.restore(manager.latest_step(), args=args)[_STATE]
            _check(restored, template)
            return restored
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointMismatch):
            raise
        raise CheckpointMismatch(
            f"{path} has another structure than {{'step', 'params', 'opt_state'}} of "
            f"optax.chain(jaxcomp.powersgd(...), the optimizer of --like). Convert it in Python "
            f"with params_to_torch, optimizer_to_torch and powersgd_to_torch. ({error!s:.200})"
        ) from error


def _check(restored: Any, template: Any) -> None:
    """Orbax gives None for a leaf that the checkpoint does not have."""
    wrong = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            restored, is_leaf=lambda leaf: leaf is None
        )[0]
        if leaf is None
    ]
    if wrong or jax.tree.structure(restored) != jax.tree.structure(template):
        raise ValueError(f"not there: {', '.join(wrong) or 'some entries'}")


def _plain_containers(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys that a flax ``TrainState`` serialises to."""
    return {name: state[name] for name in ("step", "params", "opt_state")}


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
