"""A torch optimizer's state dict, read: which parameter has which hyperparameters and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import clean_names, shape_of, storage_key, to_numpy
from torch_bridge._base.terminal import printable
from torch_bridge._convert.dampened_trace import dampened_trace
from torch_bridge._hook.buckets import BucketLayout

_MAX_STEPS = 2**31  # optax counts in int32
# What SGD and Adam must have, what else torch puts into their groups, and what they keep. Several
# optimizers outside of torch have the first, and more.
_MARKS = {"sgd": {"momentum", "dampening", "nesterov"}, "adam": {"betas", "eps", "amsgrad"}}
_OF_TORCH = {
    *("params", "param_names", "lr", "weight_decay", "maximize", "foreach", "differentiable"),
    *("fused", "capturable", "decoupled_weight_decay"),
}
_OF_SCHEDULERS = {
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    *("lr_scale", "lr_mult"),  # of many training scripts, whose scheduler multiplies `lr` by it
}
_STATES = {"sgd": {"momentum_buffer"}, "adam": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}}
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """What one param group says, for one of the three algorithms.

    Attributes:
      algorithm: ``sgd``, ``adam`` or ``adamw``.
      learning_rate: A number.
      weight_decay: Added to the gradient (sgd, adam) or to the update (adamw).
      maximize: Whether the gradient is negated first.
      momentum, dampening, nesterov: Of sgd.
      betas, eps: Of adam and adamw.
    """

    algorithm: str
    learning_rate: float
    weight_decay: float = 0.0
    maximize: bool = False
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @classmethod
    def read(cls, group: Mapping[str, Any], algorithm: str | None) -> Hyperparameters:
        """Reads one entry of ``param_groups``.

        Raises:
          ValueError: If the algorithm is none of the three, or uses ``amsgrad``.
        """
        found = _algorithm(group, algorithm)
        common = {
            "learning_rate": _number("lr", group["lr"]),
            "weight_decay": _number("weight_decay", group.get("weight_decay", 0.0)),
            "maximize": bool(group.get("maximize", False)),
        }
        if found == "sgd":
            return cls(
                found,
                **common,
                momentum=_number("momentum", group["momentum"]),
                dampening=_number("dampening", group["dampening"]),
                nesterov=bool(group["nesterov"]),
            )
        if group.get("amsgrad"):
            raise ValueError(
                "`amsgrad` has no equal in optax: optax.amsgrad keeps the maximum of the corrected "
                "second moment, torch that of the uncorrected one. Turn it off in torch first."
            )
        betas = group["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise CheckpointMismatch("The optimizer's `betas` must be two numbers.")
        first, second = (_number("betas", beta) for beta in betas)
        return cls(found, **common, betas=(first, second), eps=_number("eps", group["eps"]))

    def transformation(
        self,
        learning_rate: optax.ScalarOrSchedule,
        terms: int = 1,
        pause: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None,
    ) -> optax.GradientTransformation:
        """The Optax transformation with the same updates, built like optax.sgd, adam or adamw.

        Args:
          learning_rate: A number or a schedule in place of the group's own.
          terms: Torch parameters whose sum the leaf is (the two biases of an LSTM): each moves by
            what its own gradient says, so their sum moves `terms` times as fast.
          pause: Put around everything but the learning rate, whose schedule goes on for all.
        """
        parts = [optax.scale(-1.0)] if self.maximize else []
        several = [optax.scale(float(terms))] if terms > 1 else []
        decay = [optax.add_decayed_weights(self.weight_decay)] if self.weight_decay else []
        if self.algorithm == "sgd":
            parts += several + decay + [self._momentum()]
        else:
            adam = [optax.scale_by_adam(*self.betas, eps=self.eps), *several]
            late = [optax.add_decayed_weights(self.weight_decay)]
            parts += decay + adam if self.algorithm == "adam" else adam + late
        parts = [pause(optax.chain(*parts))] if pause else parts
        return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))

    def _momentum(self) -> optax.GradientTransformation:
        if not self.momentum:
            return optax.identity()
        if self.dampening:
            return dampened_trace(self.momentum, self.dampening)
        return optax.trace(self.momentum, self.nesterov)

    @property
    def has_momentum(self) -> bool:
        """Whether there is a momentum buffer."""
        return self.algorithm == "sgd" and self.momentum != 0

    @property
    def keeps_state(self) -> bool:
        """Whether torch keeps anything for a parameter that has been updated."""
        return self.algorithm != "sgd" or self.has_momentum


def _number(name: str, value: Any) -> float:
    try:
        return float(to_numpy(value)) if hasattr(value, "shape") else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointMismatch(
            f"The optimizer's `{name}` must be a number, got a {type(value).__name__}."
        ) from error


def _algorithm(group: Mapping[str, Any], asked: str | None) -> str:
    family = next((name for name, marks in _MARKS.items() if marks <= group.keys()), None)
    if family == "sgd":
        found = "sgd"
    elif family == "adam":
        decoupled = group.get("decoupled_weight_decay")
        if decoupled is None and asked is None and group.get("weight_decay"):
            raise ValueError(
                "This state dict is that of Adam or of AdamW, and does not say of which; pass "
                "algorithm='adam' or algorithm='adamw'."
            )
        found = asked if decoupled is None and asked else "adamw" if decoupled else "adam"
    else:
        raise ValueError(
            "Only torch.optim.SGD, Adam and AdamW have an equal in optax; this param group has the "
            f"entries {sorted(map(str, group))}. Start the optimizer anew and convert the "
            "parameters alone."
        )
    if asked is not None and asked != found:
        raise ValueError(
            f"algorithm={asked!r} does not agree with the state dict, which is {found!r}."
        )
    return found


def _refuse_relatives(optimizer: Mapping[str, Any]) -> None:
    """Refuses what has the hyperparameters of SGD or Adam, and others: AdaBelief, LARS, SAM."""
    others, kept = set[Any](), set[Any]()
    for group in optimizer["param_groups"]:
        family = next((name for name, marks in _MARKS.items() if marks <= group.keys()), None)
        if family is None:
            continue  # refused where the hyperparameters are read
        labels = {key for key, value in group.items() if isinstance(value, str)}
        others |= group.keys() - _MARKS[family] - _OF_TORCH - _OF_SCHEDULERS - labels
        for index in group["params"]:
            kept |= optimizer["state"].get(index, {}).keys() - _STATES[family]
    if others or kept:
        hyper = f" `param_groups` with {sorted(map(str, others))}" if others else ""
        state = f" `state` with {sorted(map(str, kept))}" if kept else ""
        raise ValueError(
            "Only torch.optim.SGD, Adam and AdamW have an equal in optax; this optimizer has"
            f"{printable(hyper + (' and' if hyper and state else '') + state)}, which they do not "
            "have. Start the optimizer anew and convert the parameters alone; entries of your own "
            "that change no update can be deleted from `param_groups`."
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter of the optimizer: its index, its group and what is kept for it."""

    index: int
    group: int
    state: Mapping[str, Any]

    @property
    def has_state(self) -> bool:
        """Whether anything is kept: not before the first gradient."""
        return any(value is not None for value in self.state.values())

    @property
    def step(self) -> int:
        """Updates that Adam has counted for this parameter."""
        step = _number("step", self.state.get("step", 0))
        if not 0 <= step < _MAX_STEPS:
            raise CheckpointMismatch(f"The optimizer's `step` must be a count, got {step}.")
        return int(step)


def read_entries(
    optimizer: Mapping[str, Any],
    model: Mapping[str, Any],
    param_names: Sequence[str] | Sequence[Sequence[str]] | None,
    leftover: Collection[str] = (),
) -> dict[str, Entry]:
    """Names the parameters of an optimizer state dict.

    Args:
      optimizer: ``torch.optim.Optimizer.state_dict()``.
      model: Torch state dict of the model.
      param_names: Names in the order in which the optimizer was given the parameters, flat or one
        list for each group. None: as the optimizer recorded them, else the order of `model`.
      leftover: Tensors that go to no leaf. Where `model` has too many, these were buffers.

    Returns:
      Parameter name, as in `model`, -> entry.

    Raises:
      ValueError: If names are needed and not there, or it is another algorithm.
      CheckpointMismatch: With every unknown name and every state of another shape.
    """
    if not is_optimizer(optimizer):
        raise CheckpointMismatch(
            "This is no optimizer state: {'state': {index: ...}, 'param_groups': [{'lr': ..., "
            "'params': [index, ...]}, ...]} was expected. With several optimizers pass the "
            "state_dict() of one."
        )
    _refuse_relatives(optimizer)
    groups = optimizer["param_groups"]
    indices = [(index, k) for k, group in enumerate(groups) for index in group["params"]]
    names = _names(groups, model, param_names)
    if param_names is None and len(names) != len(indices):
        names = [name for name in names if name not in leftover]
    if len(names) != len(indices):
        raise ValueError(
            f"The optimizer has {len(indices)} parameters and there are {len(names)} names: what "
            "was frozen or is a buffer cannot be told. Pass `param_names`: "
            "[name for name, p in model.named_parameters()] of those that it was given."
        )
    cleaned = {clean: name for name, clean in clean_names(list(model)).items()}
    wanted = clean_names(names)
    known = {name: cleaned.get(wanted[name], name) for name in names}
    unknown = [name for name in names if known[name] not in model]
    entries = {
        known[name]: Entry(index, group, optimizer["state"].get(index, {}))
        for name, (index, group) in zip(names, indices, strict=True)
        if known[name] in model
    }
    mis_shaped = [
        f"{name} {shape_of(model[name])} has {key} {shape_of(value)}"
        for name, entry in entries.items()
        for key, value in entry.state.items()
        if shape_of(value) and shape_of(value) != shape_of(model[name])
    ]
    if unknown or mis_shaped:
        raise CheckpointMismatch(
            "The optimizer does not belong to this model. Pass `param_names` in the order in which "
            "the optimizer was given its parameters.",
            unexpected=unknown,
            mis_shaped=mis_shaped,
        )
    return entries


def steps_taken(optimizer: Any) -> int:
    """Updates that Adam has counted; 0 for SGD, which counts none, and where there is no state."""
    if not isinstance(optimizer, Mapping) or not is_optimizer(optimizer):
        return 0
    states = optimizer["state"].items()
    return max((Entry(index, 0, state).step for index, state in states), default=0)


def trained_names(
    optimizer: Mapping[str, Any], model: Mapping[str, Any], layout: BucketLayout | None
) -> list[str] | None:
    """The names of an optimizer that was given the trainable parameters alone, if it is that.

    Args:
      optimizer: ``torch.optim.Optimizer.state_dict()``.
      model: Torch state dict of the model.
      layout: The buckets of DDP, which hold what is trainable.

    Returns:
      The names of `layout` in the order of `model`, where one group without names of its own has
      as many parameters; else None, as `read_entries` takes it.
    """
    if layout is None or not is_optimizer(optimizer) or len(optimizer["param_groups"]) != 1:
        return None
    (group,) = optimizer["param_groups"]
    known = set(layout.names)
    if "param_names" in group or len(group["params"]) != len(known):
        return None
    names = [name for name in model if name in known]
    return names if len(names) == len(known) else None


def is_optimizer(value: Mapping[str, Any]) -> bool:
    """Whether it is laid out as ``torch.optim.Optimizer.state_dict()``."""
    state, groups = (value.get(name) for name in ("state", "param_groups"))
    return (
        isinstance(state, Mapping)
        and all(isinstance(entry, Mapping) for entry in state.values())
        and isinstance(groups, list | tuple)
        and all(isinstance(group, Mapping) and "lr" in group for group in groups)
        and all(_is_list(group.get("params"), int | str) for group in groups)
        and all(_is_list(group.get("param_names", ()), str) for group in groups)
    )


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)


def _names(
    groups: Sequence[Mapping[str, Any]],
    model: Mapping[str, Any],
    param_names: Sequence[str] | Sequence[Sequence[str]] | None,
) -> list[str]:
    if param_names is None and all("param_names" in group for group in groups):
        param_names = [group["param_names"] for group in groups]
    if param_names is not None:
        nested = [[entry] if isinstance(entry, str) else list(entry) for entry in param_names]
        return [name for names in nested for name in names]
    if len(groups) > 1:
        raise ValueError(
            "An optimizer with several param groups numbers its parameters group by group. Pass "
            "`param_names`: one list of names for each group, in the order given to the optimizer."
        )
    names, seen = [], set()
    for name, value in model.items():
        key = storage_key(value)
        if not name.endswith(_BUFFERS) and (key is None or key not in seen):
            names.append(name)  # Module.parameters() gives a tied tensor once
            seen.add(key)
    return names
