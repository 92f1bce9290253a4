"""One training run of the language model, as an iterator over its steps.

`train.py` adds a command line, signals and checkpoints, on one host or on many. `demo.py` compares
several runs. `Run._step` has everything that your own training step needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import lm
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp

AXIS = "data"


class UsageError(ValueError):
    """Reports a wrong input in one sentence for the user."""


def option(default: Any, about: str) -> Any:
    """Makes a field of `RunConfig`, with its help text for the command line."""
    return field(default=default, metadata={"help": f"{about} (default: %(default)s)"})


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run. Two runs with equal configurations have the same curve."""

    strategy: str = option("powersgd", "how gradients are averaged")
    rank: int = option(32, "rank of the compressed gradients")
    start_step: int = option(0, "exact steps before compression")
    comm_dtype: str = field(
        default="float32",
        metadata={"help": "wire dtype of the factors (default: int6 with --strategy powersgd)"},
    )
    steps: int = option(1000, "length of the run, and of the learning rate's schedule")
    batch_size: int = option(32, "sequences in a step, over all replicas")
    layers: int = option(4, "transformer blocks")
    width: int = option(256, "features")
    heads: int = option(4, "attention heads")
    context: int = option(128, "bytes in a sequence")
    learning_rate: float = option(2e-3, "its highest value")
    seed: int = option(0, "seed of the parameters and the data")
    eval_every: int = option(100, "steps between evaluations")
    eval_sequences: int = option(512, "held-out sequences, rounded up to whole batches")

    def check(self) -> None:
        """Raises one `UsageError` that names every wrong value."""
        wrong = []
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("start_step", "seed"):
                if value < 0:
                    wrong.append(f"{flag(item.name)} must not be negative")
            elif not isinstance(value, str) and value <= 0:
                wrong.append(f"{flag(item.name)} must be positive")
        if not wrong and self.width % self.heads:
            wrong.append(f"--width {self.width} is not a multiple of --heads {self.heads}")
        if self.strategy != "powersgd" and self.comm_dtype != "float32":
            wrong.append(
                f"--comm-dtype {self.comm_dtype} is only for the factors of --strategy powersgd, "
                f"which {self.strategy} has not"
            )
        if wrong:
            raise UsageError("; ".join(wrong))


def flag(name: str) -> str:
    """Returns the name of a field on the command line."""
    return "--" + name.replace("_", "-")


COMM_DTYPES = ("float32", "bfloat16", "float16", "int8", "int6")

# (the run, a rank or a function of path and leaf that returns one) -> the reducer
STRATEGIES: dict[str, Callable[[RunConfig, Any], jaxcomp.types.Transformation]] = {
    "allreduce": lambda run, rank: jaxcomp.allreduce(axis_name=AXIS),
    "allreduce-bf16": lambda run, rank: jaxcomp.allreduce(axis_name=AXIS, comm_dtype="bfloat16"),
    "powersgd": lambda run, rank: jaxcomp.powersgd(
        rank, axis_name=AXIS, start_step=run.start_step, comm_dtype=run.comm_dtype
    ),
    "int8": lambda run, rank: jaxcomp.error_feedback(jaxcomp.quantized_allreduce(axis_name=AXIS)),
}


def adamw(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Makes AdamW with clipping, 10% linear warm-up and a cosine decay to 5%.

    Put it after the reducer: it then clips the averaged gradient, equal on all replicas.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(1, steps // 10),
        decay_steps=max(2, steps),
        end_value=0.05 * learning_rate,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


class State(NamedTuple):
    """Holds everything that a step changes; a checkpoint holds its consolidated form."""

    params: Any
    opt_state: Any
    reducer_state: Any


class Record(NamedTuple):
    """Reports one step."""

    step: int  # steps done
    loss: jax.Array  # mean over the whole batch; to read it waits for the devices
    held_out: float | None  # nats per byte; None if it was not evaluated
    bytes_step: float  # that each replica sent in this step
    bytes_sent: float  # the same, since step 0
    seconds: float  # since the run was started or resumed, evaluations and compilation included


class Run:
    """A run that is ready to start, or to continue.

    Attributes:
      config: The configuration.
      parameters: Number of model parameters.
      start: The number of steps before this run, up to its checkpoint.
      bytes_sent: The bytes that each replica sent, up to the last record.
      state: The state at the last record, on the devices.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, *, ranks: Any = None):
        """Builds the model and the optimizer.

        Args:
          config: The configuration of the run.
          mesh: One axis, `AXIS`, over the devices of all replicas in all processes.
          ranks: A function of path and leaf, which replaces the rank of the configuration.

        Raises:
          UsageError: The configuration cannot work here.
        """
        config.check()
        if config.batch_size % mesh.size:
            raise UsageError(
                f"--batch-size {config.batch_size} is not a multiple of the {mesh.size} devices"
            )
        try:
            self._corpus = lm.load_corpus()
        except ValueError as error:
            raise UsageError(str(error)) from error
        longest = min(len(self._corpus.train), len(self._corpus.held_out)) - 2
        if config.context > longest:
            raise UsageError(
                f"--context {config.context} is longer than the text ({longest} bytes)"
            )
        self.config = config
        self.start = 0
        self.bytes_sent = 0.0
        self._replicated = NamedSharding(mesh, P())
        self._rows = NamedSharding(mesh, P(AXIS))
        sizes = lm.ModelConfig(config.layers, config.width, config.heads, config.context)
        model = lm.Transformer(sizes)
        self._reducer = STRATEGIES[config.strategy](config, ranks or config.rank)
        self._optimizer = adamw(config.learning_rate, config.steps)
        loss = partial(lm.loss_fn, model)
        self._value_and_grad = jaxcomp.value_and_grad(loss, self._reducer, mesh=mesh)
        self._train = jax.jit(self._step, donate_argnums=0)
        self._evaluate = jax.jit(loss)
        self._consolidate = jax.jit(jaxcomp.consolidate, out_shardings=self._replicated)

        params = jax.device_get(lm.init_params(model, config.seed))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        fresh = State(params, self._optimizer.init(params), self._reducer.init(params))
        self.state = self._placed(jax.device_get(fresh))

    def _step(self, state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        """Trains on the global batch; each replica has a part of its rows."""
        (loss, grads), reducer_state = self._value_and_grad(
            state.reducer_state, state.params, batch
        )
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, reducer_state), loss

    def consolidated(self) -> State:
        """Returns the one state to save, in host memory; it restores onto any number of replicas.

        The run itself continues with this state, so that a restored run computes the same numbers,
        bit for bit. If it kept its own residuals, the two would differ by rounding, which training
        amplifies.
        """
        reducer_state = self._consolidate(self.state.reducer_state)
        saved = jax.device_get(self.state._replace(reducer_state=reducer_state))
        again = self._value_and_grad.restore(saved.reducer_state, self.state.params)
        self.state = self.state._replace(reducer_state=again)
        return saved

    def restore(self, start: int, state: State, bytes_sent: float) -> None:
        """Continues from the consolidated state after `start` steps, of any number of replicas."""
        self.start = start
        self.state = self._placed(state)
        self.bytes_sent = bytes_sent

    def _placed(self, state: State) -> State:
        # With several processes JAX compares their values, and refuses different ones.
        params, opt_state = jax.device_put(state[:2], self._replicated)
        return State(params, opt_state, self._value_and_grad.restore(state.reducer_state, params))

    def _split(self, batch: np.ndarray) -> jax.Array:
        """Puts the rows of the global batch on the replicas' devices; each process has all rows."""
        return jax.make_array_from_callback(batch.shape, self._rows, lambda index: batch[index])

    def held_out_loss(self) -> float:
        """Returns the mean loss over the held-out sequences, in nats per byte."""
        size = self.config.batch_size
        count = -(-self.config.eval_sequences // size)
        batches = lm.held_out_batches(
            self._corpus.held_out, count=count, size=size, context=self.config.context
        )
        losses = []
        for batch in batches:
            loss = self._evaluate(self.state.params, self._split(batch))
            # One batch at a time: many simultaneous programs would compete for a CPU's cores.
            losses.append(float(loss))
        return float(np.mean(losses))

    def carried(self) -> float | None:
        """Returns the share of the gradients' energy that the last step's factors carried.

        All processes must call it together. It is None if nothing is sent as factors.
        """
        if self.config.strategy != "powersgd":
            return None
        return float(jaxcomp.diagnostics(self.state.reducer_state).share)

    def steps(self, stop_at: int | None = None) -> Iterator[Record]:
        """Trains, and yields a record after each step; ends early after `stop_at` steps in all."""
        config = self.config
        began = time.monotonic()
        shape = {"size": config.batch_size, "context": config.context}
        replicas = self._rows.mesh.size
        loss = None
        last = min(config.steps, stop_at or config.steps)
        for index in range(self.start, last):
            batch = lm.training_batch(self._corpus.train, index, seed=config.seed, **shape)
            jax.block_until_ready(loss)  # the host prepares at most one step ahead
            self.state, loss = self._train(self.state, self._split(batch))
            done = index + 1
            held_out = None
            if done == last or done % config.eval_every == 0:
                held_out = self.held_out_loss()
            counted = self._reducer.bytes(self.state.params, replicas=replicas, step=index)
            self.bytes_sent += counted.bytes_after
            yield Record(
                done,
                loss,
                held_out,
                counted.bytes_after,
                self.bytes_sent,
                time.monotonic() - began,
            )
