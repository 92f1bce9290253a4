"""Optimizers between ``torch.optim`` (SGD, Adam, AdamW) and Optax, with equal next updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.tensors import to_tensor
from torch_bridge._convert.optimizer_groups import Entry, ParamNames, read_entries
from torch_bridge._convert.torch_updates import UnusedState, held, until_gradient
from torch_bridge._pairing.leaves import flatten, leaves_by_path, plain_path, without_collection
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import Pair, leaves_from_torch, tensors_from_flax

Path: TypeAlias = tuple[str, ...]
Rates: TypeAlias = optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None
_FROZEN = "frozen"
_PAUSES = {"": None, "unused": until_gradient, "held": held}
# Field of an Optax state -> what torch calls it: one table for both directions.
_MOMENTS: dict[type, dict[str, str]] = {
    optax.ScaleByAdamState: {"mu": "exp_avg", "nu": "exp_avg_sq"},
    optax.TraceState: {"trace": "momentum_buffer"},
}


class _Part(NamedTuple):
    """What leaves share that are updated alike.

    Those of a part may all be frozen with their state (``pause="held"``), or all without a gradient
    as yet (``pause="unused"``).
    """

    group: int
    step: int
    terms: int  # torch parameters whose sum a leaf is
    pause: str

    @property
    def label(self) -> str:
        return "group{}_step{}_terms{}{}".format(*self[:3], self.pause and f"_{self.pause}")


def optimizer_from_torch(
    optimizer: Mapping[str, Any],
    model: Model,
    params: Any,
    *,
    pairs: Pairs | None = None,
    param_names: ParamNames = None,
    learning_rate: Rates = None,
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
    pairs = pairs_for(model, params, pairs)
    entries = read_entries(optimizer, model, param_names, pairs)
    plan = OptimizerPlan.of(entries, pairs)
    tx = plan.transformation(params, learning_rate)
    return tx, plan.state(tx.init(params), plan.counted if step is None else step)


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """Which leaf is updated how, and what torch kept for it.

    Attributes:
      entries: Torch parameter -> what the optimizer has of it.
      pairs: Of these parameters.
      parts: Leaf -> the part that it is updated with; none for what is frozen and has no state.
    """

    entries: Mapping[str, Entry]
    pairs: Pairs
    parts: Mapping[Path, _Part]

    @classmethod
    def of(
        cls, entries: Mapping[str, Entry], pairs: Pairs, frozen: Collection[str] = ()
    ) -> OptimizerPlan:
        """The plan for the parameters of an optimizer.

        Args:
          entries: As `read_entries` gives them.
          pairs: Of the whole model.
          frozen: Torch parameters that get no gradient, whether the optimizer has them or not.

        Raises:
          CheckpointMismatch: Parameters that are one leaf are not updated alike.
        """
        parts: dict[Path, _Part | None] = {}
        split: list[str] = []
        begun = any(entry.state for entry in entries.values())
        pairs = [p for p in pairs if p.torch_name in entries and p.kind != "buffer"]
        for pair in pairs:
            part = _part(pair, entries[pair.torch_name], begun, pair.torch_name in frozen)
            if parts.setdefault(pair.path, part) != part:
                split.append("/".join(pair.path))
        if split:
            raise CheckpointMismatch(
                "Torch parameters that are one Flax leaf stand in different param groups, have "
                "taken different numbers of steps, or are frozen in part.",
                ambiguous=split,
            )
        return cls(entries, pairs, {path: part for path, part in parts.items() if part})

    @property
    def counted(self) -> int:
        """Updates that Adam has counted; 0 for SGD, which counts none."""
        return max((entry.step for entry in self.entries.values()), default=0)

    def paused(self, pause: str) -> list[str]:
        """The leaves that are ``held``, or ``unused``."""
        return ["/".join(path) for path, part in self.parts.items() if part.pause == pause]

    def transformation(self, params: Any, rates: Rates) -> optax.GradientTransformation:
        """The Optax transformation, with other learning rates if there are any."""
        hypers = {entry.group: entry.hyper for entry in self.entries.values()}
        groups = max(hypers, default=-1) + 1
        several = rates if isinstance(rates, Sequence) else [rates] * groups
        if len(several) != groups:
            raise ValueError(
                f"The optimizer has {groups} param groups, and `learning_rate` gives "
                f"{len(several)} rates. Give one for all, or one for each group."
            )
        inner = {
            part: hypers[part.group].transformation(
                several[part.group], part.terms, _PAUSES[part.pause]
            )
            for part in sorted(set(self.parts.values()))
        }
        tree = flatten(params)
        if len(inner) == 1 and len(self.parts) == len(tree.leaves):
            return next(iter(inner.values()))
        labels = {path: part.label for path, part in self.parts.items()}
        return optax.multi_transform(
            {**{part.label: one for part, one in inner.items()}, _FROZEN: optax.set_to_zero()},
            tree.with_leaves({path: labels.get(path, _FROZEN) for path in tree.leaves}),
        )

    def state(self, fresh: Any, taken: int) -> Any:
        """A fresh state of the transformation with what torch kept.

        Args:
          fresh: What ``init`` gave.
          taken: Updates so far, where a schedule goes on.
        """
        kept = {key: self._leaves(key) for fields in _MOMENTS.values() for key in fields.values()}

        def fill(node: Any) -> Any:
            if isinstance(node, optax.ScaleByScheduleState):
                return node._replace(count=jnp.asarray(taken, jnp.int32))
            if isinstance(node, optax.ScaleByAdamState):
                flat = jax.tree_util.tree_flatten_with_path(node.mu)[0]
                steps = {self.parts[plain_path(path)].step for path, _ in flat}
                node = node._replace(count=jnp.asarray(max(steps, default=0), jnp.int32))
            for field, key in _MOMENTS.get(type(node), {}).items():
                filled = jax.tree_util.tree_map_with_path(
                    lambda path, old, key=key: jnp.asarray(kept[key].get(plain_path(path), old)),
                    getattr(node, field),
                )
                node = node._replace(**{field: filled})
            return node

        known = (*_MOMENTS, optax.ScaleByScheduleState)
        return jax.tree.map(fill, fresh, is_leaf=lambda node: isinstance(node, known))

    def _leaves(self, key: str) -> dict[Path, Any]:
        """One kind of what torch kept; a momentum buffer of a sum is the sum of the buffers."""
        tensors = {name: entry.state.get(key) for name, entry in self.entries.items()}
        pairs = [pair for pair in self.pairs if tensors[pair.torch_name] is not None]
        return leaves_from_torch(pairs, tensors, mean=key != "momentum_buffer")


def _part(pair: Pair, entry: Entry, begun: bool, frozen: bool) -> _Part | None:
    """The part of one torch parameter; None if it is frozen and nothing is kept for it.

    Args:
      pair: Of the parameter.
      entry: What the optimizer has of it.
      begun: Whether the optimizer has taken a step.
      frozen: Whether the parameter gets no gradient.
    """
    hyper, pause = entry.hyper, ""
    if frozen:
        if not entry.state and (begun or not hyper.keeps_state):
            return None
        pause = "held"
    elif pair.must_be_zero:
        raise CheckpointMismatch(
            f"The optimizer moves {pair.torch_name}, which flax.nnx.GRUCell does not have. "
            "Use flax.linen.GRUCell."
        )
    elif begun and hyper.keeps_state and not entry.state:
        # Else gradients of zeros change nothing, and one part less is a simpler state.
        pause = "unused" if hyper.algorithm != "sgd" or hyper.weight_decay else ""
    if pair.terms > 1 and hyper.algorithm == "adam" and hyper.weight_decay:
        raise CheckpointMismatch(
            f"{'/'.join(pair.path)} is the sum of {pair.terms} torch biases, whose L2 "
            "penalties Adam normalises one by one. Use AdamW, or no weight decay on biases."
        )
    return _Part(entry.group, entry.step, pair.terms, pause)


# --- to torch -----------------------------------------------------------------------------------


def optimizer_to_torch(
    state: Any,
    params: Any,
    like: Mapping[str, Any],
    model: Model,
    *,
    pairs: Pairs | None = None,
    param_names: ParamNames = None,
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
    return fill_optimizer(state, like, model, pairs_for(model, params, pairs), param_names)


def fill_optimizer(
    state: Any,
    like: Mapping[str, Any],
    model: Mapping[str, Any],
    pairs: Pairs,
    param_names: ParamNames,
    bucketed: Collection[str] = (),
) -> dict[str, Any]:
    """`optimizer_to_torch` with the pairs of the whole model, and what DDP has in its buckets."""
    entries = read_entries(like, model, param_names, pairs, bucketed)
    by_name: dict[str, list[Pair]] = {name: [] for name in entries}
    for pair in pairs:
        if pair.torch_name in entries and pair.kind != "buffer":
            bare = dataclasses.replace(pair, path=without_collection(pair.path))
            by_name[pair.torch_name].append(bare)
    leaves: dict[Path, dict[str, Any]] = {}
    for path, kept in _kept(state):
        leaves[path] = leaves.get(path, {}) | kept
    filled: dict[int, dict[str, Any]] = {}
    missing: list[str] = []
    for name, entry in entries.items():
        kept = _of_parameter(by_name[name], entry, leaves)
        if kept is None and (entry.key in like["state"] or not like["state"]):
            missing.append(name)  # else it was frozen in torch, too
        elif kept:
            filled[entry.key] = kept
    if missing:
        raise CheckpointMismatch(
            "The Optax state has no momentum (or Adam moments) for parameters of the torch "
            "optimizer. Is it the state of another optimizer?",
            missing=missing,
        )
    # A learning rate may be an array; torch.load(weights_only=True) reads a tensor.
    groups = [{**group, **plain_copy(group)[0]} for group in like["param_groups"]]
    return {**like, "state": filled, "param_groups": groups}


def _kept(state: Any, started: bool = True) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What the momentum states of an Optax state hold: leaf path -> by torch's names."""
    known = (*_MOMENTS, UnusedState)
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, known)):
        if isinstance(node, UnusedState):
            yield from _kept(node.inner_state, bool(jax.tree.leaves(node.started)[0]))
            continue
        fields = _MOMENTS.get(type(node), {})
        trees = {key: leaves_by_path(getattr(node, field)) for field, key in fields.items()}
        of_all: dict[str, Any] = {"started": started}
        if isinstance(node, optax.ScaleByAdamState):
            (count,) = jax.tree.leaves(node.count)  # nnx.Optimizer puts it in a variable
            of_all["step"] = int(count)
        for path in next(iter(trees.values()), ()):
            yield path, of_all | {key: tree[path] for key, tree in trees.items()}


def _of_parameter(
    pairs: Pairs, entry: Entry, leaves: Mapping[Path, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The state of one torch parameter; None if it is lacking, {} if torch keeps none."""
    if not entry.hyper.keeps_state:
        return {}
    adam = entry.hyper.algorithm != "sgd"
    keys = _MOMENTS[optax.ScaleByAdamState if adam else optax.TraceState].values()
    own = [leaves.get(pair.path, {}) for pair in pairs]
    if not own or any(key not in leaf for leaf in own for key in keys):
        return None
    if not all(leaf["started"] for leaf in own):  # no gradient yet
        return {}
    found: dict[str, Any] = {}
    for key in keys:
        held_in = {pair.path: leaf[key] for pair, leaf in zip(pairs, own, strict=True)}
        array = tensors_from_flax(pairs, held_in, mean=True)[pairs[0].torch_name]
        if not adam and pairs[0].terms > 1:  # of a leaf that is a sum, its share: buffers add up
            array = array / np.asarray(pairs[0].terms, array.dtype)
        found[key] = to_tensor(array)
    if adam:
        step, *others = {leaf["step"] for leaf in own}
        if others:
            return None
        found["step"] = to_tensor(np.asarray(step, np.float32))
    return found
