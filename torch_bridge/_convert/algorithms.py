"""The algorithms of torch's optimizers that Optax has, too: SGD, Adam and AdamW.

`Hyperparameters` reads them from a param group, and makes the Optax transformation with the same
updates. torch makes no update without a gradient, which two transformations here do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import shape_of, to_numpy
from torch_bridge._base.terminal import printable

Document: TypeAlias = Mapping[str, Any]  # a ``state_dict()``, of an optimizer or a model
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
        values: dict[str, Any] = {"betas": (as_number("betas", first), as_number("betas", second))}
        for name in ("lr", "weight_decay", "momentum", "eps"):
            values[name] = as_number(name, group.get(name, 0))
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


def as_number(name: str, value: Any) -> float:
    """Returns an entry of a param group as a number.

    Raises:
      CheckpointMismatch: It is not a number.
    """
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


# --- updates of torch -----------------------------------------------------------------------------


class UnusedState(NamedTuple):
    """State of `until_gradient`."""

    inner_state: Any  # the inner transformation's state, unchanged until `started`; replicated
    started: jax.Array  # bool scalar: True after the first nonzero gradient; replicated


def until_gradient(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes no updates until the first nonzero gradient, and applies `inner` from then on.

    torch skips a parameter whose ``grad`` is None. In JAX an unused leaf has a gradient of zeros,
    and `inner` alone would count steps and decay its weights.

    Args:
      inner: The transformation; its leaves start together, at the first nonzero gradient of one.
    """

    def init(params: Any) -> UnusedState:
        return UnusedState(inner.init(params), jnp.zeros((), bool))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, UnusedState]:
        nonzero = jnp.stack([jnp.any(leaf != 0) for leaf in jax.tree.leaves(updates)])
        started = state.started | jnp.any(nonzero)
        moved, after = inner.update(updates, state.inner_state, params)
        moved = jax.tree.map(lambda new: jnp.where(started, new, jnp.zeros_like(new)), moved)
        after = jax.tree.map(
            lambda new, old: jnp.where(started, new, old), after, state.inner_state
        )
        return moved, UnusedState(after, started)

    return optax.GradientTransformation(init, update)


def held(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes no updates and keeps the state, as torch keeps the state of a frozen parameter.

    Args:
      inner: The transformation whose ``init`` makes the state.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(inner.init, update)
