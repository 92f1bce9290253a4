"""A torch optimizer's state dict, read: which parameter has which hyperparameters and state."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import is_optimizer
from torch_bridge._base.tensors import clean_names, shape_of, trainable
from torch_bridge._base.terminal import printable
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._pairing.pairs import Pair, unpaired

ParamNames: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | None
_NUMBER = re.compile(r"\d+")
_SHOWN = 3  # names in a sentence
_MAX_STEPS = 2**31  # optax counts in int32
# Field of Optax's state -> what torch calls it: one table for both directions.
MOMENTS: dict[type, dict[str, str]] = {
    optax.TraceState: {"trace": "momentum_buffer"},
    optax.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
}
# What SGD and Adam must have, what else torch puts into their groups, and what they keep. Several
# optimizers outside of torch have the first, and more.
_MARKS = {"sgd": {"momentum", "dampening", "nesterov"}, "adam": {"betas", "eps", "amsgrad"}}
_OF_TORCH = {
    *("params", "param_names", "lr", "weight_decay", "maximize", "foreach", "differentiable"),
    *("fused", "capturable", "decoupled_weight_decay"),
    # Of schedulers; the last two of many training scripts, whose scheduler multiplies `lr`.
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    *("lr_scale", "lr_mult"),
}
_KEPT = {"sgd": {"momentum_buffer"}, "adam": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}}


class Hyperparameters(NamedTuple):
    """What one param group says, for one of the three algorithms."""

    algorithm: str  # sgd, adam or adamw
    lr: float
    weight_decay: float = 0.0  # added to the gradient (sgd, adam) or to the update (adamw)
    maximize: bool = False  # whether the gradient is negated first
    momentum: float = 0.0  # of sgd, as is nesterov
    nesterov: bool = False
    betas: tuple[float, ...] = (0.9, 0.999)  # of adam and adamw, as is eps
    eps: float = 1e-8

    @classmethod
    def read(cls, group: Mapping[str, Any], kept: Collection[str]) -> Hyperparameters:
        """Reads one entry of ``param_groups``.

        Args:
          group: The entry.
          kept: What ``state`` holds for its parameters.

        Raises:
          ValueError: If the algorithm is none of the three, or has no equal in optax.
        """
        hyper = cls(_algorithm(group, kept), lr=0.0)
        for name in ("lr", "weight_decay", "momentum", "eps"):
            if name in group:
                hyper = hyper._replace(**{name: _number(name, group[name])})
        for name in ("maximize", "nesterov"):
            if name in group:
                hyper = hyper._replace(**{name: bool(group[name])})
        betas = group.get("betas", hyper.betas)
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise CheckpointMismatch("The optimizer's `betas` must be two numbers.")
        return hyper._replace(betas=tuple(_number("betas", beta) for beta in betas))

    def transformation(
        self,
        learning_rate: optax.ScalarOrSchedule | None,
        terms: int,
        pause: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None,
    ) -> optax.GradientTransformation:
        """Makes the Optax transformation with the same updates, like optax.sgd, adam or adamw.

        Args:
          learning_rate: A number or a schedule; None for that of the group.
          terms: Torch parameters whose sum the leaf is (the two biases of an LSTM). All have one
            gradient: moments are their mean, and the sum moves `terms` times as fast.
          pause: Put around everything but the learning rate, whose schedule goes on for all.
        """
        decay = self.weight_decay
        links: list[optax.GradientTransformation] = []
        if self.maximize:
            links.append(optax.scale(-1.0))
        if decay and self.algorithm != "adamw":
            links.append(optax.add_decayed_weights(decay / terms))
        if self.algorithm != "sgd":
            links.append(optax.scale_by_adam(*self.betas, eps=self.eps))
        elif self.momentum:
            links.append(optax.trace(self.momentum, self.nesterov))
        else:
            links.append(optax.identity())  # as optax.sgd has it
        if terms > 1:
            links.append(optax.scale(float(terms)))
        if self.algorithm == "adamw":
            links.append(optax.add_decayed_weights(decay))
        if pause:
            links = [pause(optax.chain(*links))]
        rate = self.lr if learning_rate is None else learning_rate
        return optax.chain(*links, optax.scale_by_learning_rate(rate))

    @property
    def keeps(self) -> Collection[str]:
        """Names of what Optax keeps as well for an updated parameter, as torch calls them."""
        if self.algorithm == "sgd":
            return _KEPT["sgd"] if self.momentum else ()
        return _KEPT["adam"] - {"max_exp_avg_sq"}  # which `amsgrad` leaves behind


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointMismatch(
            f"The optimizer's `{name}` must be a number, got a {type(value).__name__}."
        ) from error


def _algorithm(group: Mapping[str, Any], kept: Collection[str]) -> str:
    """Tells sgd, adam and adamw from each other, as Optax has them, and from all others.

    Raises:
      ValueError: It has no equal in optax.
    """
    family = ""
    others = set(group)
    for name, marks in _MARKS.items():
        if marks <= group.keys():
            family = name
    if family:  # AdaBelief, LARS and SAM have the hyperparameters of one of the two, and others
        labels = {key for key, value in group.items() if isinstance(value, str)}
        others = others - _MARKS[family] - _OF_TORCH - labels
        others |= set(kept) - _KEPT[family]
    if others:
        raise ValueError(
            "Only torch.optim.SGD, Adam and AdamW have an equal in optax; this one is another, by "
            f"its entries {printable(str(sorted(map(str, others))))}. Start "
            "the optimizer anew and convert the parameters alone; entries of your own that change "
            "no update can be deleted from `param_groups`."
        )
    if group.get("amsgrad"):
        raise ValueError(
            "`amsgrad` has no equal in optax: optax.amsgrad keeps the maximum of the corrected "
            "second moment, torch that of the uncorrected one. Turn it off in torch first."
        )
    if group.get("momentum") and group.get("dampening"):
        raise ValueError(
            "`dampening` has no equal in optax, whose optax.trace adds the whole gradient to the "
            "momentum. Set it to 0 in torch first."
        )
    decoupled = group.get("decoupled_weight_decay")
    if family == "adam" and decoupled is None and group.get("weight_decay"):
        raise ValueError(
            "This state dict is that of Adam or of AdamW, and does not say of which, as of older "
            "torch. Set 'decoupled_weight_decay' in its `param_groups`: True for AdamW, else False."
        )
    return "adamw" if decoupled else family


class Entry(NamedTuple):
    """One parameter of the optimizer."""

    key: int  # its number in the state dict
    group: int  # that of its param group
    hyper: Hyperparameters  # what the group says
    state: Mapping[str, Any]  # what is kept for it; nothing before its first gradient
    step: int  # updates that Adam has counted for it


def read_entries(
    optimizer: Mapping[str, Any],
    model: Mapping[str, Any],
    param_names: ParamNames,
    pairs: Sequence[Pair],
    layout: BucketLayout | None,
) -> dict[str, Entry]:
    """Names the parameters of an optimizer state dict.

    Args:
      optimizer: As for `optimizer_from_torch`, like `param_names`.
      model: Torch state dict of the model.
      param_names: Of the optimizer; None: as it recorded them, else the order of `model`.
      pairs: Of `model`. Where it has too many tensors, those that go to no leaf were buffers.
      layout: What DDP has in its buckets. An optimizer of as many was given these alone.

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
    entries = _numbered(optimizer)
    names = _names(optimizer, model, param_names, len(entries), pairs, layout)
    originals = {clean: name for name, clean in clean_names(list(model)).items()}
    cleaned = clean_names(names)
    named: dict[str, Entry] = {}
    for name, entry in zip(names, entries, strict=True):
        named[originals.get(cleaned[name], name)] = entry
    if len(named) < len(entries):
        raise ValueError("`param_names` names a parameter twice. Name each that it was given once.")
    _refuse_others(named, model)
    return named


def _numbered(optimizer: Mapping[str, Any]) -> list[Entry]:
    """Reads the parameters of an optimizer, group after group.

    Raises:
      CheckpointMismatch: A count is none.
    """
    entries: list[Entry] = []
    for number, group in enumerate(optimizer["param_groups"]):
        states: dict[int, dict[str, Any]] = {}
        for index in group["params"]:
            state = optimizer["state"].get(index, {})
            states[index] = {key: value for key, value in state.items() if value is not None}
        kept = set().union(*states.values())
        hyper = Hyperparameters.read(group, kept)
        for index, state in states.items():
            step = _number("step", state.get("step", 0))
            if not 0 <= step < _MAX_STEPS:
                raise CheckpointMismatch(f"The optimizer's `step` must be a count, got {step}.")
            entries.append(Entry(index, number, hyper, state, int(step)))
    return entries


def _refuse_others(entries: Mapping[str, Entry], model: Mapping[str, Any]) -> None:
    """Refuses entries that are of another model, or of complex parameters.

    Raises:
      CheckpointMismatch: With all of these.
    """
    unknown: list[str] = []
    mis_shaped: list[str] = []
    complex_ones: list[str] = []
    for name, entry in entries.items():
        if name not in model:
            unknown.append(name)
            continue
        shape = shape_of(model[name])
        for key, value in entry.state.items():
            if shape_of(value) and shape_of(value) != shape:
                mis_shaped.append(f"{name} {shape} has {key} {shape_of(value)}")
        if entry.state and _dtype_name(model[name]).startswith("complex"):
            complex_ones.append(name)
    if unknown or mis_shaped:
        raise CheckpointMismatch(
            "The optimizer does not belong to this model. Pass `param_names` in the order in which "
            "the optimizer was given its parameters.",
            unexpected=unknown,
            mis_shaped=mis_shaped,
        )
    if complex_ones:
        raise CheckpointMismatch(
            "torch's optimizers take a complex parameter for two real ones, and torch's gradients "
            "are the conjugates of jax.grad's. Convert the parameters alone, with "
            "params_from_torch, and begin the optimizer anew.",
            unexpected=complex_ones,
        )


def _names(
    optimizer: Mapping[str, Any],
    model: Mapping[str, Any],
    param_names: ParamNames,
    count: int,
    pairs: Sequence[Pair],
    layout: BucketLayout | None,
) -> list[str]:
    """Names the parameters, in the optimizer's order.

    Raises:
      ValueError: Nothing tells the names.
    """
    groups = optimizer["param_groups"]
    recorded = recorded_names(optimizer, param_names)
    if recorded is not None:
        names = recorded
    elif len(groups) > 1:
        raise ValueError(
            "An optimizer with several param groups numbers its parameters group by group. Pass "
            "`param_names`: one list of names for each group, in the order given to the optimizer."
        )
    else:
        names = _names_by_order(model, count, pairs, layout)
        _refuse_sorted(names, model)
    if len(names) != count:
        raise ValueError(
            f"The optimizer has {count} parameters and there are {len(names)} names: what "
            "was frozen or is a buffer cannot be told. Pass `param_names`: "
            "[name for name, p in model.named_parameters()] of those that it was given."
        )
    return names


def recorded_names(optimizer: Mapping[str, Any], param_names: ParamNames) -> list[str] | None:
    """Returns the names that the user says, or the optimizer has recorded; None where neither."""
    if param_names is None:
        recorded = [group.get("param_names") for group in optimizer["param_groups"]]
        if any(names is None for names in recorded):
            return None
        param_names = recorded
    flat: list[str] = []
    for part in param_names:
        if isinstance(part, str):
            flat.append(part)
        else:
            flat.extend(part)
    return flat


def _names_by_order(
    model: Mapping[str, Any], count: int, pairs: Sequence[Pair], layout: BucketLayout | None
) -> list[str]:
    """Names an optimizer's parameters by the order of the model, those that are as many."""
    every = trainable(model)
    leftover = set(unpaired(model, pairs))
    bucketed = [name for name in model if layout and name in layout.entries]
    paired = [name for name in every if name not in leftover]
    for names in (bucketed, every, paired):
        if len(names) == count:
            return names
    return every


def _refuse_sorted(names: Sequence[str], model: Mapping[str, Any]) -> None:
    """Refuses names in the order of the alphabet where another order would fit as well.

    safetensors sorts its names, and an optimizer numbers its parameters in the module's order.

    Raises:
      ValueError: Two parameters of one shape may have been exchanged.
    """
    if list(names) != sorted(names):
        return
    last: dict[Any, str] = {}
    for name in names:
        before = last.get(shape_of(model[name]))
        last[shape_of(model[name])] = name
        if before is not None and not _counts_up(before, name):
            raise ValueError(
                f"The names of the model are sorted, as safetensors does it, so that they do not "
                f"tell in which order the optimizer has {printable(before)} and {printable(name)}, "
                f"which have one shape. Pass `param_names`: "
                f"[name for name, p in model.named_parameters()]."
            )


def _counts_up(first: str, second: str) -> bool:
    """Tells names that differ in their numbers alone, of which the first that differs is larger."""
    if _NUMBER.sub("0", first) != _NUMBER.sub("0", second):
        return False
    return list(map(int, _NUMBER.findall(first))) < list(map(int, _NUMBER.findall(second)))


def notes_on_groups(optimizer: Mapping[str, Any], scheduled: bool) -> Iterator[str]:
    """Says by name what drove the optimizer in torch and stands still here.

    Args:
      optimizer: Its ``state_dict()``.
      scheduled: Whether a learning rate is given for Flax.
    """
    for group in optimizer["param_groups"]:
        bounds = [group.get(name) for name in ("base_momentum", "max_momentum")]
        if bounds != [None, None] and bounds[0] != bounds[1]:
            kind = "betas" if "betas" in group else "momentum"
            yield (
                f"A scheduler of the torch run (OneCycleLR or CyclicLR with cycle_momentum) drives "
                f"the optimizer's `{kind}` as well, between base_momentum={bounds[0]} and "
                f"max_momentum={bounds[1]}. No file holds its course: here `{kind}` stays at "
                f"{group.get(kind)}, as in the file. To go on with a course, build the optimizer "
                f"with optax.inject_hyperparams and put the state in."
            )
            break
    if not scheduled and any("initial_lr" in group for group in optimizer["param_groups"]):
        rates = sorted({f"{_number('lr', group['lr']):g}" for group in optimizer["param_groups"]})
        yield (
            f"A learning rate scheduler ran in torch (`initial_lr` stands beside `lr`), and no "
            f"file holds its course: the rate stays at {', '.join(rates)}. Pass learning_rate=, "
            f"the Optax twin of the scheduler."
        )


def note_on_order(
    optimizer: Mapping[str, Any],
    entries: Mapping[str, Entry],
    model: Mapping[str, Any],
    param_names: ParamNames,
) -> Iterator[str]:
    """Says which parameters could be exchanged, where the optimizer does not name its own."""
    if recorded_names(optimizer, param_names) is not None:
        return
    seen: dict[Any, str] = {}
    for name, entry in entries.items():
        other = seen.setdefault(shape_of(model[name]), name)
        if other != name and entry.state:
            yield (
                f"The optimizer does not name its parameters, so that they are taken in the order "
                f"of the model. If it was given them in another order, {printable(other)} and "
                f"{printable(name)} (of one shape) have each other's state: pass param_names=."
            )
            return


def _dtype_name(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def notes_on_dtypes(entries: Mapping[str, Entry], model: Mapping[str, Any]) -> Iterator[str]:
    """Says which moments are cast to the dtype of their parameters."""
    cast: list[str] = []
    for name, entry in entries.items():
        for key, value in entry.state.items():
            kept = _dtype_name(value)
            dtype = _dtype_name(model[name])
            if shape_of(value) and kept and dtype and kept != dtype:
                cast.append(f"{key} of {name} ({kept} beside {dtype})")
    if cast:
        more = f" and {len(cast) - _SHOWN} more" if len(cast) > _SHOWN else ""
        yield (
            f"Moments of another dtype than their parameters are cast to it, as torch's "
            f"load_state_dict does: {printable(', '.join(cast[:_SHOWN]))}{more}."
        )
