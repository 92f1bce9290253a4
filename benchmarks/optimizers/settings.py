"""The settings of runs, and the studies that are run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import optax

import jaxcomp
from benchmarks.convergence.optimizers import optimizer
from benchmarks.convergence.runs import Compared, early_momentum
from benchmarks.convergence.training import AXIS, Config

Fields = dict[str, Any]  # of a setting


@dataclass(frozen=True)
class Setting(Compared):
    """The setting of a run.

    Attributes:
      optimizer: Of `benchmarks.convergence.optimizers`.
      rate: The highest learning rate.
      momentum: The decay of the first moment; None for Optax's default.
      rank: The rank of PowerSGD; 0 for an average of whole gradients.
      wire: The wire dtype of factors: "float32", "int8", "int6"; without a rank "int8" is the int8
        all-reduce with a residual.
      ratio: The ratio of bytes for ranks by spectrum; 0 for the same rank everywhere.
      min_compression_rate: That of PowerSGD. In six bits leaves shrink also below the default, 2.
      exact_steps: The number of exact steps, in float32, before the first compressed step.
      first_rank: A rank for these first steps, which then are not exact.
      only: A regular expression for the paths of the only leaves that are compressed; "" for all.
    """

    optimizer: str
    rate: float
    momentum: float | None = None
    rank: int = 0
    wire: str = "float32"
    ratio: float = 0.0
    min_compression_rate: float = 2.0
    exact_steps: int = 0
    first_rank: int = 0
    only: str = ""

    def behind(self, config: Config) -> optax.GradientTransformation:
        """Makes the optimizer."""
        return optimizer(self.optimizer, config.steps, self.rate, self.momentum)

    def reducer(self, config: Config) -> Any:
        """Makes the reducer."""
        if not (self.rank or self.ratio):
            if self.wire == "float32":
                return jaxcomp.allreduce(axis_name=AXIS)
            return jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS))
        options: Fields = {"comm_dtype": self.wire}
        options["min_compression_rate"] = self.min_compression_rate
        rank: Any = self.rank
        if self.ratio:
            first = Setting(self.optimizer, self.rate, self.momentum)
            if self.first_rank:
                first = self.before
            # Ranks after first steps come from those steps, others from a quarter of an exact run.
            steps = self.exact_steps or config.steps // 4
            momentum = early_momentum(config, first, steps)
            rank = jaxcomp.ranks_by_spectrum(momentum, ratio=self.ratio, **options)
        elif self.only:
            rank = self.rank_of
        start_step = self.exact_steps - self.steps_before
        return jaxcomp.powersgd(rank, axis_name=AXIS, start_step=start_step, **options)

    @property
    def kept(self) -> str:
        """Names what the factors keep, for the tails of exact runs: the rank, and the leaves."""
        return f"{self.rank} {self.only}".strip()

    def rank_of(self, path: jax.tree_util.KeyPath, leaf: Any) -> int | None:
        """Returns the rank of a leaf, or None for a leaf that is not among the `only` ones."""
        del leaf
        if re.search(self.only, jax.tree_util.keystr(path)):
            return self.rank
        return None

    @property
    def before(self) -> Setting:
        """Returns the setting of the first steps, if they have another rank."""
        return replace(self, rank=self.first_rank, ratio=0.0, first_rank=0, exact_steps=0)

    @property
    def steps_before(self) -> int:
        """Returns the number of the first steps, if they have another rank."""
        return self.exact_steps * bool(self.first_rank)

    @property
    def stored(self) -> Fields:
        """Returns the fields that a finished run stores."""
        return asdict(self)

    @property
    def program(self) -> Setting:
        """Returns the setting without its rate, which is in the optimizer's state."""
        if self.ratio:
            return self  # its ranks come from a run at that rate
        return replace(self, rate=0.0)

    @property
    def sent(self) -> str:
        """Describes what is sent, in a few words."""
        if self.rank:
            sent = f"rank {self.rank}"
        elif self.ratio:
            sent = f"ranks by spectrum {self.ratio:g}x"
        elif self.wire == "float32":
            return "exact"
        else:
            return "int8 all-reduce"
        if self.wire != "float32":
            sent += f", {self.wire}"
        if self.only:
            sent += f", only {self.only.replace('|', ' and ')}"
        if self.first_rank:
            sent += f" after {self.exact_steps} steps of rank {self.first_rank}"
        elif self.exact_steps:
            sent += f" after {self.exact_steps} exact steps"
        return sent

    @property
    def label(self) -> str:
        """Describes the setting, in a few words."""
        label = f"{self.optimizer}, rate {self.rate:g}"
        if self.momentum is not None:
            label += f", momentum {self.momentum:g}"
        return f"{label}: {self.sent}"


@dataclass(frozen=True)
class Study:
    """Runs behind one optimizer, with different compression and seeds.

    Attributes:
      optimizer: Of `benchmarks.convergence.optimizers`.
      name: A short name of what distinguishes the study.
      config: The common setting of its runs.
      rates: (rate, momentum) of exact runs, searched on seed 0; None is Optax's momentum. Muon's
        own rate is ten times that of the Adam beside it, which is what is given.
      sent: The compressed settings, as fields of `Setting`; most bytes first.
      seeds: The number of seeds.
    """

    optimizer: str
    name: str
    config: Config
    rates: Sequence[tuple[float, float | None]]
    sent: Sequence[Fields]
    seeds: int

    @property
    def by_kind(self) -> bool:
        """Returns whether single kinds of leaves are compressed."""
        return any(sent.get("only") for sent in self.sent)

    def exact(self, loss: Callable[[Setting, int], float]) -> Setting:
        """Returns the exact average at its best rate and momentum, by the final loss of seed 0."""
        searched = [Setting(self.optimizer, rate, momentum) for rate, momentum in self.rates]
        return min(searched, key=lambda setting: loss(setting, 0))

    def compressed(self, exact: Setting) -> list[Setting]:
        """Returns the compressed settings, with the rate and momentum of the best exact average."""
        return [replace(exact, **sent) for sent in self.sent]


def _int6(*ranks: int, **others: Any) -> tuple[Fields, ...]:
    return tuple({"rank": rank, "wire": "int6", **others} for rank in ranks)


def _with(momentum: float | None, *rates: float) -> tuple[tuple[float, float | None], ...]:
    return tuple((rate, momentum) for rate in rates)


# All leaves that six bits make smaller, as `jaxcomp.advise` has it.
_WHOLE = {"min_compression_rate": 1.0}
_INT8 = {"rank": 16, "wire": "int8"}
_ALL = (*_int6(32), _INT8, *_int6(21), {"ratio": 20.2, "wire": "int6"}, *_int6(11, 5))
_ADAMW_WIDE = (*_int6(48), {"ratio": 35.9, "wire": "int6"}, *_int6(32))
_MUON_WIDE = (*_int6(120, **_WHOLE), {"ratio": 16, "wire": "int6"}, *_int6(84, 43))
_RATES = _with(0.8, 2e-3, 1e-3, 4e-3)
# The final loss is that of 65,536 held-out bytes, and nothing is evaluated before.
_ONCE = Config(eval_every=480, eval_sequences=1024)
# As in `benchmarks.time_to_loss`: 12.9 million parameters.
_WIDE = Config(width=512, heads=8, layers=4, replicas=2)
WIDE_ONCE = replace(_WIDE, eval_every=480, eval_sequences=2048)
_64 = replace(_ONCE, width=64, heads=2)
_256 = replace(_ONCE, width=256, heads=8, batch_size=16)
_384 = replace(WIDE_ONCE, width=384, heads=6, layers=3, replicas=3)

_LONG = Config(steps=1920, eval_every=240)
_SHORT = Config(steps=240, eval_every=240, eval_sequences=1024)
_2048, _4096, _8192 = (replace(_ONCE, batch_size=size) for size in (8, 16, 32))
_HEADERS = replace(_ONCE, text="headers")
_MANY = replace(_ONCE, replicas=16, batch_size=1)
_WIDE_RATES = _with(None, 2.5e-4, 3.5e-4, 5e-4, 7e-4, 1e-3)

STUDIES = (
    Study("adamw", "", Config(), (*_with(None, 2e-3), *_with(0.7, 2e-3), *_RATES), _ALL, 8),
    Study("adamw", "width 64", _64, _with(0.8, 2e-3, 4e-3, 8e-3), _int6(11, 5), 8),
    Study("adamw", "240 steps", _SHORT, _with(0.8, 2e-3, 4e-3), _int6(21, 11), 8),
    Study("adamw", "1,920 steps", _LONG, _with(0.8, 2e-3), _int6(21), 2),
    Study("adamw", "2,048 tokens a step", _2048, _with(0.8, 2e-3, 4e-3), _int6(21, 11), 8),
    Study(
        "adamw", "4,096 tokens a step", _4096, _with(0.8, 2e-3, 4e-3, 8e-3), _int6(32, 21, 11), 8
    ),
    Study("adamw", "width 256, 4,096 tokens", _256, _with(0.8, 2e-3), _int6(64, 42, **_WHOLE), 2),
    Study("adamw", "width 512", WIDE_ONCE, _WIDE_RATES, _ADAMW_WIDE, 8),
    Study("muon", "", Config(), (*_with(None, 2e-3), *_with(0.9, 2e-3), *_RATES), _ALL, 8),
    Study("muon", "width 512", _WIDE, _RATES, _MUON_WIDE, 8),
)
# One kind of leaf is compressed at a time; and two ranks with factors in float32.
_KINDS = (
    *_int6(5, only="embedding|output"),
    *_int6(5, only="qkv"),
    *_int6(5, only="attention_out"),
    *_int6(5, only="mlp_in"),
    *_int6(5, only="mlp_out"),
)
_WIRES = (*_int6(5), {"rank": 5}, *_int6(11), {"rank": 11})
BY_KIND = Study("adamw", "width 64, kinds", _64, _with(0.8, 4e-3), (*_KINDS, *_WIRES), 8)
# Behind optimizers for which `jaxcomp.predict_gap` has no law; their states have a momentum.
_LOW = _int6(11, 5, 3)
OTHERS = (
    Study("sgd", "width 64", _64, _with(0.9, 0.03, 0.1, 0.3), _LOW, 4),
    Study("lion", "width 64", _64, _with(None, 4e-4, 8e-4, 1.6e-3), _LOW, 4),
    Study("adafactor", "width 64", _64, _with(0.9, 1e-2, 3e-2, 1e-1), _LOW, 4),
)
# The first steps at equal bytes of the whole run: a rank from the first step on, and the ranks that
# are left after 1, 3 and 10% of the steps in float32, in bfloat16 or through an int8 all-reduce. In
# bfloat16 and int8 exact steps lose nothing that could be seen, so that one run stands for all
# three. The last setting begins with a higher rank. Width 64 has the bytes of ranks 11 and 5; width
# 128 has those of ranks 21 and 11, and width 512 those of rank 48.
_FIRST_64 = (
    {"wire": "int8"},
    *_int6(11),
    *_int6(8, 9, 10, exact_steps=5),
    *_int6(4, 7, 9, exact_steps=14),
    *_int6(5, exact_steps=48),
    *_int6(5),
    *_int6(2, 3, 4, exact_steps=5),
    *_int6(3, exact_steps=14),
    *_int6(8, exact_steps=48, first_rank=21),
)
_FIRST_128 = (
    {"wire": "int8"},
    *_int6(21),
    *_int6(19, exact_steps=5),
    *_int6(19, exact_steps=14),
    {"ratio": 24.0, "wire": "int6", "exact_steps": 14},
    *_int6(11, exact_steps=48),
    *_int6(11),
    *_int6(9, exact_steps=5),
    *_int6(8, exact_steps=14),
    *_int6(10, exact_steps=48, first_rank=21),
)
_TWICE = {"eval_every": 240}
_FIRST_512 = (
    *_int6(48),
    *_int6(43, exact_steps=5),
    *_int6(35, exact_steps=14),
    {"ratio": 47.4, "wire": "int6", "exact_steps": 14},
    *_int6(5, exact_steps=48),
    *_int6(45, exact_steps=48, first_rank=72),
)
FIRST_STEPS = (
    Study("adamw", "width 64", replace(_64, **_TWICE), _with(0.8, 4e-3), _FIRST_64, 8),
    Study("adamw", "width 128", replace(_ONCE, **_TWICE), _with(0.8, 2e-3), _FIRST_128, 8),
    Study("adamw", "width 512", replace(WIDE_ONCE, **_TWICE), _with(None, 5e-4), _FIRST_512, 3),
)


def _later(
    name: str, config: Config, rate: float, momentum: float | None, rank: int, ratio: float
) -> Study:
    """Makes a study of ranks by spectrum after a quarter of the run with one rank."""
    begun = {"exact_steps": config.steps // 4, "first_rank": rank}
    by_spectrum = {"ratio": ratio, "wire": "int6", **begun}
    sent = (*_int6(rank), by_spectrum)
    return Study("adamw", name, config, _with(momentum, rate), sent, 8)


# A run's own first quarter, compressed with one rank, chooses a rank for each leaf.
LATER = (
    _later("width 128", _ONCE, 2e-3, 0.8, 21, 20.2),
    _later("width 512", replace(WIDE_ONCE, **_TWICE), 5e-4, None, 48, 60.0),
)


def _predicted(
    name: str,
    *ranks: int,
    rates: Sequence[float] = (4e-3,),
    momentum: float | None = 0.8,
    **changed: Any,
) -> Study:
    """Makes a study whose setting differs from that of width 64 in some fields."""
    config = replace(_64, **changed)
    return Study("adamw", name, config, _with(momentum, *rates), _int6(*ranks), 3)


# Of another kind, depth, context, text, width, length and batch than those that the law of the
# momentum's tail was fitted to: their gaps were predicted before they were run. The rates of the
# last two are the best of four on seed 0; twice that of the convolutions ended 0.2% lower.
_SMALL = (
    _predicted("6 blocks", 8, layers=6),
    _predicted("1 block, context 16", 8, layers=1, context=16, batch_size=16),
    _predicted("context 128", 8, context=128, batch_size=2),
    _predicted("C headers, width 64", 8, text="headers"),
    _predicted("width 96, 2 replicas", 8, width=96, replicas=2, rates=(3e-3,)),
    _predicted("960 steps", 8, steps=960, eval_every=960),
    _predicted("4,096 tokens, width 64", 12, batch_size=16),
    _predicted("Adam's usual momentum", 8, rates=(2e-3,), momentum=None),
    _predicted("convolutions", 8, 4, rates=(8e-3,), kind="convolutions", layers=3),
    _predicted("encoder", 8, 4, rates=(2e-3,), kind="encoder"),
)


def _larger(name: str, rate: float, **changed: Any) -> Study:
    """Makes a study of a model with more parameters than any that the law is fitted to."""
    config = replace(_WIDE, eval_every=120, eval_sequences=1024, **changed)
    return Study("adamw", name, config, _with(None, rate), _int6(24, 12), 3)


# With 29 and 25 million parameters. The gap of rank 24 was predicted from its tail, and that of
# rank 12 from rank 24 too.
_LARGER = (
    _larger("width 768", 3.5e-4, width=768, heads=12),
    _larger("width 512, 8 blocks", 5e-4, layers=8),
)
PREDICTED = (*_SMALL, *_LARGER)


def _from_one_rank(study: Study) -> Study:
    """Makes a study of half the rank and of three columns more, in the setting of `study`."""
    rank = study.sent[0]["rank"]
    config = replace(study.config, eval_every=study.config.steps // 8)
    others = _int6(rank, rank + 3, rank // 2)
    return replace(study, config=config, sent=others, seeds=3)


# The gaps of their other ranks were predicted from three quarters of the runs of the first one, but
# for rank 4 of the convolutions and the encoder, which had been run before.
FROM_ONE_RANK = (*(_from_one_rank(study) for study in _SMALL), *_LARGER)
UNSEEN = (
    Study("adamw", "C headers in place of Python", _HEADERS, _RATES, _int6(21), 8),
    Study("adamw", "width 384, 3 replicas", _384, _with(None, 5e-4, 7e-4, 1e-3), _int6(36), 8),
    Study("adamw", "16 replicas of one sequence", _MANY, _RATES, _int6(21), 8),
    Study("adamw", "8,192 tokens a step", _8192, _with(0.8, 2e-3, 4e-3, 6e-3, 8e-3), _int6(21), 5),
)
# For a GPU. At 6 operations for each parameter and token and 150 Tflop/s (30% of what an H200's
# data sheet has in TensorFloat-32) a run takes 8 and 4 seconds: with 30 seconds for each of eight
# programs, less than six minutes for all. None of this was measured.
_LARGE = Config(layers=4, eval_sequences=4096)
_512_LARGE = replace(_LARGE, width=512, heads=8, batch_size=128)
_1024_LARGE = replace(_LARGE, width=1024, heads=16, batch_size=16)
_LARGE_RANKS = _int6(128, 96, 64)
SCALE = (
    Study(
        "adamw",
        "width 512, 32,768 tokens",
        _512_LARGE,
        _with(None, 1e-3, 2e-3, 4e-3),
        _LARGE_RANKS,
        1,
    ),
    Study(
        "adamw",
        "width 1,024, 4,096 tokens",
        _1024_LARGE,
        _with(None, 2.5e-4, 5e-4, 1e-3),
        _LARGE_RANKS,
        1,
    ),
)


def small(study: Study) -> Study:
    """Returns a study of `SCALE` at a size for a CPU."""
    tiny = Config(steps=8, eval_every=1, batch_size=1, layers=1, width=32, heads=2, context=16)
    return replace(study, config=replace(tiny, eval_sequences=64), sent=_int6(2))
