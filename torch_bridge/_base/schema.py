"""A typed mirror, in NumPy, of what torch keeps for PowerSGD. Torch is not needed to read it.

The field names are torch's own (``powerSGD_hook.PowerSGDState.__slots__``), so that a reader who
knows the hook recognises every entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch

_WORDS = 624
_MAX_NUMBER = 2**62
_MAX_STEPS = 2**31  # jaxcomp counts in int32


def random_state(
    key: Any, pos: Any, has_gauss: Any = 0, cached_gaussian: Any = 0.0
) -> np.random.RandomState:
    """Makes a generator in the state that a file says, as ``RandomState.get_state()`` has it.

    Args:
      key: The Mersenne Twister's words, shape (624,), integers.
      pos: Position in `key`, 0 to 624. NumPy does not check it, and would read beyond the array.
      has_gauss: 1 when one normal sample is kept back.
      cached_gaussian: That sample.

    Raises:
      CheckpointMismatch: They are no state.
    """
    if not isinstance(key, np.ndarray) or key.shape != (_WORDS,) or key.dtype.kind not in "ui":
        raise CheckpointMismatch(f"`rng` must hold an array of {_WORDS} integer words")
    for name, value, largest in (("position", pos, _WORDS), ("`has_gauss`", has_gauss, 1)):
        if type(value) is not int or not 0 <= value <= largest:
            raise CheckpointMismatch(f"`rng` must have its {name} in 0 to {largest}")
    if not isinstance(cached_gaussian, float):
        raise CheckpointMismatch("`rng` must have a number as `cached_gaussian`")
    generator = np.random.RandomState(0)  # unseeded, it would carry a SeedSequence along
    generator.set_state(("MT19937", key.astype(np.uint32), pos, has_gauss, cached_gaussian))
    return generator


@dataclasses.dataclass(frozen=True)
class PowerSGDRecord:
    """One rank's ``PowerSGDState``, with arrays in place of tensors.

    Attributes:
      matrix_approximation_rank: Rank asked for; a leaf has ``min(rows, cols, rank)``.
      iter: Calls of the hook so far.
      error_dict: Bucket index -> this rank's error, flat, in bucket parameter order; each
        parameter in memory order; compressed and uncompressed ones together.
      p_memory_dict: Bucket index -> flat (rows, r) blocks of the compressed parameters, cut by
        groups of equal matrix shape in first-seen order.
      q_memory_dict: Bucket index -> flat (cols, r) blocks, cut likewise.
      rng: The generator that seeds the first Q, or None if the file has none.

    Example:
      >>> record = PowerSGDRecord(2, 100, {0: np.zeros(20)}, {0: np.zeros(8)}, {0: np.zeros(8)})
      >>> record.buckets, record.min_compression_rate
      ((0,), 2.0)
    """

    matrix_approximation_rank: int
    iter: int
    error_dict: dict[int, np.ndarray]
    p_memory_dict: dict[int, np.ndarray]
    q_memory_dict: dict[int, np.ndarray]
    start_powerSGD_iter: int = 1_000
    min_compression_rate: float = 2.0
    orthogonalization_epsilon: float = 0.0
    use_error_feedback: bool = True
    warm_start: bool = True
    batch_tensors_with_same_shape: bool = False
    rng: np.random.RandomState | None = None
    total_numel_before_compression: int = 0
    total_numel_after_compression: int = 0
    compression_stats_logging_frequency: int = 10_000
    next_stats_report: int = 0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Indices of the buckets that have any state, ascending."""
        indices = set(self.error_dict).union(self.p_memory_dict, self.q_memory_dict)
        return tuple(sorted(indices))

    @property
    def error_sizes(self) -> dict[int, int]:
        """Lengths of the errors, by bucket."""
        return {bucket: error.size for bucket, error in self.error_dict.items()}

    @property
    def hyperparameters(self) -> dict[str, int | float | bool]:
        """Values that the user chose, by torch's argument names."""
        return {name: getattr(self, name) for name in _NUMBERS if name not in COUNTERS}


_NUMBERS = {}
for _name, _kind in get_type_hints(PowerSGDRecord).items():
    if _kind in (int, float, bool):
        _NUMBERS[_name] = _kind
COUNTERS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)
BUFFERS = ("error_dict", "p_memory_dict", "q_memory_dict")
# Present since the hook exists; later torch releases added the others, which have defaults.
_REQUIRED = ("matrix_approximation_rank", "iter", *BUFFERS)


def is_slots(value: object) -> bool:
    """Tells what ``PowerSGDState.__getstate__()`` returns, by its entries."""
    return isinstance(value, Mapping) and all(name in value for name in _REQUIRED)


def is_post_local(value: object) -> bool:
    """Tells the state of ``post_localSGD_hook``, which holds nothing that training needs."""
    return isinstance(value, Mapping) and "start_localSGD_iter" in value


def is_optimizer(value: Any) -> bool:
    """Tells what ``torch.optim.Optimizer.state_dict()`` returns, by its entries."""
    if not isinstance(value, Mapping):
        return False
    state = value.get("state")
    groups: Any = value.get("param_groups")
    if not isinstance(state, Mapping) or not _is_list(groups, Mapping):
        return False
    for group in groups:
        names = group.get("param_names", ())
        if "lr" not in group or not _is_list(names, str):
            return False
        if not _is_list(group.get("params"), int | str):
            return False
    return _is_list(list(state.values()), Mapping)


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)


def record_from_slots(slots: Mapping[str, Any]) -> PowerSGDRecord:
    """Builds a record from the slot dictionary of a ``PowerSGDState``.

    Args:
      slots: Slot name -> value, arrays as NumPy; ``process_group`` and unknown slots are ignored.

    Returns:
      The record; slots that older torch releases lack take torch's defaults.

    Raises:
      CheckpointMismatch: A required slot is missing, or a slot has the wrong kind of value.
    """
    missing = [name for name in _REQUIRED if name not in slots]
    if missing:
        raise CheckpointMismatch(f"the hook state lacks {', '.join(missing)}")
    values: dict[str, Any] = {"rng": slots.get("rng")}
    for name in _NUMBERS.keys() & slots.keys():
        values[name] = _number(name, slots[name])
    for name in BUFFERS:
        values[name] = _bucket_arrays(name, slots[name])
    record = PowerSGDRecord(**values)
    if not isinstance(record.rng, np.random.RandomState | None):
        raise CheckpointMismatch(
            f"`rng` must be a numpy RandomState, got {type(record.rng).__name__}"
        )
    if record.matrix_approximation_rank < 1 or not 0 <= record.iter < _MAX_STEPS:
        raise CheckpointMismatch(
            "`matrix_approximation_rank` must be >= 1, `iter` in 0 to 2**31 - 1"
        )
    return record


def _number(name: str, value: Any) -> int | float | bool:
    """Checks a number of the hook state."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = _NUMBERS[name]
    if isinstance(value, int | float) and abs(value) < _MAX_NUMBER:  # nan is not
        exact = kind(value) == value and (kind is bool or not isinstance(value, bool))
        if kind is float or exact:
            return kind(value)
    raise CheckpointMismatch(
        f"`{name}` must be a number of its kind below 2**62, got {type(value).__name__}"
    )


def _bucket_arrays(name: str, value: Any) -> dict[int, np.ndarray]:
    """Checks the entry `name` of the hook state, bucket index -> flat array."""
    if not isinstance(value, Mapping):
        raise CheckpointMismatch(f"`{name}` must be a dictionary, got {type(value).__name__}")
    arrays = {}
    for key, array in value.items():
        if not isinstance(key, int) or not isinstance(array, np.ndarray):
            raise CheckpointMismatch(f"`{name}` must map bucket index to tensor, at {key!r:.40}")
        # torch's are; a view with strides of 0 would grow when it is made flat.
        if not array.flags.c_contiguous or array.dtype.kind in "iubc":
            raise CheckpointMismatch(f"`{name}` must hold flat tensors, floating-point, at {key}")
        arrays[key] = array.reshape(-1)
    return arrays
