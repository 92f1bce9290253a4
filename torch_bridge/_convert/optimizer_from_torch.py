"""Optimizer state from ``torch.optim`` (SGD, Adam, AdamW) to Optax, with equal next updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._convert.dampened_trace import DampenedTraceState
from torch_bridge._convert.optimizer_groups import Entry, Hyperparameters, read_entries
from torch_bridge._convert.paused import UnusedState, held, until_gradient
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.leaves import plain_path
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import Pair, leaves_from_torch, unpaired

Path: TypeAlias = tuple[str, ...]
ParamNames: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | None
Rates: TypeAlias = optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None
_FROZEN = "frozen"
_PAUSES = {"": None, "unused": until_gradient, "held": held}


@dataclasses.dataclass(frozen=True)
class _Part:
    """Leaves that share hyperparameters, step count and number of summed torch parameters.

    Those of a part may all be frozen with their state (``pause="held"``), or all without a gradient
    as yet (``pause="unused"``).
    """

    label: str
    group: int
    step: int
    terms: int
    started: bool
    pause: str = ""


def optimizer_from_torch(
    optimizer: Mapping[str, Any],
    model: Model,
    params: Any,
    *,
    pairs: Pairs | None = None,
    param_names: ParamNames = None,
    learning_rate: Rates = None,
    algorithm: str | None = None,
    step: int | None = None,
) -> tuple[optax.GradientTransformation, Any]:
    """The Optax optimizer, with its state, whose next updates are those of the torch optimizer.

    With one param group the transformation is built, and its state laid out, as `optax.sgd`,
    `optax.adam` or `optax.adamw` do it (plus `optax.add_decayed_weights` in front for the L2
    penalty of SGD and Adam), so the state also fits the one of these that you build yourself.
    Several groups, and parameters that have taken different numbers of steps, become
    `optax.multi_transform`.

    Args:
      optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW`` ``.state_dict()``; tensors or arrays.
      model: Torch state dict of the model.
      params: Flax parameters that correspond to it, as from `params_from_torch`.
      pairs: What `pair` gave, also for a tree that contains `params`; None where it needs no
        options.
      param_names: Parameter names in the order in which the optimizer was given them, flat or one
        list for each group. Needed if there are several groups, or if the optimizer was given only
        some parameters, unless it was made from ``named_parameters()`` and recorded them itself.
      learning_rate: A number or an Optax schedule for all groups, or one for each group; None for
        the numbers in the state dict. A torch scheduler is not in it: pass its Optax twin here.
      algorithm: ``'adam'`` or ``'adamw'``, needed for older files that do not say it.
      step: Updates taken so far, where a schedule goes on; None for Adam's own count, or 0.

    Returns:
      The transformation and its state. Leaves that the optimizer does not have are frozen; where
      only some have state, the others (never used so far) wait for their first gradient, as in
      torch. For an ``nnx.Optimizer`` made with this transformation, ``optimizer.opt_state =
      jax.tree.unflatten(jax.tree.structure(optimizer.opt_state), jax.tree.leaves(state))``.

    Raises:
      ValueError: If the optimizer has no equal in optax (``amsgrad``, other algorithms) or names
        are needed.
      CheckpointMismatch: If optimizer, model and parameters do not belong together.

    Example:
      >>> import numpy as np
      >>> model = {"fc.weight": np.ones((3, 2), np.float32)}
      >>> group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
      >>> momentum = {"momentum_buffer": np.ones((3, 2), np.float32)}
      >>> params = {"fc": {"kernel": np.ones((2, 3), np.float32)}}
      >>> tx, state = optimizer_from_torch(
      ...     {"state": {0: momentum}, "param_groups": [group]}, model, params
      ... )
      >>> state[0].trace["fc"]["kernel"].shape
      (2, 3)
    """
    model = named(model)
    found = pairs_for(model, params, pairs)
    tx, filler = optimizer_plan(
        optimizer, model, params, found, param_names, learning_rate, algorithm, step
    )
    return tx, filler.fill(tx.init(params))


def optimizer_plan(
    optimizer: Mapping[str, Any],
    model: Mapping[str, Any],
    params: Any,
    found: Pairs,
    param_names: ParamNames = None,
    learning_rate: Rates = None,
    algorithm: str | None = None,
    step: int | None = None,
    frozen: Collection[str] = (),
) -> tuple[optax.GradientTransformation, Filler]:
    """The transformation of `optimizer_from_torch`, and what fills its fresh state.

    Args:
      optimizer: As for `optimizer_from_torch`, and so are all that are not named here.
      model: The torch state dict.
      params: The Flax parameters.
      found: Their pairs.
      param_names: See there.
      learning_rate: See there.
      algorithm: See there.
      step: See there.
      frozen: Torch parameters that get no gradient, whether the optimizer has them or not.
    """
    entries = read_entries(optimizer, model, param_names, unpaired(model, found))
    settings = [Hyperparameters.read(group, algorithm) for group in optimizer["param_groups"]]
    rates = _rates(learning_rate, settings)
    parts = _parts(found, entries, settings, frozen)
    used = sorted(set(parts.values()), key=lambda part: part.label)

    def transformation(part: _Part) -> optax.GradientTransformation:
        hyper = settings[part.group]
        return hyper.transformation(rates[part.group], part.terms, _PAUSES[part.pause])

    every = flatten_tree(params)
    if len(used) == 1 and len(parts) == len(every.paths):
        tx = transformation(used[0])
    else:
        labels = every.replace(
            {path: parts[path].label if path in parts else _FROZEN for path in every.paths}
        )
        inner = {part.label: transformation(part) for part in used}
        tx = optax.multi_transform({**inner, _FROZEN: optax.set_to_zero()}, labels)
    taken = max([part.step for part in used], default=0) if step is None else step
    return tx, Filler(found, entries, parts, used, taken)


def _rates(
    asked: Rates,
    settings: Sequence[Hyperparameters],
) -> Sequence[optax.ScalarOrSchedule]:
    """The learning rate of each group."""
    if asked is None:
        return [hyper.learning_rate for hyper in settings]
    rates = list(asked) if isinstance(asked, Sequence) else [asked] * len(settings)
    if len(rates) != len(settings):
        raise ValueError(
            f"The optimizer has {len(settings)} param groups, and `learning_rate` gives "
            f"{len(rates)} rates. Give one for all, or one for each group."
        )
    return rates


def _parts(
    pairs: Pairs,
    entries: Mapping[str, Entry],
    settings: Sequence[Hyperparameters],
    frozen: Collection[str],
) -> dict[Path, _Part]:
    """The part that each leaf of the optimizer belongs to; none for what has nothing to keep."""
    parts: dict[Path, _Part | None] = {}
    split: list[str] = []
    begun = any(entry.has_state for entry in entries.values())
    for pair in pairs:
        entry = entries.get(pair.torch_name)
        if entry is None or pair.kind == "buffer":
            continue
        hyper = settings[entry.group]
        pause = _pause(entry, hyper, begun, pair.torch_name in frozen)
        part = None if pause == _FROZEN else _part(pair, entry, hyper, pause)
        if parts.setdefault(pair.path, part) != part:
            split.append("/".join(pair.path))
    if split:
        raise CheckpointMismatch(
            "Torch parameters that are one Flax leaf stand in different param groups, have taken "
            "different numbers of steps, or are frozen in part.",
            ambiguous=split,
        )
    # A buffer that is not there yet is a buffer of zeros, except for dampening: merge those parts.
    return {
        path: part
        if settings[part.group].dampening
        else dataclasses.replace(part, label=part.label[:-2], started=True)
        for path, part in parts.items()
        if part is not None
    }


def _pause(entry: Entry, hyper: Hyperparameters, begun: bool, frozen: bool) -> str:
    """Why torch does not move a parameter: frozen, held or unused; empty if it does."""
    if frozen:
        return "held" if entry.has_state or (hyper.keeps_state and not begun) else _FROZEN
    never = begun and hyper.keeps_state and not entry.has_state
    # Else gradients of zeros change nothing, and one part less is a simpler state.
    matters = hyper.algorithm != "sgd" or hyper.dampening or hyper.weight_decay
    return "unused" if never and matters else ""


def _part(pair: Pair, entry: Entry, hyper: Hyperparameters, pause: str) -> _Part:
    """The part of one torch parameter."""
    if pause != "held" and pair.must_be_zero:
        raise CheckpointMismatch(
            f"The optimizer moves {pair.torch_name}, which flax.nnx.GRUCell does not have. "
            "Use flax.linen.GRUCell."
        )
    if pair.terms > 1 and hyper.algorithm == "adam" and hyper.weight_decay:
        raise CheckpointMismatch(
            f"{'/'.join(pair.path)} is the sum of {pair.terms} torch biases, whose L2 "
            "penalties Adam normalises one by one. Use AdamW, or no weight decay on biases."
        )
    started = hyper.has_momentum and entry.state.get("momentum_buffer") is not None
    why = pause and f"_{pause}"
    label = f"group{entry.group}_step{entry.step}_terms{pair.terms}{why}_{int(started)}"
    return _Part(label, entry.group, entry.step, pair.terms, started, pause)


@dataclasses.dataclass(frozen=True)
class Filler:
    """Puts what torch kept into a fresh Optax state."""

    pairs: Pairs
    entries: Mapping[str, Entry]
    leaves: Mapping[Path, _Part]
    parts: Sequence[_Part]
    taken: int

    def paused(self, pause: str) -> list[str]:
        """The leaves that are ``held``, or ``unused``."""
        return ["/".join(path) for path, part in self.leaves.items() if part.pause == pause]

    def fill(self, node: Any, part: _Part | None = None) -> Any:
        """The state, of which only the structure counts, with what torch kept."""
        part = self.parts[0] if part is None and len(self.parts) == 1 else part
        if isinstance(node, optax.ScaleByAdamState):
            assert part is not None  # Adam never stands outside a part
            return node._replace(
                count=jnp.asarray(part.step, jnp.int32),
                mu=self._replaced(node.mu, "exp_avg", mean=True),
                nu=self._replaced(node.nu, "exp_avg_sq", mean=True),
            )
        if isinstance(node, optax.TraceState):
            return node._replace(trace=self._replaced(node.trace, "momentum_buffer"))
        if isinstance(node, DampenedTraceState):
            assert part is not None
            started = jax.tree.map(lambda flag: jnp.full_like(flag, part.started), node.started)
            return DampenedTraceState(self._replaced(node.trace, "momentum_buffer"), started)
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=jnp.asarray(self.taken, jnp.int32))
        if isinstance(node, optax.transforms.PartitionState):
            by_label = {part.label: part for part in self.parts}
            return node._replace(
                inner_states={
                    label: self.fill(inner, by_label.get(str(label)))
                    for label, inner in node.inner_states.items()
                }
            )
        if isinstance(node, UnusedState):
            return node._replace(inner_state=self.fill(node.inner_state, part))
        if isinstance(node, optax.MaskedState):
            return node._replace(inner_state=self.fill(node.inner_state, part))
        return tuple(self.fill(child, part) for child in node) if type(node) is tuple else node

    def _replaced(self, tree: Any, key: str, *, mean: bool = False) -> Any:
        tensors = {
            name: entry.state[key]
            for name, entry in self.entries.items()
            if entry.state.get(key) is not None
        }
        wanted = [pair for pair in self.pairs if pair.torch_name in tensors]
        leaves = leaves_from_torch(wanted, tensors, mean=mean)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        return treedef.unflatten([jnp.asarray(leaves.get(plain_path(p), v)) for p, v in flat])
