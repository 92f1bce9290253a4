"""Reads a torch optimizer's state dict: the name, group and state of each parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from torch_bridge._base.errors import CheckpointMismatch, Problems
from torch_bridge._base.schema import is_optimizer
from torch_bridge._base.tensors import names_in_model, shape_of, trainable
from torch_bridge._base.terminal import printable, some
from torch_bridge._convert.algorithms import Document, Hyperparameters, as_number
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._pairing.pairs import Pair, unpaired

ParamNames: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | None
_NUMBER = re.compile(r"\d+")
_MAX_STEPS = 2**31  # optax counts in int32


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
                step = as_number("step", state.get("step", 0))
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
        rates = {f"{as_number('lr', group['lr']):g}" for group in groups}
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
            rates.append(as_number("lr", group.get("initial_lr", group["lr"])))
    if len(set(rates)) > 1:
        shown = ", ".join(f"{rate:g}" for rate in rates)
        yield (
            f"The param groups had different rates in torch ({shown}), and `learning_rate` is one "
            "for all of them. For a rate of each group pass a list, learning_rate=[..., ...]."
        )


def _dtype_name(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")
