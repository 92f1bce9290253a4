"""Converts optimizers between ``torch.optim`` (SGD, Adam, AdamW) and Optax, with equal updates."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.tensors import tied, to_tensor
from torch_bridge._base.terminal import some, warn
from torch_bridge._convert.algorithms import (
    MOMENTS,
    Document,
    Hyperparameters,
    UnusedState,
    held,
    until_gradient,
)
from torch_bridge._convert.optimizer_groups import (
    Entry,
    ParamNames,
    doubts_of_entries,
    doubts_of_one_rate,
    doubts_of_schedulers,
    read_entries,
    recorded_names,
)
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._pairing.leaves import flatten_tree, leaves_by_path, with_values
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_of
from torch_bridge._pairing.pairs import Pair, leaves_from_torch, names_in, tensors_from_flax

Path: TypeAlias = tuple[str, ...]
Rates: TypeAlias = optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None
_FROZEN = "frozen"
HELD = "_held"
UNUSED = "_unused"
_PAUSES = {"": None, UNUSED: until_gradient, HELD: held}


class _Part(NamedTuple):
    """The properties of leaves that one Optax transformation updates."""

    group: int  # index of the param group
    step: int  # the updates that Adam has counted
    terms: int  # number of torch parameters whose sum is the leaf
    pause: str  # `HELD`: frozen, the state is kept; `UNUSED`: no gradient yet; "": updated
    hyper: Hyperparameters  # those of the param group

    @property
    def label(self) -> str:
        return f"group{self.group}_step{self.step}_terms{self.terms}{self.pause}"


def optimizer_from_torch(
    optimizer: Document,
    model: Model,
    params: Any,
    *,
    pairs: Pairs | None = None,
    param_names: ParamNames = None,
    learning_rate: Rates = None,
    step: int | None = None,
) -> tuple[optax.GradientTransformation, Any]:
    """Makes the Optax optimizer and its state, with the same next updates as torch's optimizer.

    With one param group the transformation and the structure of its state are those of `optax.sgd`,
    `optax.adam` or `optax.adamw`. For the L2 penalty of SGD and Adam, `optax.add_decayed_weights`
    comes first. So the state also fits such an optimizer that you build yourself. If there are
    several groups, or parameters with different numbers of steps, the transformation is an
    `optax.multi_transform`.

    Args:
      optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW`` ``.state_dict()``; tensors or arrays.
      model: Torch state dict of the model.
      params: The Flax parameters of the same model, as from `params_from_torch`.
      pairs: The pairs that `pair` returned, also for a tree that contains `params`; None if `pair`
        needs no options.
      param_names: Parameter names in the order in which the optimizer was given them, flat or one
        list for each group. Needed if there are several groups, or if the optimizer was given only
        some parameters. Not needed if it was made from ``named_parameters()``, which records them.
      learning_rate: A number or an Optax schedule for all groups, or one for each group. None means
        the numbers in the state dict. A torch scheduler is not in the state dict: pass the same
        schedule in Optax here.
      step: The number of updates so far, from which a schedule continues. None means Adam's count.
        SGD does not count, so a schedule needs `step` there.

    Returns:
      The transformation and its state. Leaves that the optimizer does not have are frozen. If only
      some parameters have a state, the others (never used so far) wait for their first gradient, as
      in torch. For an ``nnx.Optimizer`` with this transformation, set ``optimizer.opt_state =
      jax.tree.unflatten(jax.tree.structure(optimizer.opt_state), jax.tree.leaves(state))``.

    Raises:
      ValueError: optax has no equal of the optimizer (``amsgrad``, other algorithms), or names or
        `step` are needed.
      CheckpointMismatch: Optimizer, model and parameters do not belong together.

    Warns:
      UserWarning: In torch a scheduler drove the learning rate or the momentum. Or the optimizer
        does not name its parameters, and several have the same shape. Or moments have another dtype
        than their parameters, and are cast. Or `learning_rate` is one for groups whose rates
        differ in torch.

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
    pairs = pairs_of(model, params, pairs)
    plan = OptimizerPlan.of(optimizer, model, pairs, param_names, None, learning_rate)
    for doubt in plan.doubts:
        warn(doubt)
    tx = plan.transformation(params)
    return tx, plan.state(tx.init(params), plan.taken(step))


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """The plan for each leaf's updates, with the state that torch kept for it.

    Attributes:
      optimizer: The optimizer's ``state_dict()``.
      entries: Torch parameter -> its entry in the optimizer.
      pairs: The pairs of these parameters.
      parts: Path of a leaf -> the part that updates it; a frozen leaf without state has no part.
      rates: The user's learning rate of each param group; None means the rate in the file.
      counted: The number of updates that Adam has counted; None for SGD, which does not count.
      doubts: Warnings: torch schedulers that stop here, uncertain names, and other dtypes.
    """

    optimizer: Document
    entries: Mapping[str, Entry]
    pairs: Pairs
    parts: Mapping[Path, _Part]
    rates: Sequence[optax.ScalarOrSchedule | None]
    counted: int | None
    doubts: Sequence[str]

    @classmethod
    def of(
        cls,
        optimizer: Document,
        model: Document,
        pairs: Pairs,
        param_names: ParamNames,
        layout: BucketLayout | None,
        learning_rate: Rates,
    ) -> OptimizerPlan:
        """Makes the plan for the parameters of an optimizer.

        Args:
          optimizer: The optimizer's ``state_dict()``.
          model: Torch state dict of the model.
          pairs: The pairs of the trained parameters.
          param_names: The optimizer's names of its parameters, as for `optimizer_from_torch`.
          layout: The bucket layout. A parameter in no bucket gets no gradient, even if the
            optimizer has it. None, or a layout without buckets, leaves that open.
          learning_rate: The user's learning rates, as for `optimizer_from_torch`.

        Raises:
          ValueError: The number of rates is not the number of param groups.
          CheckpointMismatch: The torch parameters of one leaf are updated differently, or one
            parameter is several leaves.
        """
        entries = read_entries(optimizer, model, param_names, pairs, layout)
        _refuse_untied(pairs, model)
        known = entries
        if layout and layout.entries:
            known = layout.entries
        moving = names_in(pairs, known)
        begun = False
        counted = None
        for entry in entries.values():
            begun = begun or bool(entry.state)
            if entry.hyper.algorithm != "sgd":
                counted = max(entry.step, counted or 0)
        pairs = _of_optimizer(pairs, entries)
        parts = {}
        split = []
        for pair in pairs:
            frozen = pair.torch_name not in moving
            part = _part(pair, entries[pair.torch_name], begun, frozen)
            if parts.setdefault(pair.path, part) != part:
                split.append("/".join(pair.path))
        if split:
            raise CheckpointMismatch(
                "Some Flax leaves are made of several torch parameters that the optimizer treats "
                "differently: their param groups or their numbers of steps differ, or only some of "
                "them are frozen.",
                ambiguous=split,
            )
        parts = {path: part for path, part in parts.items() if part}
        groups = optimizer["param_groups"]
        rates = learning_rate
        if not isinstance(rates, Sequence):
            rates = [rates] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(
                f"The optimizer has {len(groups)} param groups, and `learning_rate` gives "
                f"{len(rates)} rates. Give one for all, or one for each group."
            )
        scheduled = rates.count(None) < len(rates)
        are_named = recorded_names(optimizer, param_names) is not None
        doubts = list(doubts_of_entries(entries, model, are_named))
        doubts += doubts_of_schedulers(groups, scheduled)
        if scheduled and rates is not learning_rate:
            doubts += doubts_of_one_rate(groups)
        return cls(optimizer, entries, pairs, parts, rates, counted, doubts)

    def with_names(self) -> dict[str, Any]:
        """Returns the optimizer's state dict with the names of the parameters in its groups."""
        groups = []
        for number, group in enumerate(self.optimizer["param_groups"]):
            names = [name for name, entry in self.entries.items() if entry.group == number]
            groups.append(dict(group, param_names=names))
        return dict(self.optimizer, param_groups=groups)

    @property
    def has_schedule(self) -> bool:
        """Returns whether a learning rate is a schedule, which needs a step to continue from."""
        return any(map(callable, self.rates))

    def taken(self, step: int | None, calls: int | None = None) -> int:
        """Returns the number of updates so far, from which a schedule continues.

        Args:
          step: The user's number. None means Adam's count or, with SGD, the hook's.
          calls: The number of calls of the hook; None if the file has no hook state.

        Raises:
          ValueError: A learning rate is a schedule, and nothing has counted the updates.
        """
        if step is not None:
            if not isinstance(step, int | np.integer) or step < 0:
                raise ValueError(f"`step` must be a number of updates, 0 or more, got {step!r}.")
            return step
        if self.has_schedule and self.counted is None and calls is None:
            raise ValueError(
                "`learning_rate` is a schedule, and nothing in the file counts the steps from "
                "which it continues: torch.optim.SGD does not. Pass `step`, the number of updates "
                "in torch (the scheduler's last_epoch, if it stepped after each update); 0 starts "
                "the schedule again."
            )
        return self.counted or calls or 0

    def transformation(self, params: Any) -> optax.GradientTransformation:
        """Makes the Optax transformation of a tree of parameters."""
        tree = flatten_tree(params)
        labels = dict.fromkeys(tree.leaves, _FROZEN)
        inner = {}
        for path, part in sorted(self.parts.items()):
            labels[path] = part.label
            rate = self.rates[part.group]
            inner[part.label] = part.hyper.transformation(rate, part.terms, _PAUSES[part.pause])
        if len(inner) == 1 and _FROZEN not in labels.values():
            return next(iter(inner.values()))
        inner[_FROZEN] = optax.set_to_zero()
        return optax.multi_transform(inner, tree.with_leaves(labels))

    def state(self, fresh: Any, taken: int) -> Any:
        """Fills a fresh state of the transformation with torch's moments and counts.

        Args:
          fresh: The state that ``init`` returned.
          taken: The number of updates so far, from which a schedule continues.
        """
        kept = {}
        for fields in MOMENTS.values():
            for key in fields.values():
                tensors = {}
                for name, entry in self.entries.items():
                    if key in entry.state:
                        tensors[name] = entry.state[key]
                pairs = [pair for pair in self.pairs if pair.torch_name in tensors]
                kept[key] = leaves_from_torch(pairs, tensors, mean=True)

        def filled(node: Any) -> Any:
            if isinstance(node, optax.ScaleByScheduleState):
                return node._replace(count=jnp.asarray(taken, jnp.int32))
            if isinstance(node, optax.ScaleByAdamState):
                count = 0
                for path in leaves_by_path(node.mu):
                    count = max(count, self.parts[path].step)
                node = node._replace(count=jnp.asarray(count, jnp.int32))
            for field, key in MOMENTS.get(type(node), {}).items():
                node = node._replace(**{field: with_values(getattr(node, field), kept[key])})
            return node

        known = (*MOMENTS, optax.ScaleByScheduleState)
        return jax.tree.map(filled, fresh, is_leaf=lambda node: isinstance(node, known))


def _refuse_untied(pairs: Pairs, model: Document) -> None:
    """Refuses a torch parameter that is several leaves in Flax, each with its own gradient.

    Raises:
      CheckpointMismatch: Such parameters exist; the error lists all.
    """
    first = tied(model)
    leaves = collections.defaultdict(set)
    for pair in pairs:
        if pair.rows is None:
            leaves[first.get(pair.torch_name, pair.torch_name)].add("/".join(pair.path))
    apart = []
    for name, paths in leaves.items():
        if len(paths) > 1:
            apart.append(f"{name}: {', '.join(sorted(paths))}")
    if apart:
        raise CheckpointMismatch(
            "One (tied) parameter in torch is several leaves in Flax. An optimizer would update "
            "each leaf separately, and they would no longer be equal. Tie them in Flax "
            "(nn.Embed.attend, one nnx.Param in both places). To train them separately with a new "
            "optimizer, convert dataclasses.replace(checkpoint, optimizer=None).",
            ambiguous=apart,
        )


def _of_optimizer(pairs: Pairs, entries: Mapping[str, Entry]) -> list[Pair]:
    """Returns the pairs whose torch parameter the optimizer has."""
    return [pair for pair in pairs if pair.torch_name in entries and not pair.is_buffer]


def _part(pair: Pair, entry: Entry, begun: bool, frozen: bool) -> _Part | None:
    """Returns the part of one torch parameter; None if it is frozen and has no state.

    Args:
      pair: The parameter and its leaf.
      entry: The parameter's entry in the optimizer.
      begun: Whether the optimizer has taken a step.
      frozen: Whether the parameter gets no gradient.

    Raises:
      CheckpointMismatch: Flax cannot make the parameter's updates.
    """
    hyper = entry.hyper
    pause = ""
    if frozen:
        if not entry.state:
            return None
        pause = HELD
    elif pair.must_be_zero:
        raise CheckpointMismatch(
            f"The optimizer moves {pair.torch_name}, which flax.nnx.GRUCell does not have. "
            "Use flax.linen.GRUCell."
        )
    elif begun and hyper.keeps and not entry.state:
        pause = UNUSED
    if pair.terms > 1 and hyper.algorithm == "adam" and hyper.weight_decay:
        raise CheckpointMismatch(
            f"{'/'.join(pair.path)} is the sum of {pair.terms} torch biases, whose L2 "
            "penalties Adam normalises one by one. Use AdamW, or no weight decay on biases."
        )
    return _Part(entry.group, entry.step, pair.terms, pause, hyper)


# --- to torch -----------------------------------------------------------------------------------


def optimizer_to_torch(
    state: Any,
    params: Any,
    like: Document,
    model: Model,
    *,
    pairs: Pairs | None = None,
    param_names: ParamNames = None,
    layout: BucketLayout | None = None,
) -> dict[str, Any]:
    """Makes a torch optimizer state dict with the momenta and counts of an Optax state.

    The chain must have one `optax.trace` or `optax.scale_by_adam` for each parameter, as in
    `optax.sgd`, `adam` and `adamw`. These may be inside `optax.multi_transform` or after a reducer.

    Args:
      state: The Optax state.
      params: The Flax parameters that the state belongs to, or a tree that contains them.
      like: ``state_dict()`` of the torch optimizer to fill, which may be fresh. The param groups
        and their hyperparameters come from it unchanged.
      model: Torch state dict of the model; only names and shapes are used.
      pairs: As for `optimizer_from_torch`.
      param_names: As for `optimizer_from_torch`.
      layout: The bucket layout, or None. It names the parameters of an optimizer without names, if
        both have the same number of parameters.

    Returns:
      A dict for ``torch.optim.Optimizer.load_state_dict``, with tensors.

    Raises:
      ValueError: As for `optimizer_from_torch`.
      CheckpointMismatch: The state has no moments for a parameter of the optimizer.

    Example:
      >>> params = {"fc": {"kernel": np.ones((2, 3), np.float32)}}
      >>> state = optax.sgd(0.1, momentum=0.9).init(params)
      >>> group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
      >>> like, model = {"state": {}, "param_groups": [group]}, {"fc.weight": np.ones((3, 2))}
      >>> optimizer_to_torch(state, params, like, model)["state"][0]["momentum_buffer"].shape
      torch.Size([3, 2])
    """
    model = named(model)
    pairs = pairs_of(model, params, pairs)
    entries = read_entries(like, model, param_names, pairs, layout)
    pairs = _of_optimizer(pairs, entries)
    moments = {}  # torch's name of a moment -> parameter name -> array
    for key, leaves in kept_moments(state).items():
        # A packed tensor is converted only if all its leaves have the moment.
        lacking = {pair.torch_name for pair in pairs if pair.path not in leaves}
        whole = [pair for pair in pairs if pair.torch_name not in lacking]
        if key == "step":
            steps = {pair.torch_name: np.array(leaves[pair.path], np.float32) for pair in whole}
            moments[key] = steps
        else:
            moments[key] = tensors_from_flax(whole, leaves, mean=True)
    filled = {}
    without = []
    for name, entry in entries.items():
        kept = {}
        for key in entry.hyper.keeps:
            if name in moments.get(key, ()):
                kept[key] = to_tensor(moments[key][name], copy=False)
        if len(kept) < len(entry.hyper.keeps):
            without.append(name)
        elif kept:
            filled[entry.key] = kept
    # Other parameters had no state in torch: they were frozen, or not used yet.
    missing = [name for name in without if entries[name].state or not filled]
    if missing:
        raise CheckpointMismatch(
            "The Optax state has no momentum (or Adam moments) for parameters of the torch "
            "optimizer. Is it the state of another optimizer?",
            missing=missing,
        )
    groups = []
    for group in like["param_groups"]:
        # A learning rate that is an array becomes a tensor, for torch.load(weights_only=True).
        groups.append(dict(group) | plain_copy(group)[0])
    return dict(like, state=filled, param_groups=groups)


def kept_moments(state: Any) -> Mapping[str, dict[Path, Any]]:
    """Returns the moments and counts in an Optax state, of every leaf that has had a gradient.

    Returns:
      torch's name of a moment (``exp_avg``, ``step``) -> path of a leaf -> value.

    Raises:
      CheckpointMismatch: The state has such a moment of a leaf twice.
    """
    kept = collections.defaultdict(dict)
    known = (*MOMENTS, UnusedState)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, known)):
        if isinstance(node, UnusedState) and jax.tree.leaves(node.started)[0]:
            for key, leaves in kept_moments(node.inner_state).items():
                kept[key] |= leaves
        for field, key in MOMENTS.get(type(node), {}).items():
            leaves = leaves_by_path(getattr(node, field))
            twice = sorted(map("/".join, kept[key].keys() & leaves.keys()))
            if twice:
                raise CheckpointMismatch(
                    f"The Optax state holds `{field}` of {some(twice)} twice, and torch's "
                    "optimizer has one. Pass the state of one optimizer."
                )
            kept[key] |= leaves
        if isinstance(node, optax.ScaleByAdamState):
            (count,) = jax.tree.leaves(node.count)  # nnx.Optimizer wraps it in a variable
            kept["step"] |= dict.fromkeys(leaves_by_path(node.mu), count)
    return kept
