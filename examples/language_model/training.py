"""One training run of the language model, as an iterator over its steps.

`train.py` gives it a command line and `demo.py` runs several beside each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import CheckpointError, Checkpoints, WriteError
from data_parallel import MAPPINGS, Device, new_state
from flax.training.train_state import TrainState
from lm import (
    Corpus,
    ModelConfig,
    Transformer,
    held_out_batches,
    init_params,
    load_corpus,
    loss_fn,
    training_batch,
)
from strategies import COMM_DTYPES, STRATEGIES, Options, adamw

import jaxcomp


class UsageError(ValueError):
    """An input that cannot work; the message is one sentence for the user."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run. Two runs with equal configurations have the same curve.

    Attributes:
      strategy: A key of `strategies.STRATEGIES`.
      rank: Rank of the compressed gradients.
      start_step: Steps before compression begins.
      comm_dtype: How the factors of compressed gradients travel; a key of `COMM_DTYPES`.
      mapping: "pmap" or "shard_map".
      steps: Length of the run; the learning rate's schedule depends on it.
      batch_size: Sequences in a step, over all replicas.
      layers: Transformer blocks.
      width: Features of the model.
      heads: Attention heads.
      context: Bytes in a sequence.
      bf16: Compute activations in bfloat16.
      learning_rate: The highest learning rate.
      seed: Of the parameters and of the data.
      eval_every: Steps between two evaluations; the last step is always evaluated.
      eval_sequences: Held-out sequences in an evaluation, rounded up to whole batches.
    """

    strategy: str = "powersgd"
    rank: int = 4
    start_step: int = 100
    comm_dtype: str = "float32"
    mapping: str = "pmap"
    steps: int = 1000
    batch_size: int = 32
    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    bf16: bool = False
    learning_rate: float = 2e-3
    seed: int = 0
    eval_every: int = 100
    eval_sequences: int = 512

    def check(self) -> None:
        """Raises a `UsageError` that names everything wrong with the values."""
        positive = ("rank", "steps", "batch_size", "layers", "width", "heads", "context")
        positive += ("learning_rate", "eval_every", "eval_sequences")
        wrong = [f"{_flag(name)} must be positive" for name in positive if getattr(self, name) <= 0]
        wrong += [f"{_flag(name)} must not be negative" for name in ("start_step", "seed")
                  if getattr(self, name) < 0]  # fmt: skip
        if not wrong and self.width % self.heads:
            wrong.append(f"--width {self.width} is not a multiple of --heads {self.heads}")
        choices = {"strategy": STRATEGIES, "mapping": MAPPINGS, "comm_dtype": COMM_DTYPES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                wrong.append(f"{_flag(name)} must be one of {', '.join(known)}")
        if wrong:
            raise UsageError("; ".join(wrong))


@dataclass(frozen=True)
class Record:
    """What is known after a step.

    Attributes:
      step: Steps done.
      losses: The replicas' training losses of this step, still on the devices.
      held_out: Held-out loss in nats per byte, where it was evaluated.
      bytes_step: Bytes that each replica handed to the network in this step.
      bytes_sent: The same, since step 0.
      seconds: Since the run was started or resumed, evaluations and compilation included.
    """

    step: int
    losses: jax.Array
    held_out: float | None
    bytes_step: float
    bytes_sent: float
    seconds: float

    @property
    def loss(self) -> float:
        """Training loss of the whole batch. Reading it waits for the devices."""
        return float(np.mean(jax.device_get(self.losses)))


# What may not change between a checkpoint and the run that resumes from it. Other differences (a
# longer schedule, another rank) are allowed, and reported.
FIXED = ("layers", "width", "heads", "context")
# What may change without a word: it does not change the curve by more than rounding. The number of
# devices is not even part of the configuration.
FREE = ("mapping", "eval_every", "eval_sequences")


class Run:
    """A run that is ready to start, or to continue.

    Attributes:
      config: As given.
      parameters: Number of model parameters.
      start: Steps that were done before, by the run that wrote the checkpoint.
      notes: Sentences that the user should see.
    """

    def __init__(
        self,
        config: RunConfig,
        devices: Sequence[Device],
        checkpoints: Checkpoints | None = None,
        *,
        ranks: Any = None,
    ):
        """Builds the model and the optimizer, and restores the last checkpoint if there is one.

        Args:
          config: The run.
          devices: The replicas' devices, for example from `data_parallel.local_devices`.
          checkpoints: Where to save and to resume from.
          ranks: A function of path and leaf, instead of the one rank of the configuration.

        Raises:
          UsageError: The configuration cannot work here, or does not fit the checkpoint.
        """
        config.check()
        if config.batch_size % len(devices):
            raise UsageError(
                f"--batch-size {config.batch_size} is not a multiple of the {len(devices)} devices"
            )
        self.config, self.checkpoints = config, checkpoints
        self.notes: list[str] = []
        self.corpus = _corpus(config)
        dtype = jnp.bfloat16 if config.bf16 else jnp.float32
        model = Transformer(
            ModelConfig(config.layers, config.width, config.heads, config.context, dtype)
        )
        self._mapped = MAPPINGS[config.mapping](partial(loss_fn, model), devices)

        params = init_params(model, config.seed)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        rank = ranks or config.rank
        self._options = Options(rank, config.start_step, config.comm_dtype)
        self._bytes_at = STRATEGIES[config.strategy].bytes_at(self._options, params, len(devices))
        self._bytes_sent, self._strategy_since = 0.0, 0
        state = new_state(model, params, self._transformation(config.strategy, rank))
        self.start = 0
        if checkpoints:
            found = checkpoints.restored(lambda step: self._resumed(checkpoints, step, state))
            self.notes += checkpoints.passed_over
            state = found or state
        self._state = self._mapped.place(state)

    def _transformation(self, strategy: str, rank: Any) -> optax.GradientTransformation:
        options = replace(self._options, rank=rank)
        optimizer = adamw(self.config.learning_rate, self.config.steps)
        return STRATEGIES[strategy].transformation(options, optimizer, "data")

    def _resumed(self, checkpoints: Checkpoints, step: int, fresh: TrainState) -> TrainState:
        """A checkpoint's state; what its run has counted goes on here."""
        saved = checkpoints.metadata(step)
        self.start = step
        self._compare(saved)
        self._bytes_sent = saved["bytes_sent"]
        # A strategy that is new starts afresh: its `start_step` counts from here.
        same = saved["strategy"] == self.config.strategy
        self._strategy_since = saved["strategy_since"] if same else self.start
        return self._restored(checkpoints, fresh, saved)

    def _restored(
        self, checkpoints: Checkpoints, fresh: TrainState, saved: dict[str, Any]
    ) -> TrainState:
        """The state; written with another strategy or rank, it is adapted to this one."""
        written = saved["strategy"], saved["rank"]
        if written == (self.config.strategy, self.config.rank):
            return checkpoints.restore(self.start, fresh, saved)
        opt_state = self._transformation(*written).init(fresh.params)
        state = checkpoints.restore(self.start, fresh.replace(opt_state=opt_state), saved)
        try:
            adapted = jaxcomp.adapt_state(state.opt_state, fresh.params, fresh.tx)
        except ValueError as error:
            raise UsageError(
                f"cannot resume: the checkpoint is of a run with --strategy {written[0]}, whose "
                f"optimizer state --strategy {self.config.strategy} cannot take over"
            ) from error
        return state.replace(opt_state=adapted)

    def _compare(self, saved: dict[str, Any]) -> None:
        mine = asdict(self.config)
        if missing := {*mine, "bytes_sent", "strategy_since"} - saved.keys():
            raise UsageError(
                "cannot resume: the checkpoint was written by another program or another version "
                f"of this one, which did not store {', '.join(sorted(missing))}"
            )
        changed = {k: saved[k] for k in mine if mine[k] != saved[k] and k not in FREE}
        refused = [f"{_flag(k)} {changed[k]}, not {mine[k]}" for k in FIXED if k in changed]
        if refused:
            raise UsageError(f"cannot resume: the checkpoint is of a run with {'; '.join(refused)}")
        if self.start > self.config.steps:
            raise UsageError(f"cannot resume: {self.start} steps are done, of {self.config.steps}")
        self.notes = [f"{_flag(k)} was {v} before the checkpoint" for k, v in changed.items()]

    def momentum(self) -> Any:
        """Adam's first moment, of whose spectrum `jaxcomp.ranks_by_spectrum` makes ranks."""
        one, self._state = self._mapped.consolidated(self._state)
        return optax.tree.get(one.opt_state, "mu")

    def held_out_loss(self) -> float:
        """Mean loss over the held-out sequences, in nats per byte."""
        size, context = self.config.batch_size, self.config.context
        batches = held_out_batches(
            self.corpus.held_out,
            count=-(-self.config.eval_sequences // size),
            size=size,
            context=context,
        )
        # One batch at a time: many programs in flight only fight for the cores of a CPU.
        return float(
            np.mean([jax.device_get(self._mapped.evaluate(self._state, b)) for b in batches])
        )

    def steps(
        self, stop_at: int | None = None, asked_to_stop: Callable[[int], bool] = lambda done: False
    ) -> Iterator[Record]:
        """Trains, one record per step.

        Args:
          stop_at: Stop early, after so many steps in all, as if interrupted there.
          asked_to_stop: Called after each step with the number of steps done; if it returns True,
            the state is saved and the run ends.

        Yields:
          A record after each step.
        """
        config, began, losses = self.config, time.monotonic(), None
        last = min(config.steps, stop_at or config.steps)
        bytes_sent = self._bytes_sent
        for index in range(self.start, last):
            batch = training_batch(
                self.corpus.train,
                index,
                seed=config.seed,
                size=config.batch_size,
                context=config.context,
            )
            jax.block_until_ready(losses)  # the host prepares one step ahead, and no more
            self._state, losses = self._mapped.train(self._state, batch)
            done, ended = index + 1, index + 1 == last
            held_out = self.held_out_loss() if ended or done % config.eval_every == 0 else None
            bytes_sent += (bytes_step := self._bytes_at(index - self._strategy_since))
            stopped = asked_to_stop(done)
            if self.checkpoints and (ended or stopped or self.checkpoints.due(done)):
                saved, self._state = self._mapped.consolidated(self._state)
                counted = {"bytes_sent": bytes_sent, "strategy_since": self._strategy_since}
                self.checkpoints.save(done, saved, asdict(config) | counted)
            seconds = time.monotonic() - began
            yield Record(done, losses, held_out, bytes_step, bytes_sent, seconds)
            if stopped:
                return


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _corpus(config: RunConfig) -> Corpus:
    try:
        corpus = load_corpus()
    except ValueError as error:
        raise UsageError(str(error)) from error
    longest = min(len(corpus.train), len(corpus.held_out)) - 2
    if config.context > longest:
        raise UsageError(f"--context {config.context} is longer than the text ({longest} bytes)")
    return corpus


__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Record",
    "Run",
    "RunConfig",
    "UsageError",
    "WriteError",
]
