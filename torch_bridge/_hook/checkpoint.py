"""A PyTorch checkpoint in NumPy: what `load` returns."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._base.tensors import storage_key
from torch_bridge._hook.buckets import BucketLayout


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `load` read, as NumPy arrays.

    Attributes:
      model: Parameter or buffer name -> array, in the order of the ``state_dict``, without
        ``module.`` prefixes; empty if the files hold the hook state only.
      powersgd: One record per rank, in the order of the files; empty without hook state.
      optimizer: The optimizer's ``state_dict()``, or None.
      layout: The bucket layout, if the file holds one.
      extra: Every other entry of the (first) file, such as ``epoch``.
      world_size: Number of ranks of the run, if the file says it.
      hook: The registered hook, if the file says it: a name as `powersgd_kwargs_from_torch` takes
        it, ``"fp16_compress_wrapper(powerSGD_hook)"`` for example.

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

    @property
    def missing_ranks(self) -> bool:
        """Whether ranks' errors are known to be missing, or nothing says that none is."""
        return self.world_size is None or len(self.powersgd) < self.world_size

    @property
    def unread_optimizers(self) -> tuple[str, ...]:
        """Entries of `extra` that look like an optimizer's ``state_dict()``, or a list of them."""
        listed = {k: v if isinstance(v, list | tuple) else [v] for k, v in self.extra.items()}
        return tuple(
            name
            for name, values in listed.items()
            if any(isinstance(value, dict) and "param_groups" in value for value in values)
        )

    def record(self, rank: int, world_size: int | None = None) -> PowerSGDRecord:
        """What one rank goes on from, in a job of any number of ranks.

        The outputs of PowerSGD depend on the ranks' errors through their mean only. Ranks that the
        file does not have get the mean; if the job has fewer ranks than the file, all of them do.

        Args:
          rank: The rank, from 0.
          world_size: Ranks of the job; needed where it has fewer than the file.

        Raises:
          IndexError: The file holds no hook state at all.
        """
        known = len(self.powersgd)
        if rank < known and (world_size is None or world_size >= known):
            return self.powersgd[rank]
        mean, own = self.mean, self.powersgd[0].error_dict
        errors = {bucket: e.astype(own[bucket].dtype) for bucket, e in mean.error_dict.items()}
        return dataclasses.replace(mean, error_dict=errors)

    @property
    def mean(self) -> PowerSGDRecord:
        """The hook state with the mean of the errors of the ranks at hand, float32."""
        first = self.powersgd[0]
        errors = {bucket: self.mean_error(bucket) for bucket in first.error_dict}
        return dataclasses.replace(first, error_dict=errors)

    def mean_error(self, bucket: int) -> np.ndarray:
        """The mean of the errors of the ranks at hand in one bucket, flat, float32."""
        errors = [record.error_dict[bucket] for record in self.powersgd]
        # `to_torch` writes one buffer for all ranks: what they share is read once.
        keys = [storage_key(error) for error in errors]
        distinct = dict(zip(keys, errors, strict=True))
        if len(distinct) == 1:  # which is only read, so it needs no copy
            return errors[0].astype(np.float32, copy=False)
        mean = np.zeros(errors[0].shape, np.float32)
        for key, ranks in collections.Counter(keys).items():
            part = distinct[key].astype(np.float32, copy=False)
            mean += part if ranks == 1 else part * ranks
        mean /= len(errors)
        return mean
