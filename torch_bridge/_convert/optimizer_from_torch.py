"""Optimizer state from ``torch.optim`` (SGD, Adam, AdamW) to Optax, with equal next updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.terminal import printable
from torch_bridge._convert.optimizer_groups import Entry, ParamNames, read_entries
from torch_bridge._convert.torch_updates import DampenedTraceState, held, until_gradient
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._pairing.leaves import flatten, plain_path
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import Pair, leaves_from_torch, names_in, unpaired

Path: TypeAlias = tuple[str, ...]
Rates: TypeAlias = optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None
_FROZEN = "frozen"
_PAUSES = {"": None, "unused": until_gradient, "held": held}
_FILLED = (
    optax.ScaleByAdamState,
    optax.TraceState,
    DampenedTraceState,
    optax.ScaleByScheduleState,
)


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
    pairs = pairs_for(model, params, pairs)
    entries = read_entries(optimizer, model, param_names, algorithm, unpaired(model, pairs))
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
        begun = any(entry.has_state for entry in entries.values())
        pairs = [p for p in pairs if p.torch_name in entries and p.kind != "buffer"]
        for pair in pairs:
            entry = entries[pair.torch_name]
            pause = _pause(entry, begun, pair.torch_name in frozen)
            part = None if pause == _FROZEN else _part(pair, entry, pause)
            if parts.setdefault(pair.path, part) != part:
                split.append("/".join(pair.path))
        if split:
            raise CheckpointMismatch(
                "Torch parameters that are one Flax leaf stand in different param groups, have "
                "taken different numbers of steps, or are frozen in part.",
                ambiguous=split,
            )
        return cls(entries, pairs, {path: part for path, part in parts.items() if part})

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        pairs: Pairs,
        layout: BucketLayout | None,
        param_names: ParamNames,
        leftover: Collection[str],
    ) -> OptimizerPlan | None:
        """The plan of a whole run, if it has an optimizer; what is in no bucket is frozen."""
        if checkpoint.optimizer is None:
            return None
        names, frozen = (), set[str]()
        if layout is not None and layout.names:  # else written before compression began
            names, aliases = layout.entries, checkpoint.aliases
            frozen = {p.torch_name for p in pairs} - names_in(pairs, names, aliases).keys()
        model = checkpoint.model
        entries = read_entries(checkpoint.optimizer, model, param_names, None, leftover, names)
        return cls.of(entries, pairs, frozen)

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
        if isinstance(rates, Sequence) and len(rates) != groups:
            raise ValueError(
                f"The optimizer has {groups} param groups, and `learning_rate` gives "
                f"{len(rates)} rates. Give one for all, or one for each group."
            )

        def one(part: _Part) -> optax.GradientTransformation:
            hyper = hypers[part.group]
            rate = rates[part.group] if isinstance(rates, Sequence) else rates
            rate = hyper.lr if rate is None else rate
            return hyper.transformation(rate, part.terms, _PAUSES[part.pause])

        tree, used = flatten(params), sorted(set(self.parts.values()))
        if len(used) == 1 and len(self.parts) == len(tree.paths):
            return one(used[0])
        labels = {path: part.label for path, part in self.parts.items()}
        inner = {part.label: one(part) for part in used}
        return optax.multi_transform(
            {**inner, _FROZEN: optax.set_to_zero()},
            tree.with_leaves({path: labels.get(path, _FROZEN) for path in tree.paths}),
        )

    def state(self, fresh: Any, taken: int) -> Any:
        """A fresh state of the transformation with what torch kept.

        Args:
          fresh: What ``init`` gave.
          taken: Updates so far, where a schedule goes on.
        """
        kept = {key: self._leaves(key) for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")}

        def put(tree: Any, key: str) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, old: jnp.asarray(kept[key].get(plain_path(path), old)), tree
            )

        def fill(node: Any) -> Any:
            if isinstance(node, optax.ScaleByAdamState):
                paths = jax.tree_util.tree_flatten_with_path(node.mu)[0]
                steps = [self.parts[plain_path(path)].step for path, _ in paths[:1]]
                count = jnp.asarray(max(steps, default=0), jnp.int32)
                mu, nu = put(node.mu, "exp_avg"), put(node.nu, "exp_avg_sq")
                return node._replace(count=count, mu=mu, nu=nu)
            if isinstance(node, optax.TraceState):
                return node._replace(trace=put(node.trace, "momentum_buffer"))
            if isinstance(node, DampenedTraceState):
                started = jax.tree_util.tree_map_with_path(
                    lambda path, flag: jnp.full_like(
                        flag, plain_path(path) in kept["momentum_buffer"]
                    ),
                    node.started,
                )
                return DampenedTraceState(put(node.trace, "momentum_buffer"), started)
            if isinstance(node, optax.ScaleByScheduleState):
                return node._replace(count=jnp.asarray(taken, jnp.int32))
            return node

        return jax.tree.map(fill, fresh, is_leaf=lambda node: isinstance(node, _FILLED))

    def _leaves(self, key: str) -> dict[Path, Any]:
        """One kind of what torch kept; a momentum buffer of a sum is the sum of the buffers."""
        tensors = {
            name: entry.state[key]
            for name, entry in self.entries.items()
            if entry.state.get(key) is not None
        }
        pairs = [pair for pair in self.pairs if pair.torch_name in tensors]
        return leaves_from_torch(pairs, tensors, mean=key != "momentum_buffer")


def _pause(entry: Entry, begun: bool, frozen: bool) -> str:
    """Why torch does not move a parameter: frozen, held or unused; empty if it does."""
    hyper = entry.hyper
    if frozen:
        return "held" if entry.has_state or (hyper.keeps_state and not begun) else _FROZEN
    never = begun and hyper.keeps_state and not entry.has_state
    # Else gradients of zeros change nothing, and one part less is a simpler state.
    matters = hyper.algorithm != "sgd" or hyper.dampening or hyper.weight_decay
    return "unused" if never and matters else ""


def _part(pair: Pair, entry: Entry, pause: str) -> _Part:
    """The part of one torch parameter."""
    if pause != "held" and pair.must_be_zero:
        raise CheckpointMismatch(
            f"The optimizer moves {pair.torch_name}, which flax.nnx.GRUCell does not have. "
            "Use flax.linen.GRUCell."
        )
    if pair.terms > 1 and entry.hyper.algorithm == "adam" and entry.hyper.weight_decay:
        raise CheckpointMismatch(
            f"{'/'.join(pair.path)} is the sum of {pair.terms} torch biases, whose L2 "
            "penalties Adam normalises one by one. Use AdamW, or no weight decay on biases."
        )
    return _Part(entry.group, entry.step, pair.terms, pause)


def doubts(
    checkpoint: Checkpoint, layout: BucketLayout | None, plan: OptimizerPlan | None, rates: Rates
) -> Iterator[str]:
    """What the file does not tell, or tells in two ways, each a sentence with the way out."""
    if plan is None:  # without its optimizer a run would follow the plain gradient, and uphill
        if names := checkpoint.unread_optimizers:
            yield (
                "The checkpoint has no optimizer where one is looked for, so that the chain has "
                f"none; checkpoint.extra[{names[0]!r}] looks like one, or a list of them. Go on "
                "from dataclasses.replace(checkpoint, optimizer=...) with its state_dict."
            )
        return
    yield (
        "No file tells whether the torch loop clipped gradients. If it called clip_grad_norm_, "
        "put optax.clip_by_global_norm(max_norm) between run.reducer and run.optimizer."
    )
    counted = plan.counted
    hook = checkpoint.powersgd[0].iter if checkpoint.powersgd else counted
    each = rates if isinstance(rates, Sequence) else [rates]
    if counted not in (0, hook) and any(map(callable, each)):
        yield (
            f"Adam has counted {counted} steps and the hook {hook}, as with gradient accumulation, "
            f"skipped steps or a fresh hook state; the schedule goes on at {counted}. Pass step= "
            "to say where."
        )
    if held := plan.paused("held"):
        yield (
            f"{printable(', '.join(held))}: the optimizer has them and DDP's buckets do not, so "
            "that they get no gradient. They are frozen here too; their state is kept."
        )
    # An inferred layout is accepted only where every parameter is in a bucket.
    said = (layout and layout.names) or any(record.buckets for record in checkpoint.powersgd)
    if (unused := plan.paused("unused")) and not said:
        yield (
            f"{printable(', '.join(unused))}: never used, or frozen; the file does not say which, "
            "and the optimizer has no state for them. They are trained as soon as they get a "
            "gradient. To freeze them pass layout=BucketLayout.from_order([names], "
            "checkpoint.model), with the names of what is trained."
        )
