"""Data parallel training of a Flax `TrainState` whose optimizer begins with a jaxcomp reducer.

`train_step` below is what one replica does. The two classes map it over the devices, with
`jax.pmap` or with `jax.shard_map`; both offer the same four operations, so a training loop need not
know which one it has. Take the one you use and leave the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp

AXIS = "data"

LossFn = Callable[[Any, jax.Array], jax.Array]
Device = Any  # `jax.Device` is not a class to type checkers


def train_step(
    loss_fn: LossFn, state: TrainState, batch: jax.Array
) -> tuple[TrainState, jax.Array]:
    """One step of one replica.

    Args:
      loss_fn: (parameters, this replica's batch) -> scalar loss.
      state: `state.tx` begins with a reducer, so its update is the same on every replica.
      batch: This replica's share of the global batch.

    Returns:
      The new state and this replica's own loss, shape (1,). The loss is averaged on the host, when
      somebody looks at it, so that the reducer's all-reduces are the only ones in the program.
    """
    loss, grads = jaxcomp.local_value_and_grad(loss_fn, AXIS)(state.params, batch)
    return state.apply_gradients(grads=grads), loss[None]


def eval_step(loss_fn: LossFn, state: TrainState, batch: jax.Array) -> jax.Array:
    """This replica's loss on its share of a held-out batch, shape (1,)."""
    return loss_fn(state.params, batch)[None]


class DataParallel(Protocol):
    """What a training loop needs from either mapping."""

    def place(self, state: TrainState) -> TrainState:
        """Puts a consolidated state (a fresh one, or a checkpoint) on the devices."""
        ...

    def train(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, jax.Array]:
        """One step on a global batch. `state` is donated: only the returned one may be used."""
        ...

    def evaluate(self, state: TrainState, batch: np.ndarray) -> jax.Array:
        """The replicas' losses on a global batch, without an update."""
        ...

    def consolidated(self, state: TrainState) -> tuple[TrainState, TrainState]:
        """The one state to save, on the host, and the same on the devices, to go on with.

        It restores onto any number of replicas. A run that goes on with what it saved and one that
        is restored from it compute the same numbers, bit for bit; one that went on with its own
        residuals would differ by rounding, which training amplifies.
        """
        ...


class Pmap:
    """Data parallel with `jax.pmap`: every array has a leading axis of one entry per device."""

    def __init__(self, loss_fn: LossFn, devices: Sequence[Device]):
        self.devices = list(devices)
        pmap = partial(jax.pmap, axis_name=AXIS, devices=self.devices)
        self._train = pmap(partial(train_step, loss_fn), donate_argnums=0)
        self._eval = pmap(partial(eval_step, loss_fn))
        self._consolidate = pmap(partial(jaxcomp.consolidate, axis_name=AXIS))

    def place(self, state: TrainState) -> TrainState:
        """One copy of the state for each device."""
        # On the axis that pmap itself gives its results, or the second step is compiled anew.
        mesh = Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))
        copies = jax.tree.map(lambda x: np.stack([x] * len(self.devices)), state)
        return jax.device_put(copies, NamedSharding(mesh, P(AXIS)))

    def train(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, jax.Array]:
        """See `DataParallel.train`."""
        return self._train(state, self._split(batch))

    def evaluate(self, state: TrainState, batch: np.ndarray) -> jax.Array:
        """See `DataParallel.evaluate`."""
        return self._eval(state, self._split(batch))

    def consolidated(self, state: TrainState) -> tuple[TrainState, TrainState]:
        """Averages the residuals; after that all replicas hold the same and the first is taken."""
        state = self._consolidate(state)
        return jax.device_get(flax.jax_utils.unreplicate(state)), state

    def _split(self, batch: np.ndarray) -> np.ndarray:
        return batch.reshape(len(self.devices), -1, *batch.shape[1:])


class ShardMap:
    """Data parallel with `jax.shard_map` under `jax.jit`, replication checked by the type system.

    Parameters, optimizer state and PowerSGD's factors go in and come out as `P()`: with
    `check_vma=True` (the default) JAX proves at trace time that they stay equal on all replicas.
    Only the residual is different on each, and its specification says so.
    """

    def __init__(self, loss_fn: LossFn, devices: Sequence[Device]):
        self.mesh = jax.make_mesh(
            (len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=list(devices)
        )
        self._loss_fn = loss_fn

    def place(self, state: TrainState) -> TrainState:
        """Shards the state and maps the functions, for which its specifications are needed."""
        specs = jaxcomp.state_specs(state, AXIS)
        shard_map = partial(jax.shard_map, mesh=self.mesh, check_vma=True)
        step, evaluate = (partial(f, self._loss_fn) for f in (train_step, eval_step))
        self._train = jax.jit(
            shard_map(step, in_specs=(specs, P(AXIS)), out_specs=(specs, P(AXIS))), donate_argnums=0
        )
        self._eval = jax.jit(shard_map(evaluate, in_specs=(specs, P(AXIS)), out_specs=P(AXIS)))
        self._consolidate = jax.jit(
            shard_map(
                partial(jaxcomp.consolidate, axis_name=AXIS), in_specs=(specs,), out_specs=P()
            )
        )
        return jaxcomp.shard_state(state, self.mesh, AXIS)

    def train(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, jax.Array]:
        """See `DataParallel.train`."""
        return self._train(state, self._split(batch))

    def evaluate(self, state: TrainState, batch: np.ndarray) -> jax.Array:
        """See `DataParallel.evaluate`."""
        return self._eval(state, self._split(batch))

    def consolidated(self, state: TrainState) -> tuple[TrainState, TrainState]:
        """Averages the residuals, which leaves one state, the same everywhere."""
        saved = jax.device_get(self._consolidate(state))
        return saved, jaxcomp.shard_state(saved, self.mesh, AXIS)

    def _split(self, batch: np.ndarray) -> jax.Array:
        return jax.device_put(batch, NamedSharding(self.mesh, P(AXIS)))


MAPPINGS: dict[str, Callable[[LossFn, Sequence[Device]], DataParallel]] = {
    "pmap": Pmap,
    "shard_map": ShardMap,
}


def new_state(model: Any, params: Any, tx: Any) -> TrainState:
    """A `TrainState` at step 0. The step is an array from the start: an int would be retraced."""
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return state.replace(step=jnp.zeros((), jnp.int32))


def local_devices(count: int | None, default_cpus: int = 8) -> list[Device]:
    """The devices to train on. Call it before anything else touches JAX's devices.

    Args:
      count: How many; None takes all GPUs, or `default_cpus` CPU devices where there is no GPU.
      default_cpus: CPU devices to make when `count` is None.

    Returns:
      The first `count` devices.

    Raises:
      ValueError: Fewer devices exist.
    """
    # A CPU is split into as many devices as one asks for, but only before JAX looks at it; after
    # that (in a notebook, say) one takes what is there. Where GPUs are found it changes nothing.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count or default_cpus)
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        raise ValueError(f"{count} devices were asked for and {len(devices)} found")
    return devices[:count]
