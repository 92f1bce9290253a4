"""The conversions of the command line: whole checkpoints, file to file, in little memory."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxcomp import PowerSGDState
from torch_bridge._cli.files import read_flax
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch
from torch_bridge._convert.to_flax import FlaxRun, shapes_of_run
from torch_bridge._convert.to_torch import assemble, hollow
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._pairing.leaves import flatten, in_collections
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import pairs_of_whole


def entries(run: FlaxRun) -> dict[str, Any]:
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
    source: pathlib.Path,
    like: Checkpoint,
    params: Any,
    pairing: PairOptions,
    conversion: Mapping[str, Any],
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """A complete torch document (see `save_checkpoint`) from a Flax checkpoint.

    Args:
      source: The Flax checkpoint.
      like: The torch checkpoint that the run came from. Emptied on the way.
      params: The Flax tree, arrays or shapes.
      pairing: Keyword arguments of `pair`.
      conversion: ``layout``, ``matrix_dims`` and ``param_names``.
      notify: Called with the name of each stage.
    """
    notify("reading the Flax checkpoint")
    pairs = pairs_of_whole(like.model, params, None, pairing)
    template = entries(shapes_of_run(like, params, pairs, **conversion))
    for record in like.powersgd:  # the way back needs their shapes only
        record.error_dict.update(hollow(record.error_dict))
    fresh = hollow(like.optimizer)
    (like.optimizer or {}).clear()
    read = read_flax(source, template)
    reducer, *links = read.pop("opt_state")
    del read["step"]
    parts = {
        "params": read if _is_linen(params) else read["params"],
        "powersgd": PowerSGDState(*reducer) if like.powersgd else None,
        "optimizer": tuple(links),
    }
    del read, reducer, links
    return assemble(parts, like, fresh, pairs, notify=notify, **conversion)
