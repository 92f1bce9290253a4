"""`Checkpoint`: a PyTorch checkpoint as NumPy arrays, which `load` returns.

Every conversion starts from a `Checkpoint`. Each rank of a torch run has its own errors, and
jaxcomp needs only their mean. So the functions here check that all ranks are present, and compute
the mean. Under a GradScaler the errors are multiplied by the loss scale, so they divide by it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.plain import expression, nested
from torch_bridge._base.schema import KINDS, PowerSGDRecord, is_state
from torch_bridge._base.tensors import storage_key
from torch_bridge._hook.buckets import BucketLayout

_MISSING_RANKS = ("error", "zero", "replicate")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Holds a PyTorch checkpoint as NumPy arrays.

    Attributes:
      model: Parameter or buffer name -> array, in the order of the ``state_dict``, without
        ``module.`` prefixes; empty if the files hold only the hook state.
      powersgd: One record for each rank, in the order of the files; empty without hook state.
      optimizer: The optimizer's ``state_dict()``, or None.
      layout: The bucket layout, or None if the file has none.
      extra: All other entries of the (first) file, such as ``epoch``.
      world_size: The number of ranks of the run, or None if the file does not have it.
      hook: The name of the registered hook, such as ``"fp16_compress_wrapper(powerSGD_hook)"``, or
        None if the file does not have it. `powersgd_kwargs_from_torch` takes this name.
      example: The inputs of the torch module, as a tuple of arrays, and its outputs in evaluation
        mode, as arrays in dictionaries and tuples. None if the file has no example.
      calls: Parameter name -> the extremes of the array that torch first applied the parameter to
        when it ran the example: its four largest and four smallest values, or NaN if unknown. The
        names are in the order of use. Empty if the file has no such record.
      loss_scale: The scale of the training loop's ``GradScaler``. The hook's errors and factors are
        in units of the scaled loss. None if the file has no such entry; then the scale of the only
        scaler in `extra` is used or, without a scaler, 1.

    Example:
      >>> record = PowerSGDRecord(1, 20, {0: np.float32([2, 4])}, {}, {})
      >>> other = PowerSGDRecord(1, 20, {0: np.float32([4, 8])}, {}, {})
      >>> checkpoint = Checkpoint({}, (record, other), world_size=2)
      >>> checkpoint.record(1).error_dict[0], checkpoint.record(2).error_dict[0]
      (array([4., 8.], dtype=float32), array([3., 6.], dtype=float32))
    """

    model: dict[str, np.ndarray]
    powersgd: tuple[PowerSGDRecord, ...] = ()
    optimizer: dict[str, Any] | None = None
    layout: BucketLayout | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    world_size: int | None = None
    hook: str | None = None
    example: tuple[tuple[Any, ...], Any] | None = None
    loss_scale: float | None = None
    calls: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def recorded_example(self) -> tuple[Any, ...] | None:
        """Returns the inputs, the outputs and the calls, which `pair` takes as its example."""
        if self.example is None:
            return None
        return (*self.example, self.calls)

    @property
    def missing_ranks(self) -> bool:
        """Returns whether errors of some ranks are missing, or the world size is unknown."""
        return self.world_size is None or len(self.powersgd) < self.world_size

    def unread(self) -> dict[str, dict[str, Any]]:
        """Sorts what seem to be states in `extra` by their kinds.

        Returns:
          ``"optimizer"``, ``"PowerSGDState"``, ``"scheduler"``, ``"GradScaler"`` and other kinds ->
          Python expression of the entry -> state.

        Example:
          >>> Checkpoint({}, extra={"ema": {"param_groups": []}}).unread()["optimizer"]
          {"checkpoint.extra['ema']": {'param_groups': []}}
        """
        states = {kind: {} for kind in KINDS}
        for keys, value in nested(self.extra):
            for kind, entries in states.items():
                if is_state(value, kind):
                    entries[expression(keys)] = value
        return states

    def record(self, rank: int, world_size: int | None = None) -> PowerSGDRecord:
        """Returns the record from which one rank continues, in a job of any number of ranks.

        PowerSGD's outputs depend only on the mean of the ranks' errors. So a rank without a record
        in the file gets the mean. If the job has fewer ranks than the file, all ranks get it.

        Args:
          rank: The rank, from 0.
          world_size: The job's number of ranks; needed if the job has fewer ranks than the file.

        Raises:
          IndexError: The file holds no hook state.
        """
        known = len(self.powersgd)
        if rank < known and (world_size is None or world_size >= known):
            return self.powersgd[rank]
        mean = self.mean
        dtypes = self.powersgd[0].error_dict
        errors = jax.tree.map(lambda e, first: e.astype(first.dtype), mean.error_dict, dtypes)
        return dataclasses.replace(mean, error_dict=errors)

    @property
    def mean(self) -> PowerSGDRecord:
        """Returns the hook state with the mean error of the ranks in the file, float32."""
        first = self.powersgd[0]
        errors = jax.tree.map(_mean, *[record.error_dict for record in self.powersgd])
        return dataclasses.replace(first, error_dict=errors)


def mean_of_ranks(checkpoint: Checkpoint, missing_ranks: str) -> PowerSGDRecord:
    """Returns the hook state with the mean error of all ranks, in float32, without a loss scale.

    Args:
      checkpoint: A checkpoint with hook state.
      missing_ranks: What to do if ranks are missing, as for `powersgd_from_torch`.

    Raises:
      ValueError: `missing_ranks` is not ``"error"``, ``"zero"`` or ``"replicate"``.
      CheckpointMismatch: Ranks are missing and `missing_ranks` is ``"error"``. Or the file has
        several scalers with different scales.
    """
    missing = refuse_missing_ranks(checkpoint, missing_ranks)
    record = checkpoint.mean
    if missing and missing_ranks == "zero":
        record = dataclasses.replace(record, error_dict={})
    scale = loss_scale_of(checkpoint)
    if scale == 1:
        return record
    # torch's next step adds the errors to gradients of the current scale, so that scale counts.
    unit = np.float32(scale)
    errors, factors = jax.tree.map(
        lambda array: array.astype(np.float32) / unit, (record.error_dict, record.q_memory_dict)
    )
    return dataclasses.replace(record, error_dict=errors, q_memory_dict=factors)


def refuse_missing_ranks(checkpoint: Checkpoint, missing_ranks: str) -> bool:
    """Returns whether errors of some ranks are missing, and refuses them unless the user chose.

    Args:
      checkpoint: A checkpoint with hook state.
      missing_ranks: As for `powersgd_from_torch`.

    Raises:
      ValueError: `missing_ranks` is not ``"error"``, ``"zero"`` or ``"replicate"``.
      CheckpointMismatch: Ranks are missing and `missing_ranks` is ``"error"``.
    """
    if missing_ranks not in _MISSING_RANKS:
        raise ValueError(f"`missing_ranks` must be one of {_MISSING_RANKS}, got {missing_ranks!r}.")
    missing = checkpoint.missing_ranks and bool(checkpoint.powersgd[0].error_dict)
    if missing and missing_ranks == "error":
        size = f" of {checkpoint.world_size}" if checkpoint.world_size else ""
        raise CheckpointMismatch(
            f"The file has the errors (error_dict) of {len(checkpoint.powersgd)} rank(s){size} "
            "only, but the conversion needs the mean over all ranks. Load one file per rank, or "
            "save with "
            f'torch_bridge.save_checkpoint. Otherwise choose: missing_ranks="zero" drops the '
            f'gradients that were not sent yet, missing_ranks="replicate" uses the mean of these '
            f"ranks, whose deviation from the true mean enters the weights once, as a spurious "
            f"gradient.",
            parameters=("missing_ranks",),
        )
    return missing


def loss_scale_of(checkpoint: Checkpoint) -> float:
    """Returns the loss scale, by which the hook's errors and factors are multiplied.

    The scale is `Checkpoint.loss_scale`, or that of a GradScaler's state anywhere in `extra`, or 1.

    Raises:
      CheckpointMismatch: The file has several scalers with different scales.
    """
    if checkpoint.loss_scale is not None:
        return checkpoint.loss_scale
    scales = {}
    for place, scaler in checkpoint.unread()["GradScaler"].items():
        scale = scaler.get("scale", scaler.get("loss_scale"))
        if isinstance(scale, np.ndarray) and scale.size == 1:
            scale = scale.item()
        if isinstance(scale, int | float) and 0 < scale < math.inf:
            scales[place] = float(scale)
    if len(set(scales.values())) > 1:
        raise CheckpointMismatch(
            "The file has several GradScalers, and does not say which one the hook ran under. "
            "Convert dataclasses.replace(checkpoint, loss_scale=...).",
            ambiguous=[f"{name}: {scale:g}" for name, scale in scales.items()],
        )
    return next(iter(scales.values()), 1.0)


def _mean(*errors: np.ndarray) -> np.ndarray:
    """Returns the mean of the ranks' errors in one bucket, flat, float32."""
    # `to_torch` writes one buffer for all ranks; a shared buffer is added only once.
    counts = collections.Counter(map(storage_key, errors))
    if len(counts) == 1:  # the result is only read, so it needs no copy
        return errors[0].astype(np.float32, copy=False)
    mean = np.zeros(errors[0].shape, np.float32)
    for error in errors:
        mean += error.astype(np.float32, copy=False) * counts.pop(storage_key(error), 0)
    mean /= len(errors)
    return mean
