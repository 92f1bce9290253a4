"""The conversions of the command line: whole checkpoints, file to file."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp import PowerSGDState
from torch_bridge._arguments import powersgd_kwargs_from_torch
from torch_bridge._buckets import BucketLayout
from torch_bridge._checkpoint import Checkpoint
from torch_bridge._errors import CheckpointMismatch
from torch_bridge._flax_files import read_flax
from torch_bridge._infer import infer_layout
from torch_bridge._matrix_dims import torch_matrix_dims
from torch_bridge._optim import optimizer_from_torch
from torch_bridge._optim_to_torch import optimizer_to_torch
from torch_bridge._params import params_from_torch, params_to_torch
from torch_bridge._powersgd import powersgd_from_torch
from torch_bridge._powersgd_export import export_record
from torch_bridge._torch import to_tensor

_SMALL = 1024  # values; what is smaller may be a step count or a seed


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the two directions have in common.

    Attributes:
      params: the Flax parameter tree (arrays or shapes).
      rules: pairs of regular expression and Flax path.
      torch_dims: use `torch_matrix_dims` instead of jaxcomp's default cut.
      missing_ranks: as for `powersgd_from_torch`.
      layout: the bucket layout, if it was given.
    """

    params: Any
    rules: Sequence[tuple[str, str]] = ()
    torch_dims: bool = False
    missing_ranks: str = "error"
    layout: BucketLayout | None = None

    @property
    def matrix_dims(self) -> Any:
        """The `matrix_dims` argument."""
        return torch_matrix_dims if self.torch_dims else None


def import_object(reference: str) -> Any:
    """The object that ``package.module:name`` names; a function is called.

    Raises:
      ValueError: the reference has another form, or there is no such module or name.
    """
    module, colon, name = reference.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"--params must be MODULE:NAME, got {reference!r}")
    sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--params {reference}: {error}") from error
    finally:
        sys.path.pop(0)
    return value() if callable(value) else value


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
    rules, keep = choices.rules, (lambda part: part) if values else hollow
    params = keep(params_from_torch(checkpoint.model, choices.params, rules))
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
            rules=rules,
        )
        links.append(keep(reducer))
        if consume:
            for record in checkpoint.powersgd:
                record.error_dict.clear()
    if checkpoint.optimizer is not None:
        state = optimizer_from_torch(checkpoint.optimizer, checkpoint.model, params, rules)[1]
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
    from torch_bridge._torch_side import make_document, plain_record

    notify("reading the Flax checkpoint")
    zero = dataclasses.replace(choices, missing_ranks="zero")
    template = train_state(like, zero, values=False)
    _drop_errors(like)
    fresh = hollow(like.optimizer)
    if like.optimizer is not None:
        like.optimizer.clear()
    state = read_flax(source, template)
    params, links = state.pop("params"), list(state.pop("opt_state"))
    notify("converting the parameters")
    model = params_to_torch(params, like.model, choices.rules)
    model = {name: to_tensor(np.asarray(value)) for name, value in model.items()}
    params = hollow(params)
    hook, errors, layout = None, [], choices.layout or like.layout
    if like.powersgd:
        notify("converting the PowerSGD state")
        layout = layout or _inferred(like)
        record = export_record(
            PowerSGDState(*links.pop(0)),
            params,
            layout,
            like,
            choices.matrix_dims,
            {},
            {"rules": choices.rules},
        )
        hook = plain_record(record)
        # Every rank goes on from the mean error.
        error = {bucket: to_tensor(flat) for bucket, flat in record.error_dict.items()}
        errors = [error] * (like.world_size or 1)
    optimizer = None
    if fresh is not None:
        notify("converting the optimizer")
        optimizer = optimizer_to_torch(links.pop(0), params, fresh, like.model, choices.rules)
    return make_document(
        model=model,
        hook=hook,
        errors=errors,
        optimizer=optimizer,
        layout=layout,
        world_size=like.world_size,
        extra=_plain_extra(like.extra),
    )


def _inferred(like: Checkpoint) -> BucketLayout:
    if not like.powersgd[0].buckets:
        raise CheckpointMismatch(
            "The torch file was saved before compression began, so it has no bucket layout. "
            "Give one with --layout."
        )
    return infer_layout(like)


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that ``torch.load(weights_only=True)`` can read back."""
    kept = {}
    for name, value in extra.items():
        if isinstance(value, np.ndarray):
            kept[name] = to_tensor(value)
        elif isinstance(value, str | int | float | bool | None):
            kept[name] = value
    return kept


def read_layout(path: pathlib.Path) -> BucketLayout:
    """A layout file, as ``record_layout(...).to_json()`` gives it."""
    return BucketLayout.from_json(path.read_text(encoding="utf-8"))


def parse_rule(text: str) -> tuple[str, str]:
    """``REGEX=PATH`` as a pair.

    Raises:
      ValueError: there is no ``=``.
    """
    pattern, equals, path = text.partition("=")
    if not equals or not pattern or not path:
        raise ValueError(f"a rule must be REGEX=PATH, got {text!r}")
    return pattern, path


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What to store beside the state: the arguments with which ``jaxcomp.powersgd`` goes on."""
    if not checkpoint.powersgd:
        return {}
    kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0])
    return {"powersgd": {name: value for name, value in kwargs.items() if name != "comm_dtype"}}
