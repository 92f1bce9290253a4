"""Optimizer state from Optax to ``torch.optim`` (SGD, Adam, AdamW)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.tensors import to_tensor
from torch_bridge._convert.dampened_trace import DampenedTraceState
from torch_bridge._convert.optimizer_from_torch import ParamNames, Path
from torch_bridge._convert.optimizer_groups import Hyperparameters, read_entries
from torch_bridge._convert.paused import UnusedState
from torch_bridge._pairing.leaves import plain_path
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import Pair, tensors_from_flax, unpaired


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
    pairs_of: dict[str, list[Pair]] = {}
    found = pairs_for(model, params, pairs)
    for pair in found:
        if pair.kind != "buffer":
            bare = dataclasses.replace(pair, path=_bare(pair.path))
            pairs_of.setdefault(pair.torch_name, []).append(bare)
    entries = read_entries(like, model, param_names, unpaired(model, found))
    settings = [Hyperparameters.read(group, algorithm) for group in like["param_groups"]]
    moments_of = _Moments.of(state)
    filled: dict[int, dict[str, Any]] = {}
    missing: list[str] = []
    for name, entry in entries.items():
        moments = _for_one(pairs_of.get(name, []), moments_of, settings[entry.group])
        if moments is None and (entry.index in like["state"] or not like["state"]):
            missing.append(name)  # else it was frozen in torch, too
        elif moments:
            filled[entry.index] = moments
    if missing:
        raise CheckpointMismatch(
            "The Optax state has no momentum (or Adam moments) for parameters of the torch "
            "optimizer. Is it the state of another optimizer?",
            missing=missing,
        )
    # A learning rate may be an array; torch.load(weights_only=True) reads a tensor.
    groups = [{**group, **plain_copy(group)[0]} for group in like["param_groups"]]
    return {**like, "state": filled, "param_groups": groups}


@dataclasses.dataclass
class _Moments:
    """What the momentum states of an Optax state hold, by leaf path."""

    trace: dict[Path, Any] = dataclasses.field(default_factory=dict)
    mu: dict[Path, Any] = dataclasses.field(default_factory=dict)
    nu: dict[Path, Any] = dataclasses.field(default_factory=dict)
    count: dict[Path, int] = dataclasses.field(default_factory=dict)
    idle: set[Path] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, state: Any) -> _Moments:
        kinds = (optax.ScaleByAdamState, optax.TraceState, DampenedTraceState)
        found = cls()
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds)):
            if isinstance(node, optax.ScaleByAdamState):
                found.mu.update(_by_path(node.mu))
                found.nu.update(_by_path(node.nu))
                (count,) = jax.tree.leaves(node.count)  # nnx.Optimizer puts it in a variable
                found.count.update((path, int(count)) for path, _ in _by_path(node.mu))
            elif isinstance(node, optax.TraceState | DampenedTraceState):
                found.trace.update(_by_path(node.trace))
                if isinstance(node, DampenedTraceState):
                    found.idle.update(path for path, on in _by_path(node.started) if not on)
        found.idle |= _unused(state)
        return found


def _unused(state: Any) -> set[Path]:
    """Leaves that have had no gradient yet, for which torch keeps nothing."""

    def is_one(node: Any) -> bool:
        return isinstance(node, UnusedState)

    idle: set[Path] = set()
    for node in filter(is_one, jax.tree.leaves(state, is_leaf=is_one)):
        (started,) = jax.tree.leaves(node.started)
        if not started:
            inner = _Moments.of(node.inner_state)
            idle |= {*inner.mu, *inner.trace}
    return idle


def _by_path(tree: Any) -> Iterator[tuple[Path, Any]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return ((_bare(plain_path(path)), value) for path, value in flat)


def _bare(path: Path) -> Path:
    """Without the collection, which an optimizer's state has where `init` got linen variables."""
    return path[1:] if path[:1] == ("params",) else path


def _for_one(pairs: Pairs, found: _Moments, hyper: Hyperparameters) -> dict[str, Any] | None:
    """The state of one torch parameter; None if the Optax state lacks it, {} if there is none."""
    if hyper.algorithm == "sgd" and not hyper.has_momentum:
        return {}
    tables = [found.trace] if hyper.has_momentum else [found.mu, found.nu]
    if not pairs or any(p.path not in table for p in pairs for table in tables):
        return None
    if any(p.path in found.idle for p in pairs):
        return {}
    if hyper.has_momentum:
        return {"momentum_buffer": _tensor(pairs, found.trace, summed=True)}
    steps = {found.count[p.path] for p in pairs}
    if len(steps) > 1:
        return None
    step = np.asarray(steps.pop(), np.float32)
    moments = {"exp_avg": found.mu, "exp_avg_sq": found.nu}
    return {
        "step": to_tensor(step),
        **{key: _tensor(pairs, table) for key, table in moments.items()},
    }


def _tensor(pairs: Pairs, leaves: Mapping[Path, Any], *, summed: bool = False) -> Any:
    """One torch tensor; of a leaf that is a sum of several, its share if the moments add up too."""
    array = tensors_from_flax(pairs, leaves, mean=True)[pairs[0].torch_name]
    terms = pairs[0].terms if summed else 1
    return to_tensor(array if terms == 1 else array / np.asarray(terms, array.dtype))
