"""`to_torch`: a whole JAX run as the file from which a torch job resumes, in one call."""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import numpy as np

from jaxcomp import PowerSGDState
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.framework import import_torch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.tensors import to_tensor
from torch_bridge._base.terminal import printable
from torch_bridge._convert.optimizer import optimizer_to_torch
from torch_bridge._convert.optimizer_groups import ParamNames
from torch_bridge._convert.params import params_to_torch
from torch_bridge._convert.powersgd import record_of_state
from torch_bridge._convert.to_flax import checked
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.document import make_document
from torch_bridge._hook.infer import layout_of
from torch_bridge._job.save import write_document
from torch_bridge._pairing.leaves import hollow, trained
from torch_bridge._pairing.matrix_dims import MatrixDimsFn, matrix_dims_of
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Pairs, pairs_for, pairs_of

_SHOWN = 10  # names in a warning


def to_torch(
    params: Any,
    opt_state: Any,
    like: Checkpoint,
    *,
    path: str | os.PathLike[str] | None = None,
    layout: BucketLayout | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    param_names: ParamNames = None,
    pairs: Pairs | None = None,
    **options: Unpack[PairOptions],
) -> dict[str, Any]:
    """A JAX run as what a torch job resumes from: the inverse of `to_flax`.

    The document is as `save_checkpoint` writes it: ``torch.load(path, weights_only=True)`` has
    ``state_dict`` and ``optimizer``, and `load` with `resume_powersgd` brings the hook back, on any
    number of ranks.

    Args:
      params: The Flax parameters; linen variables or an ``nnx.State`` if there are running
        statistics.
      opt_state: The Optax state, consolidated (`jaxcomp.consolidate`): of parameters, of those that
        are trained, or of whole variables. It may hold more than torch has a place for.
      like: The torch checkpoint that the run came from: names, hyperparameters, random number
        generator and whatever else Flax has no use for come from there, as they were then. A
        learning rate scheduler has not taken the steps that JAX took.
      path: A file to write the document to, whole or not at all; an existing one is replaced.
      layout: The bucket layout; None for that of `like`.
      matrix_dims: As for `to_flax`.
      param_names: As for `to_flax`.
      pairs: What `pair` gave, in place of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      The document: dictionaries of tensors and plain values.

    Raises:
      CheckpointMismatch: A part does not fit `like`, or is missing; everything that does not fit is
        listed.
      OSError: The file cannot be written.

    Example:
      >>> like = Checkpoint({"fc.weight": np.ones((3, 2), np.float32)})
      >>> document = to_torch({"fc": {"kernel": np.zeros((2, 3), np.float32)}}, (), like)
      >>> document["state_dict"]["fc.weight"].shape
      torch.Size([3, 2])
    """
    checked(like, "like")
    reducers = reducer_states(opt_state)
    if like.powersgd and len(reducers) != 1:
        raise CheckpointMismatch(
            f"`opt_state` must hold one jaxcomp.PowerSGDState, as the checkpoint does; it holds "
            f"{len(reducers)}. Pass the whole state of the optax.chain."
        )
    parts = {"params": params, "powersgd": (reducers or [None])[0], "optimizer": opt_state}
    found = pairs_for(like.model, params, pairs, options)
    layout = layout or layout_of(like, None, found)
    document = assemble(parts, like, like.optimizer, found, layout, param_names, matrix_dims)
    if path is not None:
        write_document(pathlib.Path(path), document)
    return document


def reducer_states(opt_state: Any) -> list[PowerSGDState]:
    """Every state of PowerSGD in an Optax state."""

    def is_one(node: Any) -> bool:
        return isinstance(node, PowerSGDState)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]


def assemble(
    parts: dict[str, Any],
    like: Checkpoint,
    fresh: Any,
    pairs: Pairs,
    layout: BucketLayout | None,
    param_names: ParamNames,
    matrix_dims: MatrixDimsFn | None = None,
) -> dict[str, Any]:
    """The torch document out of Flax parts.

    Args:
      parts: ``params``, ``powersgd`` and ``optimizer``, each dropped as soon as it is converted.
      like: The torch checkpoint that the run came from.
      fresh: A torch optimizer state dict to be filled, or None.
      pairs: Of ``params``.
      layout: The bucket layout; None where `like` is from before compression began.
      param_names: As for `to_torch`.
      matrix_dims: As for `to_torch`.
    """
    import_torch()
    params = parts.pop("params")
    arrays = params_to_torch(params, like.model, pairs=pairs)
    unchanged = {id(value) for value in like.model.values()}
    tensors: dict[int, Any] = {}  # tied tensors stay one
    for value in arrays.values():
        if id(value) not in tensors:
            tensors[id(value)] = to_tensor(np.asarray(value), copy=id(value) in unchanged)
    model = {name: tensors[id(value)] for name, value in arrays.items()}
    params = hollow(params)
    ranks = []
    if parts["powersgd"] is not None and (like.powersgd or layout):
        reducer = parts.pop("powersgd")
        chosen = trained(params)
        found = pairs_of(chosen, pairs)
        matrix_dims = matrix_dims or matrix_dims_of(found)
        record = record_of_state(reducer, chosen, layout, like, matrix_dims, found)
        del reducer
        # Every rank goes on from the mean error.
        flats = record.error_dict
        flats |= {bucket: to_tensor(flats.pop(bucket)) for bucket in sorted(flats)}
        ranks = [record] * (like.world_size or 1)
    optimizer = None
    if fresh is not None and parts["optimizer"] is not None:
        optimizer = optimizer_to_torch(
            parts.pop("optimizer"),
            params,
            fresh,
            like.model,
            pairs=pairs,
            param_names=param_names,
            layout=layout,
        )
    extra = _plain_extra(like.extra)
    return make_document(
        Checkpoint(model, tuple(ranks), optimizer, layout, extra, like.world_size, like.hook)
    )


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that ``torch.load(weights_only=True)`` can read back."""
    kept, lacking = plain_copy(extra)
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        warnings.warn(
            f"Entries of `like` that torch.load(weights_only=True) does not read are left out: "
            f"{printable(', '.join(lacking[:_SHOWN]))}{more}. Add them in torch.",
            stacklevel=4,
        )
    return kept
