"""torch's state of PowerSGD as a typed record of NumPy arrays, without torch.

The fields have torch's names (``powerSGD_hook.PowerSGDState.__slots__``), so a reader who knows the
hook recognises every entry. The reader, the layouts and the conversions exchange this record; its
functions check every value, because all of them come from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

import jax
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch

_WORDS = 624
_MAX_NUMBER = 2**62
_MAX_STEPS = 2**31  # jaxcomp counts in int32


def random_state(key: Any, pos: Any, has_gauss: Any, cached_gaussian: Any) -> np.random.RandomState:
    """Makes a NumPy generator in the state that a file holds.

    The arguments are the parts of ``RandomState.get_state()``.

    Args:
      key: The Mersenne Twister's words, integers, shape (624,).
      pos: Position in `key`, 0 to 624. NumPy does not check it, and would read beyond the array.
      has_gauss: 1 if the generator keeps one normal sample for the next call, else 0.
      cached_gaussian: That sample.

    Raises:
      CheckpointMismatch: The arguments are not a valid state.
    """
    if not isinstance(key, np.ndarray) or key.shape != (_WORDS,) or key.dtype.kind not in "ui":
        raise CheckpointMismatch(f"`rng` must hold an array of {_WORDS} integer words")
    for name, value, largest in (("position", pos, _WORDS), ("`has_gauss`", has_gauss, 1)):
        if type(value) is not int or not 0 <= value <= largest:
            raise CheckpointMismatch(f"`rng` must have a {name} from 0 to {largest}")
    if not isinstance(cached_gaussian, float):
        raise CheckpointMismatch("`rng` must have a number as `cached_gaussian`")
    generator = np.random.RandomState(0)  # without a seed it would also hold a SeedSequence
    generator.set_state(("MT19937", key.astype(np.uint32), pos, has_gauss, cached_gaussian))
    return generator


@dataclasses.dataclass(frozen=True)
class PowerSGDRecord:
    """Holds one rank's ``PowerSGDState``, with arrays in place of tensors.

    Attributes:
      matrix_approximation_rank: The hook's rank; a parameter's is ``min(rows, cols, rank)``.
      iter: The number of calls of the hook so far.
      error_dict: Bucket index -> this rank's error, flat, in the bucket's order of parameters. Each
        parameter, compressed or not, is in memory order.
      p_memory_dict: Bucket index -> the P factors of the compressed parameters, flat, each of
        (rows, r) values. Parameters of one matrix shape stand together; the shapes are in the order
        in which they first occur.
      q_memory_dict: Bucket index -> the Q factors, each of (cols, r) values, in the same order.
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
        """Returns the indices of the buckets that have an error or a factor, ascending."""
        indices = set(self.error_dict).union(self.p_memory_dict, self.q_memory_dict)
        return tuple(sorted(indices))

    @property
    def error_sizes(self) -> dict[int, int]:
        """Returns the number of values in each bucket's error, by bucket index."""
        return jax.tree.map(np.size, self.error_dict)

    @property
    def hyperparameters(self) -> dict[str, int | float | bool]:
        """Returns the hook's arguments that the user chose, by torch's names."""
        chosen = {}
        for name in _NUMBERS:
            if name not in COUNTERS:
                chosen[name] = getattr(self, name)
        return chosen


# From the annotations, so that a field of a later release is checked without another list.
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
# Of each array that parameters are applied to, a file has so many of the largest values, and of the
# smallest.
EXTREMES = 4
BUFFERS = ("error_dict", "p_memory_dict", "q_memory_dict")
# The slots of the first release of the hook; later releases added others, which have defaults.
_REQUIRED = ("matrix_approximation_rank", "iter", *BUFFERS)


# The states that files hold: for each kind the keys of which one or another set must be there.
_MARKS = {
    "PowerSGDState": (set(_REQUIRED),),
    "PostLocalSGDState": ({"start_localSGD_iter"},),
    "optimizer": ({"param_groups"},),
    "scheduler": (
        {"last_epoch", "_last_lr"},
        {"last_epoch", "_step_count"},
        {"last_epoch", "num_bad_epochs"},
    ),
    # torch's (whose state is empty if it is not enabled), Megatron's and apex's.
    "GradScaler": (
        {"scale", "growth_factor"},
        {"scale", "growth_tracker"},
        {"loss_scale", "unskipped"},
    ),
    "random numbers": ({"python", "numpy", "cpu"}, {"torch_manual_seed"}),
    "DeepSpeed": ({"ds_version"},),
}
KINDS = tuple(_MARKS)


def is_state(value: object, kind: str) -> bool:
    """Returns whether a value is a dictionary with the keys of a state of this kind.

    Example:
      >>> is_state({"last_epoch": 3, "_last_lr": [0.1]}, "scheduler")
      True
    """
    if not isinstance(value, Mapping):
        return False
    return any(marks <= value.keys() for marks in _MARKS.get(kind, ()))


def is_optimizer(value: Any) -> bool:
    """Returns whether the entries are those of ``torch.optim.Optimizer.state_dict()``."""
    if not isinstance(value, Mapping) or not _is_list(value.get("param_groups"), Mapping):
        return False
    for group in value["param_groups"]:
        named = _is_list(group.get("param_names", ()), str)
        if "lr" not in group or not named or not _is_list(group.get("params"), int | str):
            return False
    state = value.get("state")
    return isinstance(state, Mapping) and _is_list(list(state.values()), Mapping)


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, kind) for entry in value)


def record_from_slots(slots: Mapping[str, Any]) -> PowerSGDRecord:
    """Builds a record from the slot dictionary of a ``PowerSGDState``.

    Args:
      slots: Slot name -> value, with NumPy arrays. ``process_group`` and unknown slots are ignored.

    Returns:
      The record. A slot that an older torch release does not write gets torch's default.

    Raises:
      CheckpointMismatch: A required slot is missing, or a slot has the wrong kind of value.
    """
    missing = set(_REQUIRED) - slots.keys()
    if missing:
        raise CheckpointMismatch(f"the hook state lacks {', '.join(sorted(missing))}")
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
    if record.min_compression_rate < 0:
        raise CheckpointMismatch("`min_compression_rate` must be >= 0")
    return record


def _number(name: str, value: Any) -> int | float | bool:
    """Returns a number of the hook state in the type of its field, or refuses it."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = _NUMBERS[name]
    if isinstance(value, int | float) and abs(value) < _MAX_NUMBER:  # nan is not
        # A flag may be written as 1, but True is no number, and 2.5 no integer.
        exact = kind(value) == value and (kind is bool or not isinstance(value, bool))
        if kind is float or exact:
            return kind(value)
    raise CheckpointMismatch(
        f"`{name}` must be of type {kind.__name__} and below 2**62, got a {type(value).__name__}"
    )


def _bucket_arrays(name: str, value: Any) -> dict[int, np.ndarray]:
    """Returns an entry of the hook state, bucket index -> flat array, or refuses it."""
    if not isinstance(value, Mapping):
        raise CheckpointMismatch(f"`{name}` must be a dictionary, got {type(value).__name__}")
    arrays = {}
    for key, array in value.items():
        if not isinstance(key, int) or not isinstance(array, np.ndarray):
            raise CheckpointMismatch(f"`{name}` must map bucket index to tensor, at {key!r:.40}")
        # torch writes contiguous ones. A view with strides of 0 would grow when it is flattened.
        if not array.flags.c_contiguous or array.dtype.kind in "iubc":
            raise CheckpointMismatch(
                f"`{name}` must hold flat tensors of floating-point numbers, unlike bucket {key}"
            )
        arrays[key] = array.reshape(-1)
    return arrays
