"""What a run is made of, and which runs are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import optax

import jaxcomp
from benchmarks.convergence.optimizers import optimizer
from benchmarks.convergence.training import AXIS, Config, after_a_quarter


@dataclass(frozen=True)
class Setting:
    """A run.

    Attributes:
      optimizer: Of `benchmarks.convergence.optimizers`.
      rate: Its highest learning rate.
      momentum: Decay of its first moment; None for Optax's default.
      rank: Of PowerSGD; 0 for an average of whole gradients.
      wire: How factors travel: "float32", "int8" or "int6"; without a rank, "int8" is the int8
        all-reduce with a residual.
      ratio: Ranks by spectrum, for so many times fewer bytes; 0 for the same rank everywhere.
      min_compression_rate: Of PowerSGD. In six bits a leaf is smaller also below 2, its default.
      exact_steps: How many steps are exact, in float32, before the first compressed one.
    """

    optimizer: str
    rate: float
    momentum: float | None = None
    rank: int = 0
    wire: str = "float32"
    ratio: float = 0.0
    min_compression_rate: float = 2.0
    exact_steps: int = 0

    local = False  # parameters never differ between replicas

    @property
    def exact(self) -> bool:
        """Tells whether nothing is compressed."""
        return not (self.rank or self.ratio) and self.wire == "float32"

    def build(self, config: Config) -> optax.GradientTransformation:
        """Makes the transformation, from local gradients to updates."""
        behind = optimizer(self.optimizer, config.steps, self.rate, self.momentum)
        return optax.chain(self._reducer(config), behind)

    def _reducer(self, config: Config) -> Any:
        if self.exact:
            return jaxcomp.allreduce(axis_name=AXIS)
        if not (self.rank or self.ratio):
            return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
        return jaxcomp.powersgd(
            self.rank or _by_spectrum(self, config),
            axis_name=AXIS,
            start_step=self.exact_steps,
            comm_dtype=self.wire,
            min_compression_rate=self.min_compression_rate,
        )

    def bytes_sent(self, config: Config) -> int:
        """Returns what each replica sends in a whole run."""
        reducer = self._reducer(config)
        run = reducer.bytes(config.params(), replicas=config.replicas, steps=config.steps)
        return run.bytes_after

    @property
    def stored(self) -> dict[str, Any]:
        """Returns what a finished run says of it."""
        return asdict(self)

    @property
    def sent(self) -> str:
        """Says in a few words what is sent."""
        sent = "exact"
        if self.rank or self.ratio:
            sent = f"rank {self.rank}" if self.rank else f"ranks by spectrum {self.ratio:g}x"
            if self.wire != "float32":
                sent += f", {self.wire}"
        elif not self.exact:
            sent = "int8 all-reduce"
        if self.exact_steps:
            sent += f" after {self.exact_steps} exact steps"
        return sent

    @property
    def label(self) -> str:
        """Says in a few words what it is."""
        momentum = "" if self.momentum is None else f", momentum {self.momentum:g}"
        return f"{self.optimizer}, rate {self.rate:g}{momentum}: {self.sent}"


@functools.cache
def _by_spectrum(setting: Setting, config: Config) -> jaxcomp.Ranks:
    """Chooses ranks by the momentum after a quarter of an exact run."""
    exact = Setting(setting.optimizer, setting.rate, setting.momentum)
    _, state = after_a_quarter(config, exact.build(config))
    return jaxcomp.ranks_by_spectrum(
        first_momentum(state),
        ratio=setting.ratio,
        comm_dtype=setting.wire,
        min_compression_rate=setting.min_compression_rate,
    )


def first_momentum(state: Any) -> Any:
    """Returns that of all optimizers: Muon's has the leaves that the Adam beside it has not."""
    moments = optax.tree.get_all_with_path(state, "mu")
    moments = moments or optax.tree.get_all_with_path(state, "trace")
    parts = [moment for _, moment in moments]

    def is_masked(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def first(*leaves: Any) -> Any:
        return min(leaves, key=is_masked)  # that one optimizer has

    return jax.tree.map(first, *parts, is_leaf=is_masked)


@dataclass(frozen=True)
class Study:
    """Runs behind one optimizer that differ in what is sent and in their seed.

    Attributes:
      optimizer: Of `benchmarks.convergence.optimizers`.
      name: What sets it apart, in a few words.
      config: What its runs have in common.
      rates: (rate, momentum) of exact runs, searched on seed 0; None is Optax's momentum. Muon's
        own rate is ten times that of the Adam beside it, which is what is given.
      sent: What is compressed, as fields of `Setting`; most bytes first.
      seeds: How many.
    """

    optimizer: str
    name: str
    config: Config
    rates: Sequence[tuple[float, float | None]]
    sent: Sequence[Mapping[str, Any]]
    seeds: int

    def exact(self, loss: Callable[[Setting, int], float]) -> Setting:
        """Returns the exact average at its best rate and momentum, by the final loss of seed 0."""
        searched = [Setting(self.optimizer, rate, momentum) for rate, momentum in self.rates]
        return min(searched, key=lambda setting: loss(setting, 0))

    def compressed(self, exact: Setting) -> list[Setting]:
        """Returns what is compressed, with the rate and momentum of the best exact average."""
        return [replace(exact, **sent) for sent in self.sent]


def _int6(*ranks: int, **others: Any) -> tuple[Mapping[str, Any], ...]:
    return tuple({"rank": rank, "wire": "int6", **others} for rank in ranks)


def _whole(*ranks: int) -> tuple[Mapping[str, Any], ...]:
    """Lists ranks with all leaves that six bits make smaller, as `jaxcomp.advise` has it."""
    return _int6(*ranks, min_compression_rate=1.0)


def _with(momentum: float | None, *rates: float) -> tuple[tuple[float, float | None], ...]:
    return tuple((rate, momentum) for rate in rates)


def _spectrum(ratio: float) -> Mapping[str, Any]:
    return {"ratio": ratio, "wire": "int6"}


def _after(exact_steps: int, *ranks: int) -> tuple[Mapping[str, Any], ...]:
    """Lists ranks after exact first steps."""
    return _int6(*ranks, exact_steps=exact_steps)


_FEW, _MORE = _int6(21, 11), _int6(32, 21, 11)
_ALL = (*_int6(32), {"rank": 16, "wire": "int8"}, *_int6(21), _spectrum(20.2), *_int6(11, 5))
_RATES = _with(0.8, 2e-3, 1e-3, 4e-3)
# The final loss is that of 65,536 held-out bytes, and nothing is evaluated before.
_ONCE = Config(eval_every=480, eval_sequences=1024)
# As in `benchmarks.time_to_loss`: 12.9 million parameters.
_WIDE = Config(width=512, heads=8, layers=4, replicas=2)
_WIDE_ONCE = replace(_WIDE, eval_every=480, eval_sequences=2048)
_64 = replace(_ONCE, width=64, heads=2)
_256 = replace(_ONCE, width=256, heads=8, batch_size=16)
_384 = replace(_WIDE_ONCE, width=384, heads=6, layers=3, replicas=3)

_LONG = Config(steps=1920, eval_every=240)
_SHORT = Config(steps=240, eval_every=240, eval_sequences=1024)
_2048, _4096, _8192 = (replace(_ONCE, batch_size=size) for size in (8, 16, 32))
_HEADERS = replace(_ONCE, text="headers")
_MANY = replace(_ONCE, replicas=16, batch_size=1)
_WIDE_RATES = _with(None, 2.5e-4, 3.5e-4, 5e-4, 7e-4, 1e-3)

STUDIES = (
    Study("adamw", "", Config(), (*_with(None, 2e-3), *_with(0.7, 2e-3), *_RATES), _ALL, 3),
    Study("adamw", "width 64", _64, _with(0.8, 2e-3, 4e-3, 8e-3), _int6(11, 5), 4),
    Study("adamw", "240 steps", _SHORT, _with(0.8, 2e-3, 4e-3), _int6(21, 11), 4),
    Study("adamw", "1,920 steps", _LONG, _with(0.8, 2e-3), _int6(21), 2),
    Study("adamw", "2,048 tokens a step", _2048, _with(0.8, 2e-3, 4e-3), _int6(21, 11), 4),
    Study("adamw", "4,096 tokens a step", _4096, _with(0.8, 2e-3, 4e-3, 8e-3), _MORE, 8),
    Study("adamw", "width 256, 4,096 tokens", _256, _with(0.8, 2e-3), _whole(64, 42), 2),
    Study("adamw", "width 512", _WIDE_ONCE, _WIDE_RATES, _int6(48, 32), 8),
    Study("muon", "", Config(), (*_with(None, 2e-3), *_with(0.9, 2e-3), *_RATES), _ALL, 3),
    Study("muon", "width 512", _WIDE, _RATES, (*_whole(120), _spectrum(16), *_int6(84, 43)), 8),
    Study("sgd", "", Config(), _with(0.9, 0.03, 0.1, 0.3), _FEW, 1),
    Study("lion", "", Config(), _with(None, 4e-4, 8e-4, 1.6e-3), _FEW, 1),
    Study("adafactor", "", Config(), _with(None, 1e-2, 3e-2, 1e-1), _FEW, 1),
)
# The first steps at equal bytes of the whole run: the ranks that are left after 1, 3 and 10% of the
# steps in float32, in bfloat16 and through an int8 all-reduce, beside rank 11 and rank 5 from the
# first step on. In bfloat16 and int8 exact steps lose nothing that could be seen, so that one run
# stands for all three.
_FIRST = replace(_64, eval_every=240)
FIRST_STEPS = Study(
    "adamw",
    "width 64, first steps",
    _FIRST,
    _with(0.8, 4e-3),
    (
        {"wire": "int8"},
        *_int6(11),
        *_after(5, 8, 9, 10),
        *_after(14, 4, 7, 9),
        *_after(48, 5),
        *_int6(5),
        *_after(5, 2, 3, 4),
        *_after(14, 3),
    ),
    8,
)
# Of another depth, context, text, width, length and batch than those that the law of the momentum's
# tail was fitted to, each at one learning rate: their gaps were predicted before they were run.
_OTHER = replace(_64, eval_every=480)
_CHANGED: dict[str, dict[str, Any]] = {
    "6 blocks": {"layers": 6},
    "1 block, context 16": {"layers": 1, "context": 16, "batch_size": 16},
    "context 128": {"context": 128, "batch_size": 2},
    "C headers, width 64": {"text": "headers"},
    "width 96, 2 replicas": {"width": 96, "replicas": 2},
    "960 steps": {"steps": 960, "eval_every": 960},
    "4,096 tokens, width 64": {"batch_size": 16},
    "Adam's usual momentum": {},
}
# By name: what has not rank 8, and not the rate 4e-3 with a momentum of 0.8.
_RANK = {"4,096 tokens, width 64": 12}
_RATE = {"width 96, 2 replicas": (3e-3, 0.8), "Adam's usual momentum": (2e-3, None)}
PREDICTED = tuple(
    Study(
        "adamw",
        name,
        replace(_OTHER, **changed),
        (_RATE.get(name, (4e-3, 0.8)),),
        _int6(_RANK.get(name, 8)),
        3,
    )
    for name, changed in _CHANGED.items()
)
UNSEEN = (
    Study("adamw", "C headers in place of Python", _HEADERS, _RATES, _int6(21), 8),
    Study("adamw", "width 384, 3 replicas", _384, _with(None, 5e-4, 7e-4, 1e-3), _int6(36), 8),
    Study("adamw", "16 replicas of one sequence", _MANY, _RATES, _int6(21), 8),
    Study("adamw", "8,192 tokens a step", _8192, _with(0.8, 2e-3, 4e-3, 6e-3, 8e-3), _int6(21), 5),
)
