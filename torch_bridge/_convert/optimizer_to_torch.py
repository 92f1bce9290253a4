"""Optimizer state from Optax to ``torch.optim`` (SGD, Adam, AdamW)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.tensors import to_tensor
from torch_bridge._convert.optimizer_from_torch import Path
from torch_bridge._convert.optimizer_groups import Entry, ParamNames, read_entries
from torch_bridge._convert.torch_updates import DampenedTraceState, UnusedState
from torch_bridge._pairing.leaves import leaves_by_path, without_collection
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import Pair, tensors_from_flax, unpaired

_MOMENTS = (optax.ScaleByAdamState, optax.TraceState, DampenedTraceState, UnusedState)


def optimizer_to_torch(
    state: Any,
    params: Any,
    like: Mapping[str, Any],
    model: Model,
    *,
    pairs: Pairs | None = None,
    param_names: ParamNames = None,
    algorithm: str | None = None,
) -> dict[str, Any]:
    """A torch optimizer state dict with the momenta and counts of an Optax state.

    The Optax state may be that of any chain in which `optax.trace` or `optax.scale_by_adam` (so
    `optax.sgd`, `adam`, `adamw`) stands once for each parameter, inside `optax.multi_transform` or
    after a reducer included.

    Args:
      state: The Optax state.
      params: The Flax parameters that it belongs to, or a tree that contains them.
      like: ``state_dict()`` of the torch optimizer to be filled, also a fresh one: it says the
        param groups, whose hyperparameters are kept as they are.
      model: Torch state dict of the model; only names and shapes are used.
      pairs: As for `optimizer_from_torch`.
      param_names: As for `optimizer_from_torch`.
      algorithm: As for `optimizer_from_torch`.

    Returns:
      A dict for ``torch.optim.Optimizer.load_state_dict``, with tensors.

    Raises:
      ValueError: As for `optimizer_from_torch`.
      CheckpointMismatch: If the state has no moments for a parameter of the optimizer.

    Example:
      >>> params = {"fc": {"kernel": np.ones((2, 3), np.float32)}}
      >>> state = optax.sgd(0.1, momentum=0.9).init(params)
      >>> group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
      >>> like, model = {"state": {}, "param_groups": [group]}, {"fc.weight": np.ones((3, 2))}
      >>> optimizer_to_torch(state, params, like, model)["state"][0]["momentum_buffer"].shape
      torch.Size([3, 2])
    """
    model = named(model)
    found = pairs_for(model, params, pairs)
    entries = read_entries(like, model, param_names, algorithm, unpaired(model, found))
    return fill_optimizer(state, like, entries, found)


def fill_optimizer(
    state: Any, like: Mapping[str, Any], entries: Mapping[str, Entry], pairs: Pairs
) -> dict[str, Any]:
    """`optimizer_to_torch` for an optimizer whose parameters are known.

    Args:
      state: The Optax state.
      like: The torch optimizer to be filled.
      entries: Its parameters, as `read_entries` gives them.
      pairs: Of the whole model.
    """
    by_name: dict[str, list[Pair]] = {name: [] for name in entries}
    for pair in pairs:
        if pair.torch_name in entries and pair.kind != "buffer":
            bare = dataclasses.replace(pair, path=without_collection(pair.path))
            by_name[pair.torch_name].append(bare)
    moments = _Moments()
    moments.read(state)
    filled: dict[int, dict[str, Any]] = {}
    missing: list[str] = []
    for name, entry in entries.items():
        kept = moments.of(by_name[name], entry)
        if kept is None and (entry.index in like["state"] or not like["state"]):
            missing.append(name)  # else it was frozen in torch, too
        elif kept:
            filled[entry.index] = kept
    if missing:
        raise CheckpointMismatch(
            "The Optax state has no momentum (or Adam moments) for parameters of the torch "
            "optimizer. Is it the state of another optimizer?",
            missing=missing,
        )
    # A learning rate may be an array; torch.load(weights_only=True) reads a tensor.
    groups = [{**group, **plain_copy(group)[0]} for group in like["param_groups"]]
    return {**like, "state": filled, "param_groups": groups}


class _Moments:
    """What the momentum states of an Optax state hold, by leaf path."""

    def __init__(self) -> None:
        self.trace: dict[Path, Any] = {}
        self.mu: dict[Path, Any] = {}
        self.nu: dict[Path, Any] = {}
        self.count: dict[Path, int] = {}
        self.idle: set[Path] = set()  # no gradient yet, for which torch keeps nothing

    def read(self, state: Any, *, started: bool = True) -> None:
        """Adds what a state holds, of which nothing counts if it has not started."""
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, _MOMENTS)):
            if isinstance(node, UnusedState):
                self.read(node.inner_state, started=bool(jax.tree.leaves(node.started)[0]))
                continue
            flags: dict[Path, Any] = {}
            if isinstance(node, optax.ScaleByAdamState):
                (count,) = jax.tree.leaves(node.count)  # nnx.Optimizer puts it in a variable
                flags = mu = leaves_by_path(node.mu)
                self.mu |= mu
                self.nu |= leaves_by_path(node.nu)
                self.count |= dict.fromkeys(mu, int(count))
            elif isinstance(node, optax.TraceState | DampenedTraceState):
                flags = trace = leaves_by_path(node.trace)
                self.trace |= trace
                if isinstance(node, DampenedTraceState):
                    off = {path for path, on in leaves_by_path(node.started).items() if not on}
                    self.idle |= off
            if not started:
                self.idle |= flags.keys()

    def of(self, pairs: Pairs, entry: Entry) -> dict[str, Any] | None:
        """The state of one torch parameter; None if it is lacking, {} if torch keeps none."""
        if not entry.hyper.keeps_state:
            return {}
        adam = entry.hyper.algorithm != "sgd"
        tables = [self.mu, self.nu] if adam else [self.trace]
        if not pairs or any(p.path not in table for p in pairs for table in tables):
            return None
        if any(p.path in self.idle for p in pairs):
            return {}
        if not adam:  # of a leaf that is a sum, its share: the buffers add up, too
            total, terms = _array(pairs, self.trace), pairs[0].terms
            share = total if terms == 1 else total / np.asarray(terms, total.dtype)
            return {"momentum_buffer": to_tensor(share)}
        steps = {self.count[p.path] for p in pairs}
        if len(steps) > 1:
            return None
        return {
            "step": to_tensor(np.asarray(steps.pop(), np.float32)),
            "exp_avg": to_tensor(_array(pairs, self.mu)),
            "exp_avg_sq": to_tensor(_array(pairs, self.nu)),
        }


def _array(pairs: Pairs, leaves: Mapping[Path, Any]) -> np.ndarray:
    """The torch tensor of one parameter."""
    return tensors_from_flax(pairs, leaves, mean=True)[pairs[0].torch_name]
