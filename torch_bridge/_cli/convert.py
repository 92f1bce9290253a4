"""The conversions of the command line: whole checkpoints, file to file, in little memory."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcomp import PowerSGDState
from torch_bridge._cli.choices import Choices
from torch_bridge._cli.files import read_flax
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch
from torch_bridge._convert.params import refuse_lost_statistics
from torch_bridge._convert.to_flax import FlaxRun, shapes_of_run, to_flax
from torch_bridge._convert.to_torch import assemble, hollow
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._pairing.leaves import flatten, in_collections
from torch_bridge._pairing.pair import pair


def train_state(checkpoint: Checkpoint, choices: Choices) -> dict[str, Any]:
    """The entries of a Flax ``TrainState``, out of a checkpoint that is emptied on the way.

    Args:
      checkpoint: What `load` read.
      choices: As given by the user.
    """
    run = to_flax(
        checkpoint,
        choices.params,
        layout=choices.layout,
        missing_ranks=choices.missing_ranks,
        matrix_dims=choices.matrix_dims,
        param_names=choices.param_names,
        consume=True,
        **choices.pairing,
    )
    return _entries(run)


def _entries(run: FlaxRun) -> dict[str, Any]:
    """As a ``TrainState`` has them: other collections of linen variables beside ``params``."""
    collections = run.params if _is_linen(run.params) else {"params": run.params}
    return {"step": np.int32(run.step), **collections, "opt_state": run.opt_state}


def _is_linen(params: Any) -> bool:
    return in_collections(flatten(params).paths)


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What to store beside the state: the arguments with which ``jaxcomp.powersgd`` goes on."""
    if not checkpoint.powersgd:
        return {}
    kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0], hook=checkpoint.hook)
    if "comm_dtype" in kwargs:
        kwargs["comm_dtype"] = np.dtype(kwargs["comm_dtype"]).name
    return {"powersgd": kwargs}


def torch_document(
    source: pathlib.Path, like: Checkpoint, choices: Choices, notify: Callable[[str], None]
) -> dict[str, Any]:
    """A complete torch document (see `save_checkpoint`) from a Flax checkpoint.

    Args:
      source: The Flax checkpoint.
      like: The torch checkpoint that the run came from. Emptied on the way.
      choices: As for the other direction.
      notify: Called with the name of each stage.
    """
    notify("reading the Flax checkpoint")
    pairings = pair(like.model, choices.params, **choices.pairing)
    refuse_lost_statistics(like.model, choices.params, choices.pairing.get("ignore"))
    chosen = (choices.layout, choices.matrix_dims, choices.param_names)
    shapes = shapes_of_run(like, choices.params, pairings, *chosen)
    for record in like.powersgd:  # the way back needs their shapes only
        record.error_dict.update(hollow(record.error_dict))
    fresh = hollow(like.optimizer)
    if like.optimizer is not None:
        like.optimizer.clear()
    entries = read_flax(source, _entries(shapes))
    reducer, *links = entries.pop("opt_state")
    entries.pop("step")
    parts = {
        "params": entries if _is_linen(choices.params) else entries["params"],
        "powersgd": PowerSGDState(*reducer) if like.powersgd else None,
        "optimizer": tuple(links),
    }
    del entries, reducer, links
    return assemble(parts, like, fresh, pairings, *chosen, notify)
