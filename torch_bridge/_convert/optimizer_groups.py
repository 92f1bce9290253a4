"""A torch optimizer's state dict, read: which parameter has which hyperparameters and state."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import is_optimizer
from torch_bridge._base.tensors import clean_names, shape_of, trainable
from torch_bridge._base.terminal import printable, some
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._pairing.pairs import Pair, unpaired

Document: TypeAlias = Mapping[str, Any]  # a ``state_dict()``, of an optimizer or a model
ParamNames: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | None
_NUMBER = re.compile(r"\d+")
_MAX_STEPS = 2**31  # optax counts in int32
# Field of Optax's state -> what torch calls it: one table for both directions.
MOMENTS: dict[type, dict[str, str]] = {
    optax.TraceState: {"trace": "momentum_buffer"},
    optax.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
}
# What SGD and Adam must have, what else torch puts into their groups, and what they keep. Several
# optimizers outside of torch have the first, and more.
_MARKS = {
    "": set(),
    "sgd": {"momentum", "dampening", "nesterov"},
    "adam": {"betas", "eps", "amsgrad"},
}
_OF_TORCH = {
    *("params", "param_names", "lr", "weight_decay", "maximize", "foreach", "differentiable"),
    *("fused", "capturable", "decoupled_weight_decay"),
    # Of schedulers; the last two of many training scripts, whose scheduler multiplies `lr`.
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    *("lr_scale", "lr_mult"),
}
_KEPT = {
    "": set(),
    "sgd": {"momentum_buffer"},
    "adam": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
}


class Hyperparameters(NamedTuple):
    """What one param group says, for one of the three algorithms."""

    algorithm: str  # sgd, adam or adamw
    lr: float
    weight_decay: float  # added to the gradient (sgd, adam) or to the update (adamw)
    maximize: bool  # whether the gradient is negated first
    momentum: float  # of sgd, as is nesterov
    nesterov: bool
    betas: tuple[float, float]  # of adam and adamw, as is eps
    eps: float

    @classmethod
    def read(cls, group: Document, kept: Collection[str]) -> Hyperparameters:
        """Reads one entry of ``param_groups``.

        Args:
          group: The entry.
          kept: What ``state`` holds for its parameters.

        Raises:
          ValueError: If the algorithm is none of the three, or has no equal in optax.
        """
        betas = group.get("betas", (0, 0))
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise CheckpointMismatch("The optimizer's `betas` must be two numbers.")
        values: dict[str, Any] = {"betas": tuple(_number("betas", beta) for beta in betas)}
        for name in ("maximize", "nesterov"):
            values[name] = bool(group.get(name))
        for name in ("lr", "weight_decay", "momentum", "eps"):
            values[name] = _number(name, group.get(name, 0))
        return cls(_algorithm(group, kept), **values)

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
        links = []
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
        rate = learning_rate
        if rate is None:
            rate = self.lr
        return optax.chain(*links, optax.scale_by_learning_rate(rate))

    @property
    def keeps(self) -> Collection[str]:
        """Names of what Optax keeps as well for an updated parameter, as torch calls them."""
        if self.algorithm == "sgd" and not self.momentum:
            return ()
        if self.algorithm == "sgd":
            return _KEPT["sgd"]
        return _KEPT["adam"] - {"max_exp_avg_sq"}  # which `amsgrad` leaves behind


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointMismatch(
            f"The optimizer's `{name}` must be a number, got a {type(value).__name__}."
        ) from error


def _algorithm(group: Document, kept: Collection[str]) -> str:
    """Tells sgd, adam and adamw from each other, as Optax has them, and from all others.

    Raises:
      ValueError: It has no equal in optax.
    """
    family = ""
    for name, marks in _MARKS.items():
        if marks <= group.keys():
            family = name
    # AdaBelief, LARS and SAM have the hyperparameters of one of the two, and others.
    labels = {key for key, value in group.items() if isinstance(value, str)}
    others = {*group, *kept} - _MARKS[family] - _KEPT[family] - _OF_TORCH - labels
    if others or not family:
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
    if decoupled:
        return "adamw"
    return family


class Entry(NamedTuple):
    """One parameter of the optimizer."""

    key: int  # its number in the state dict
    group: int  # that of its param group
    hyper: Hyperparameters  # what the group says
    state: Document  # what is kept for it; nothing before its first gradient
    step: int  # updates that Adam has counted for it


def read_entries(
    optimizer: Document,
    model: Document,
    param_names: ParamNames,
    pairs: Sequence[Pair],
    layout: BucketLayout | None,
) -> dict[str, Entry]:
    """Names the parameters of an optimizer state dict.

    Args:
      optimizer: As for `optimizer_from_torch`, like `param_names`.
      model: Torch state dict of the model.
      param_names: The optimizer's names; None: as it recorded them, else the order of `model`.
      pairs: The pairs of `model`. If it has too many tensors, those without a leaf were buffers.
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
    names = recorded_names(optimizer, param_names)
    if names is None:
        names = _names_by_order(optimizer, model, len(entries), pairs, layout)
    if len(names) != len(entries):
        raise ValueError(
            f"The optimizer has {len(entries)} parameters and there are {len(names)} names: what "
            "was frozen or is a buffer cannot be told. Pass `param_names`: "
            "[name for name, p in model.named_parameters()] of those that it was given."
        )
    originals = {}
    for name, clean in clean_names(list(model)).items():
        originals[clean] = name
    cleaned = clean_names(names)
    named = {}
    for name, entry in zip(names, entries, strict=True):
        named[originals.get(cleaned[name], name)] = entry
    if len(named) < len(entries):
        raise ValueError("`param_names` names a parameter twice. Name each that it was given once.")
    _refuse_others(named, model)
    return named


def _numbered(optimizer: Document) -> list[Entry]:
    """Reads the parameters of an optimizer, group after group.

    Raises:
      CheckpointMismatch: A count is none. Or something is kept for a parameter of no group.
    """
    entries = []
    nobodys = set(optimizer["state"])
    for number, group in enumerate(optimizer["param_groups"]):
        states = {}
        for index in group["params"]:
            states[index] = {}
            for key, value in optimizer["state"].get(index, {}).items():
                if value is not None:
                    states[index][key] = value
        nobodys -= set(states)
        hyper = Hyperparameters.read(group, set().union(*states.values()))
        for index, state in states.items():
            step = _number("step", state.get("step", 0))
            if not 0 <= step < _MAX_STEPS:
                raise CheckpointMismatch(f"The optimizer's `step` must be a count, got {step}.")
            entries.append(Entry(index, number, hyper, state, int(step)))
    if nobodys:
        raise CheckpointMismatch(
            "The optimizer's `state` has entries that no param group lists in its `params`: their "
            "moments belong to nobody. A tool that writes indices as text makes such ones. "
            "Give `state` the keys that `params` has: integers, as torch's state_dict() does.",
            unexpected=sorted(printable(repr(key)) for key in nobodys),
        )
    return entries


def _refuse_others(entries: Mapping[str, Entry], model: Document) -> None:
    """Refuses entries that are of another model, or of complex parameters.

    Raises:
      CheckpointMismatch: With all of these.
    """
    mis_shaped = []
    complex_ones = []
    for name in entries.keys() & model.keys():
        shape = shape_of(model[name])
        state = entries[name].state
        for key, value in state.items():
            if shape_of(value) not in ((), shape):
                mis_shaped.append(f"{name} {shape} has {key} {shape_of(value)}")
        if state and _dtype_name(model[name]).startswith("complex"):
            complex_ones.append(name)
    unknown = sorted(entries.keys() - model.keys())
    if unknown or mis_shaped:
        raise CheckpointMismatch(
            "The optimizer does not belong to this model. Pass `param_names` in the order in which "
            "the optimizer was given its parameters.",
            unexpected=unknown,
            mis_shaped=sorted(mis_shaped),
        )
    if complex_ones:
        raise CheckpointMismatch(
            "torch's optimizers take a complex parameter for two real ones, and torch's gradients "
            "are the conjugates of jax.grad's. Convert the parameters alone, with "
            "params_from_torch, and begin the optimizer anew.",
            unexpected=sorted(complex_ones),
        )


def recorded_names(optimizer: Document, param_names: ParamNames) -> list[str] | None:
    """Returns the names that the user says, or the optimizer has recorded; None where neither."""
    if param_names is None:
        param_names = [group.get("param_names") for group in optimizer["param_groups"]]
        if None in param_names:
            return None
    return jax.tree.leaves(list(param_names))


def _names_by_order(
    optimizer: Document,
    model: Document,
    count: int,
    pairs: Sequence[Pair],
    layout: BucketLayout | None,
) -> list[str]:
    """Names an optimizer's parameters by the order of the model, those that are as many.

    safetensors sorts its names, and an optimizer numbers its parameters in the module's order.

    Raises:
      ValueError: There are several groups. Or names are sorted, and two parameters of one shape may
        have been exchanged.
    """
    if len(optimizer["param_groups"]) > 1:
        raise ValueError(
            "An optimizer with several param groups numbers its parameters group by group. Pass "
            "`param_names`: one list of names for each group, in the order given to the optimizer."
        )
    every = trainable(model)
    leftover = set(unpaired(model, pairs))
    paired = [name for name in every if name not in leftover]
    bucketed = []
    if layout:
        bucketed = [name for name in model if name in layout.entries]
    names = every
    for choice in (paired, every, bucketed):  # the last one of several of one length
        if len(choice) == count:
            names = choice
    for first, second in _alike(names, model):
        if names == sorted(names) and not _counts_up(first, second):
            raise ValueError(
                f"The names of the model are sorted, as safetensors does it, so that they do not "
                f"tell in which order the optimizer has {printable(first)} and {printable(second)},"
                f" which have one shape. Pass `param_names`: "
                f"[name for name, p in model.named_parameters()]."
            )
    return names


def _alike(names: Sequence[str], model: Document) -> Iterator[tuple[str, str]]:
    """Yields parameters of one shape that follow each other, which nothing else tells apart."""
    last = {}
    for name in names:
        shape = shape_of(model[name])
        if shape in last:
            yield last[shape], name
        last[shape] = name


def _counts_up(first: str, second: str) -> bool:
    """Tells names that differ in their numbers alone, of which the first that differs is larger."""
    if _NUMBER.sub("0", first) != _NUMBER.sub("0", second):
        return False
    return list(map(int, _NUMBER.findall(first))) < list(map(int, _NUMBER.findall(second)))


def doubts_about(
    optimizer: Document,
    entries: Mapping[str, Entry],
    model: Document,
    param_names: ParamNames,
    scheduled: bool,
) -> Iterator[str]:
    """Says what drove the optimizer in torch and stands still here, and what else may differ.

    Args:
      optimizer: Its ``state_dict()``.
      entries: As `read_entries` named them.
      model: Torch state dict of the model.
      param_names: As the user says them.
      scheduled: Whether a learning rate is given for Flax.
    """
    if recorded_names(optimizer, param_names) is None:
        for first, second in _alike(list(entries), model):
            if entries[second].state:
                yield (
                    f"The optimizer does not name its parameters, so that they are taken in the "
                    f"order of the model. If it was given them in another order, "
                    f"{printable(first)} and {printable(second)} (of one shape) have each other's "
                    f"state: pass param_names=."
                )
                break
    cast = []
    for name, entry in entries.items():
        dtype = _dtype_name(model[name])
        for key, value in entry.state.items():
            kept = _dtype_name(value)
            if shape_of(value) and kept and dtype and kept != dtype:
                cast.append(f"{key} of {name} ({kept} beside {dtype})")
    if cast:
        yield (
            f"Moments of another dtype than their parameters are cast to it, as torch's "
            f"load_state_dict does: {some(cast)}."
        )
    groups = optimizer["param_groups"]
    for group in groups:
        lowest = group.get("base_momentum")
        highest = group.get("max_momentum")
        if lowest != highest:
            kind = "momentum"
            if "betas" in group:
                kind = "betas"
            yield (
                f"A scheduler of the torch run (OneCycleLR or CyclicLR with cycle_momentum) drives "
                f"the optimizer's `{kind}` as well, between base_momentum={lowest} and "
                f"max_momentum={highest}. No file holds its course: here `{kind}` stays at "
                f"{group.get(kind)}, as in the file. To go on with a course, build the optimizer "
                f"with optax.inject_hyperparams and put the state in."
            )
            break
    if not scheduled and any("initial_lr" in group for group in groups):
        rates = sorted({f"{float(group['lr']):g}" for group in groups})
        yield (
            f"A learning rate scheduler ran in torch (`initial_lr` stands beside `lr`), and no "
            f"file holds its course: the rate stays at {', '.join(rates)}. Pass learning_rate=, "
            f"the Optax twin of the scheduler."
        )


def _dtype_name(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")
