"""The conversions of the command line: whole checkpoints, file to file."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxcomp import PowerSGDState
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import to_tensor
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch
from torch_bridge._convert.choices import Choices
from torch_bridge._convert.files import read_flax
from torch_bridge._convert.optimizer_from_torch import optimizer_from_torch
from torch_bridge._convert.optimizer_to_torch import optimizer_to_torch
from torch_bridge._convert.params import params_from_torch, params_to_torch
from torch_bridge._convert.powersgd_from_torch import powersgd_from_torch
from torch_bridge._convert.powersgd_to_torch import export_record
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.infer import infer_layout

_SMALL = 1024  # values; what is smaller may be a step count or a seed


def train_state(
    checkpoint: Checkpoint, choices: Choices, *, consume: bool = False, values: bool = True
) -> dict[str, Any]:
    """The tree ``{'step', 'params', 'opt_state'}`` that a Flax ``TrainState`` has.

    ``opt_state`` is that of ``optax.chain(jaxcomp.powersgd(...), optimizer)``; links that the file
    does not have are left out.

    Args:
      checkpoint: what `load` read.
      choices: as given by the user.
      consume: empty `checkpoint` part by part, so that a part is not in memory twice.
      values: False for the structure and shapes only (see `hollow`).
    """
    keep = (lambda part: part) if values else hollow
    params = keep(params_from_torch(checkpoint.model, choices.params, **choices.pairing))
    links: list[Any] = []
    step = 0
    if checkpoint.powersgd:
        step = checkpoint.powersgd[0].iter
        reducer = powersgd_from_torch(
            checkpoint,
            params,
            layout=choices.layout,
            missing_ranks=choices.missing_ranks,
            matrix_dims=choices.matrix_dims,
            **choices.pairing,
        )
        links.append(keep(reducer))
        if consume:
            for record in checkpoint.powersgd:
                record.error_dict.clear()
    if checkpoint.optimizer is not None:
        _, state = optimizer_from_torch(
            checkpoint.optimizer, checkpoint.model, params, **choices.pairing
        )
        links.append(keep(state))
        if consume:
            checkpoint.optimizer.clear()
    if consume:
        checkpoint.model.clear()
    return {"step": np.int32(step), "params": params, "opt_state": tuple(links)}


def hollow(tree: Any) -> Any:
    """The tree with large arrays replaced by ones of the same shape and dtype without memory."""
    return jax.tree.map(
        lambda leaf: (
            leaf
            if np.size(leaf) <= _SMALL
            else np.broadcast_to(np.zeros((), leaf.dtype), np.shape(leaf))
        ),
        tree,
    )


def _drop_errors(checkpoint: Checkpoint) -> None:
    """Forget the values of the errors in place: the way back needs their shapes only."""
    for record in checkpoint.powersgd:
        record.error_dict.update(hollow(record.error_dict))


def torch_document(
    source: pathlib.Path, like: Checkpoint, choices: Choices, notify: Callable[[str], None]
) -> dict[str, Any]:
    """A complete torch document (see `save_checkpoint`) from a Flax checkpoint.

    Args:
      source: the Flax checkpoint.
      like: the torch checkpoint that the run came from; what Flax has no use for comes from it.
        Emptied on the way.
      choices: as for the other direction.
      notify: called with the name of each stage.
    """
    notify("reading the Flax checkpoint")
    zero = dataclasses.replace(choices, missing_ranks="zero")
    template = train_state(like, zero, values=False)
    _drop_errors(like)
    fresh = hollow(like.optimizer)
    if like.optimizer is not None:
        like.optimizer.clear()
    state = read_flax(source, template)
    links = list(state.pop("opt_state"))
    reducer = PowerSGDState(*links.pop(0)) if like.powersgd else None
    parts = {"params": state.pop("params"), "powersgd": reducer, "optimizer": (links or [None])[0]}
    del state, links, reducer
    return assemble(parts, like, fresh, choices, notify)


def save_for_torch(
    path: str | os.PathLike[str],
    params: Any,
    *,
    like: Checkpoint,
    powersgd: PowerSGDState | None = None,
    optimizer: Any = None,
    layout: BucketLayout | None = None,
    matrix_dims: Any = None,
    **pairing: Any,
) -> None:
    """Write the complete torch checkpoint of a run that goes back to PyTorch.

    The file is as `save_checkpoint` writes it: ``torch.load(path, weights_only=True)`` has
    ``state_dict`` and ``optimizer``, and `load` with `state_from_record` and `resume_powersgd`
    bring the hook back.

    Args:
      path: the file; an existing one is replaced.
      params: Flax parameters (linen variables if there are running statistics).
      like: the torch checkpoint that the run came from.
      powersgd: the consolidated reducer state; None to leave it out.
      optimizer: the Optax state of the optimizer; None to leave it out.
      layout: the bucket layout; None for that of `like`.
      matrix_dims: as passed to `jaxcomp.powersgd`.
      **pairing: ``rules``, ``flatten``, ``conv_transpose``, ``ignore``; see `params_to_torch`.

    Raises:
      CheckpointMismatch: a part does not fit `like`; everything that does not is listed.
    """
    from torch_bridge._job.save import write_atomically

    parts = {"params": params, "powersgd": powersgd, "optimizer": optimizer}
    choices = Choices(params, pairing, layout=layout, dims=matrix_dims)
    document = assemble(parts, like, like.optimizer, choices, lambda stage: None)
    write_atomically(pathlib.Path(path), document)


def assemble(
    parts: dict[str, Any],
    like: Checkpoint,
    fresh: Any,
    choices: Choices,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """The torch document out of Flax parts.

    Args:
      parts: ``params``, ``powersgd`` and ``optimizer``, each dropped as soon as it is converted.
      like: the torch checkpoint that the run came from.
      fresh: a torch optimizer state dict to be filled, or None.
      choices: pairing, layout and cut.
      notify: called with the name of each stage.
    """
    from torch_bridge._job.save import make_document, plain_record

    notify("converting the parameters")
    params = parts.pop("params")
    model = params_to_torch(params, like.model, **choices.pairing)
    model = {name: to_tensor(np.asarray(value)) for name, value in model.items()}
    params = hollow(params)
    hook, errors, layout = None, [], choices.layout or like.layout
    if like.powersgd and parts["powersgd"] is not None:
        notify("converting the PowerSGD state")
        reducer, pairing = parts.pop("powersgd"), dict(choices.pairing)
        layout = layout or _inferred(like, reducer)
        record = export_record(reducer, params, layout, like, choices.matrix_dims, {}, pairing)
        del reducer
        hook = plain_record(record)
        # Every rank goes on from the mean error.
        flats = record.error_dict
        error = {bucket: to_tensor(flats.pop(bucket)) for bucket in sorted(flats)}
        errors = [error] * (like.world_size or 1)
    optimizer = None
    if fresh is not None and parts["optimizer"] is not None:
        notify("converting the optimizer")
        optimizer = optimizer_to_torch(
            parts.pop("optimizer"), params, fresh, like.model, **choices.pairing
        )
    return make_document(
        model=model,
        hook=hook,
        errors=errors,
        optimizer=optimizer,
        layout=layout,
        world_size=like.world_size,
        extra=_plain_extra(like.extra),
    )


def _inferred(like: Checkpoint, reducer: PowerSGDState) -> BucketLayout:
    record = like.powersgd[0]
    if record.buckets:
        return infer_layout(like)
    if int(np.asarray(reducer.count)) == record.iter:
        return BucketLayout(())  # nothing but counters on either side
    raise CheckpointMismatch(
        "The torch file was saved before compression began, so it has no bucket layout, and JAX "
        "has gone on since. Call torch_bridge.record_layout in a torch run of the same model, and "
        "pass layout=."
    )


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that ``torch.load(weights_only=True)`` can read back."""
    kept = {}
    for name, value in extra.items():
        if isinstance(value, np.ndarray):
            kept[name] = to_tensor(value)
        elif isinstance(value, str | int | float | bool | None):
            kept[name] = value
    return kept


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What to store beside the state: the arguments with which ``jaxcomp.powersgd`` goes on."""
    if not checkpoint.powersgd:
        return {}
    kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0])
    return {"powersgd": {name: value for name, value in kwargs.items() if name != "comm_dtype"}}
