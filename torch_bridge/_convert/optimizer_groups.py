"""Reads a torch optimizer's state dict: the hyperparameters and the state of each parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from torch_bridge._base.errors import CheckpointMismatch, Problems
from torch_bridge._base.schema import is_optimizer
from torch_bridge._base.tensors import names_in_model, shape_of, to_numpy, trainable
from torch_bridge._base.terminal import printable, some
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._pairing.pairs import Pair, unpaired

Document: TypeAlias = Mapping[str, Any]  # a ``state_dict()``, of an optimizer or a model
ParamNames: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | None
_NUMBER = re.compile(r"\d+")
_MAX_STEPS = 2**31  # optax counts in int32
# Field of Optax's state -> torch's name of the same moment, for both directions.
MOMENTS: dict[type, dict[str, str]] = {
    optax.TraceState: {"trace": "momentum_buffer"},
    optax.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
}
# The hyperparameters that identify SGD and Adam, those that torch's groups may also have, and the
# entries of a parameter's state. Optimizers outside of torch have the first ones and others.
_MARKS = {
    "": set(),
    "sgd": {"momentum", "dampening", "nesterov"},
    "adam": {"betas", "eps", "amsgrad"},
}
_OF_TORCH = {
    *("params", "param_names", "lr", "weight_decay", "maximize", "foreach", "differentiable"),
    *("fused", "capturable", "decoupled_weight_decay"),
    # Schedulers write these; many training scripts multiply `lr` by one of the last two.
    *("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"),
    *("lr_scale", "lr_mult"),
}
_KEPT: dict[str, Collection[str]] = {
    "": (),
    "sgd": ("momentum_buffer",),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
}
_KEPT["adamw"] = _KEPT["adam"]

# Entries that identify the other optimizers of torch, in a param group or a parameter's state.
_OTHERS = {
    "NAdam": {"momentum_decay"},
    "Adafactor": {"beta2_decay"},
    "Adamax": {"betas", "exp_inf"},
    "Adagrad": {"initial_accumulator_value"},
    "Adadelta": {"rho"},
    "RMSprop": {"centered"},
    "Rprop": {"etas"},
    "ASGD": {"lambd"},
    "LBFGS": {"history_size"},
    "Muon": {"ns_steps"},
}


class Hyperparameters(NamedTuple):
    """The hyperparameters of one param group, for one of the three algorithms."""

    algorithm: str  # sgd, adam or adamw
    lr: float
    weight_decay: float  # times the parameter: added to the gradient (sgd, adam) or update (adamw)
    maximize: bool  # True negates the gradient first
    momentum: float  # only used by sgd
    nesterov: bool  # only used by sgd
    betas: tuple[float, float]  # only used by adam and adamw
    eps: float  # only used by adam and adamw

    @classmethod
    def read(cls, group: Document, kept: Collection[str]) -> Hyperparameters:
        """Reads one entry of ``param_groups``.

        Args:
          group: The entry.
          kept: The names of the entries that the state has for the group's parameters.

        Raises:
          ValueError: The algorithm is none of the three, or has no equal in optax.
        """
        algorithm = _algorithm(group, kept)
        betas = group.get("betas", (0, 0))
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise CheckpointMismatch("The optimizer's `betas` must be two numbers.")
        first, second = betas
        values: dict[str, Any] = {"betas": (_number("betas", first), _number("betas", second))}
        for name in ("lr", "weight_decay", "momentum", "eps"):
            values[name] = _number(name, group.get(name, 0))
        for name in ("maximize", "nesterov"):
            values[name] = bool(group.get(name))
        return cls(algorithm, **values)

    def transformation(
        self,
        learning_rate: optax.ScalarOrSchedule | None,
        terms: int,
        pause: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None,
    ) -> optax.GradientTransformation:
        """Makes the Optax transformation with the same updates, like optax.sgd, adam or adamw.

        Args:
          learning_rate: A number or a schedule; None means the rate of the group.
          terms: Number of torch parameters whose sum is the leaf (the two biases of an LSTM). They
            have equal gradients, so the leaf's moments are their mean, and it moves `terms` times
            as fast as one of them.
          pause: A wrapper (`until_gradient`, `held`) for all but the learning rate, whose schedule
            counts every step; None for no wrapper.
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
            links.append(optax.identity())  # optax.sgd has it, too
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
        """Returns torch's names of the state entries that Optax keeps, too."""
        if self.algorithm == "sgd" and not self.momentum:
            return ()
        return _KEPT[self.algorithm]


def _number(name: str, value: Any) -> float:
    try:
        if shape_of(value) == (1,):  # torch accepts such a rate, too
            return float(to_numpy(value)[0])
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointMismatch(
            f"The optimizer's `{name}` must be a number, got a {type(value).__name__}."
        ) from error


def _algorithm(group: Document, kept: Collection[str]) -> str:
    """Returns the name of the algorithm: sgd, adam or adamw.

    Raises:
      ValueError: The algorithm is another, or has an option without an equal in optax.
    """
    family = ""
    for name, marks in _MARKS.items():
        if marks <= group.keys():
            family = name
    # AdaBelief, LARS and SAM have the hyperparameters of SGD or Adam, and others.
    labels = {key for key, value in group.items() if isinstance(value, str)}
    names = {*group, *kept}
    others = names.difference(_MARKS[family], _KEPT[family], _OF_TORCH, labels)
    if family == "adam":
        others.discard("max_exp_avg_sq")  # a run with `amsgrad` has left it in the state
    if others or not family:
        seems = "it is another"
        name = _other_algorithm(group, names)
        if name and not family:
            seems = f"it seems to be torch.optim.{name}"
        raise ValueError(
            f"Only torch.optim.SGD, Adam and AdamW have an equal in optax, and {seems}: its "
            f"entries are {printable(str(sorted(map(str, others))))}. Convert the parameters with "
            "the hook's state, dataclasses.replace(checkpoint, optimizer=None), and start a new "
            "optimizer. Entries of your own that change no update can be deleted from "
            "`param_groups`."
        )
    if group.get("amsgrad"):
        raise ValueError(
            "`amsgrad` has no equal in optax: torch keeps the maximum of the second moment before "
            "its bias correction, optax.amsgrad keeps it after the correction. Turn it off in "
            "torch first."
        )
    if group.get("momentum") and group.get("dampening"):
        raise ValueError(
            "`dampening` has no equal in optax, whose optax.trace adds the whole gradient to the "
            "momentum. Set it to 0 in torch first."
        )
    decoupled = group.get("decoupled_weight_decay")
    if family == "adam" and decoupled is None and group.get("weight_decay"):
        raise ValueError(
            "This state dict, from an older torch, may be of Adam or of AdamW. Set "
            "'decoupled_weight_decay' in its `param_groups`: True for AdamW, False for Adam."
        )
    if decoupled:
        return "adamw"
    return family


def _other_algorithm(group: Document, names: Collection[str]) -> str | None:
    """Returns the name of another optimizer of torch; None if it is none of torch's."""
    for name, marks in _OTHERS.items():
        if marks.issubset(names):
            return name
    if group.keys() - _OF_TORCH != {"betas", "eps"}:
        return None
    if "decoupled_weight_decay" in group:
        return "RAdam"
    return "Adamax or SparseAdam"


class Entry(NamedTuple):
    """One parameter of the optimizer."""

    key: int  # the parameter's index in the state dict
    group: int  # the index of its param group
    hyper: Hyperparameters  # the hyperparameters of the group
    state: Document  # the parameter's state; empty before its first gradient
    step: int  # the updates that Adam has counted for the parameter


def read_entries(
    optimizer: Document,
    model: Document,
    param_names: ParamNames,
    pairs: Sequence[Pair] | None,
    layout: BucketLayout | None,
) -> dict[str, Entry]:
    """Reads the entries of an optimizer's state dict, and finds the name of each parameter.

    Args:
      optimizer: The optimizer's ``state_dict()``.
      model: Torch state dict of the model.
      param_names: The names in the optimizer's order, as for `optimizer_from_torch`. None means the
        names that the optimizer recorded, or else the order of `model`.
      pairs: The pairs of `model`. If `model` has more tensors than the optimizer, tensors without a
        leaf count as buffers. None if they are not known; then parameters whose number differs are
        no error, and there are no entries.
      layout: The bucket layout, or None. It names the parameters of an optimizer without names, if
        both have the same number of parameters.

    Returns:
      Parameter name, as in `model` -> entry.

    Raises:
      ValueError: Names are needed, or the algorithm is not supported.
      CheckpointMismatch: A name is unknown, or a state has another shape; the error lists all.
    """
    if not is_optimizer(optimizer):
        raise CheckpointMismatch(_no_optimizer(optimizer))
    problems = Problems()
    entries = _numbered(optimizer, problems)
    names = recorded_names(optimizer, param_names)
    with problems.about("the names of the parameters"):
        sizes = [len(group["params"]) for group in optimizer["param_groups"]]
        count = sum(sizes)
        if names is None:
            names = _names_by_order(sizes, model, pairs, layout)
            if pairs is None and len(names) != count:
                names = []  # with pairs they may be clear
        if names and len(names) != count:
            raise ValueError(
                f"The optimizer has {count} parameters, but the model has {len(names)} names. The "
                "file does not say which of them are frozen or are buffers. Pass `param_names`: "
                "[name for name, p in model.named_parameters()], of the optimizer's parameters "
                "only."
            )
    problems.raise_all()
    if not names:
        return {}
    named = dict(zip(names_in_model(names, model), entries, strict=True))
    if len(named) < len(entries):
        raise ValueError("`param_names` names a parameter twice. Name each parameter once.")
    _refuse_others(named, model)
    return named


def _no_optimizer(value: Any) -> str:
    """Returns a sentence about a value that should be the state of an optimizer."""
    expected = (
        "This is not an optimizer state: "
        "{'state': {index: ...}, 'param_groups': [{'lr': ..., 'params': [index, ...]}, ...]} was "
        "expected."
    )
    if not isinstance(value, Mapping):
        return expected
    inner = [name for name, entry in value.items() if is_optimizer(entry)]
    if inner:
        sentence = (
            f"{expected} Convert dataclasses.replace(checkpoint, "
            f"optimizer=checkpoint.optimizer[{inner[0]!r:.40}])"
        )
        if len(inner) > 1:
            sentence += f"; there are {some(list(map(str, inner)))}"
        masters = [name for name in map(str, value) if "fp32" in name]
        if masters:
            sentence += (
                f". The float32 copies in {some(masters)} are the weights that it updates: put "
                "them into `model` as well"
            )
        return f"{sentence}."
    if any(isinstance(name, str) and name.startswith("param_groups.") for name in value):
        return (
            f"{expected} This one is flattened: save it without flatten_optimizer_state_dict=True."
        )
    return f"{expected} If there are several optimizers, pass the state_dict() of one."


def _numbered(optimizer: Document, problems: Problems) -> list[Entry]:
    """Reads the parameters of an optimizer, group after group.

    It adds to `problems`: an algorithm that optax does not have, a `step` that is not a count, and
    entries of `state` that no group lists.
    """
    entries = []
    unlisted = set(optimizer["state"])
    for number, group in enumerate(optimizer["param_groups"]):
        states = {}
        for index in group["params"]:
            key = index
            if index not in optimizer["state"]:
                key = str(index)  # dcp_to_torch and JSON make text of the indices
            unlisted.discard(key)
            state = optimizer["state"].get(key, {})
            states[index] = {name: value for name, value in state.items() if value is not None}
        with problems.about(f"group {number}"):
            hyper = Hyperparameters.read(group, set().union(*states.values()))
            for index, state in states.items():
                step = _number("step", state.get("step", 0))
                if not 0 <= step < _MAX_STEPS:
                    raise CheckpointMismatch(f"The optimizer's `step` must be a count, got {step}.")
                entries.append(Entry(index, number, hyper, state, int(step)))
    if unlisted:
        error = CheckpointMismatch(
            "The optimizer's `state` has entries that no param group lists in its `params`: their "
            "moments belong to nobody. Tools that write indices as text make such entries. Give "
            "`state` the same keys as `params`: integers, as in torch's state_dict().",
            unexpected=sorted(map(printable, map(repr, unlisted))),
        )
        problems.errors.append(("the state", error))
    return entries


def _refuse_others(entries: Mapping[str, Entry], model: Document) -> None:
    """Refuses entries of another model, and entries of complex parameters.

    Raises:
      CheckpointMismatch: Such entries exist; the error lists all.
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
            "The optimizer state of a complex parameter cannot be converted: torch's optimizers "
            "treat it as two real parameters, and torch's gradients are the complex conjugates of "
            "those of jax.grad. Convert the parameters alone, with params_from_torch, and start a "
            "new optimizer.",
            unexpected=sorted(complex_ones),
        )


def recorded_names(optimizer: Document, param_names: ParamNames) -> list[str] | None:
    """Returns the user's names, or else those that the optimizer recorded; None without either.

    A full state dict of FSDP has names in the place of the indices.
    """
    if param_names is None:
        param_names = []
        for group in optimizer["param_groups"]:
            names = group.get("param_names")
            if names is None:
                names = group["params"]
                # An index may have become text.
                if not all(isinstance(n, str) and not n.isdecimal() for n in names):
                    return None
            param_names.append(names)
    return jax.tree.leaves(list(param_names))


def _names_by_order(
    sizes: Sequence[int],
    model: Document,
    pairs: Sequence[Pair] | None,
    layout: BucketLayout | None,
) -> list[str]:
    """Returns the parameters' names in the order of the model, which is usually the optimizer's.

    safetensors sorts its names, but an optimizer numbers its parameters in the module's order.

    Raises:
      ValueError: The optimizer has several groups. Or the names are sorted, so two parameters of
        one shape may be in the wrong order.
    """
    count = sum(sizes)
    if max(sizes, default=0) < count:  # several groups have parameters
        raise ValueError(
            "An optimizer with several param groups numbers its parameters group by group. Pass "
            "`param_names`: one list of names for each group, in the order given to the optimizer."
        )
    every = trainable(model)
    paired = every
    if pairs is not None:
        leftover = set(unpaired(model, pairs))
        paired = [name for name in every if name not in leftover]
    bucketed = []
    if layout:
        bucketed = list(filter(layout.entries.__contains__, model))
    names = every
    for choice in (bucketed, every, paired):  # the surest first
        if len(choice) == count:
            names = choice
            break
    for first, second in _alike(names, model):
        if names == sorted(names) and not _counts_up(first, second):
            raise ValueError(
                f"The names of the model are sorted, as safetensors sorts them, so they do not "
                f"tell in which order the optimizer has {printable(first)} and {printable(second)},"
                f" which have one shape. Pass `param_names`: "
                f"[name for name, p in model.named_parameters()]."
            )
    return names


def _alike(names: Sequence[str], model: Document) -> Iterator[tuple[str, str]]:
    """Yields each two successive names among the parameters of one shape."""
    last = {}
    for name in names:
        shape = shape_of(model[name])
        if shape in last:
            yield last[shape], name
        last[shape] = name


def _counts_up(first: str, second: str) -> bool:
    """Returns whether the names differ only in numbers, and the second has the larger number."""
    if _NUMBER.sub("0", first) != _NUMBER.sub("0", second):
        return False
    return list(map(int, _NUMBER.findall(first))) < list(map(int, _NUMBER.findall(second)))


def doubts_of_entries(
    entries: Mapping[str, Entry], model: Document, are_named: bool
) -> Iterator[str]:
    """Yields warnings about the parameters: uncertain names, and dtypes that change.

    Args:
      entries: Parameter name -> entry, from `read_entries`.
      model: Torch state dict of the model.
      are_named: Whether the user or the optimizer names the parameters.
    """
    for first, second in _alike(list(entries), model):
        if entries[second].state and not are_named:
            yield (
                f"The optimizer does not name its parameters, so the order of the model is used. "
                f"If it was given them in another order, {printable(first)} and "
                f"{printable(second)}, of one shape, get each other's state: pass param_names=."
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


def doubts_of_schedulers(groups: Sequence[Document], scheduled: bool) -> Iterator[str]:
    """Yields warnings about torch schedulers, which stop in Flax.

    Args:
      groups: The optimizer's ``param_groups``.
      scheduled: Whether the user passed a learning rate.
    """
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
                f"max_momentum={highest}. No file holds this schedule: here `{kind}` stays at "
                f"{group.get(kind)}, as in the file. To continue the schedule, build the optimizer "
                f"with optax.inject_hyperparams and put the state into it."
            )
            break
    if not scheduled and any("initial_lr" in group for group in groups):
        rates = {f"{_number('lr', group['lr']):g}" for group in groups}
        yield (
            f"A learning rate scheduler ran in torch (`initial_lr` stands beside `lr`), and no "
            f"file holds its schedule: the rate stays at {', '.join(sorted(rates))}. Pass "
            f"learning_rate=, the same schedule in Optax."
        )


def doubts_of_one_rate(groups: Sequence[Document]) -> Iterator[str]:
    """Yields a warning if the user passed one rate for param groups with different rates."""
    rates = []
    for group in groups:
        if group["params"]:
            rates.append(_number("lr", group.get("initial_lr", group["lr"])))
    if len(set(rates)) > 1:
        shown = ", ".join(f"{rate:g}" for rate in rates)
        yield (
            f"The param groups had different rates in torch ({shown}), and `learning_rate` is one "
            "for all of them. For a rate of each group pass a list, learning_rate=[..., ...]."
        )


def _dtype_name(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")
