"""Infers the bucket layout of a checkpoint that does not record it.

torch uses few orders of parameters: the order of definition (before the first rebuild, or always
with ``find_unused_parameters``), and the order in which gradients became ready. If none fits,
modules may use their parts in another order than they define them (`ready_orders`). Each candidate
is tested against the hook state. A layout is accepted only if no other candidate fits:

- The buffers of errors and factors have exactly the lengths of the candidate.
- Every P factor is orthonormal, because the hook stores it so.
- If the errors of all ranks are present, the mean error of a compressed parameter is
  ``M - P P^T M``, so it is orthogonal to P. The mean error of an uncompressed parameter is 0, so
  the order of uncompressed parameters between two compressed ones does not matter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._base.tensors import trainable
from torch_bridge._hook.buckets import BucketLayout, BucketPart
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.ready_orders import reversed_modules, used_orders
from torch_bridge._pairing.pairs import Pair, unpaired

_COLUMNS = 128  # the most columns of P that are tested
_HOW_TO = (
    "Record it in the torch run with torch_bridge.record_layout(ddp_model, state), or pass "
    "layout=BucketLayout.from_order(...)."
)


def infer_layout(checkpoint: Checkpoint, *, frozen: Collection[str] = ()) -> BucketLayout:
    """Finds the only bucket layout, among those that torch makes, that fits the hook state.

    Parameters of equal shape whose gradients became ready in an unusual order cannot be told apart.
    If the model has parallel branches, record the layout instead.

    Args:
      checkpoint: A checkpoint with a model and the hook state. With the errors of all ranks more
        wrong orders are excluded.
      frozen: Names of parameters that may be frozen, and of buffers other than running statistics,
        because the file does not mark them.

    Returns:
      The layout.

    Raises:
      CheckpointMismatch: No candidate or more than one candidate fits; the error lists them.

    Example:
      >>> p = np.full(16, 0.25, np.float32)
      >>> from torch_bridge import PowerSGDRecord
      >>> record = PowerSGDRecord(1, 20, {0: np.zeros(128, "f4")}, {0: p}, {0: np.ones(8, "f4")})
      >>> model = {"fc.weight": np.zeros((16, 8), "f4")}
      >>> infer_layout(Checkpoint(model, (record,), world_size=2)).names
      ('fc.weight',)
    """
    if not checkpoint.powersgd or not checkpoint.model:
        raise CheckpointMismatch(f"The layout cannot be inferred without a model. {_HOW_TO}")
    evidence = _evidence_of(checkpoint)
    fitting: dict[Any, tuple[str, BucketLayout]] = {}
    reasons = []
    for names in _trained(checkpoint.model, frozen):
        test = _Test(names, checkpoint.model, evidence)
        for label, order in _orders(names, checkpoint.model, test).items():
            buckets = _cut(order, test.lengths, checkpoint.model)
            if buckets is None:
                continue
            layout = BucketLayout.from_order(buckets, checkpoint.model)
            flaw = test.flaw(order)
            misfits = layout.misfits(evidence.record)
            if misfits:
                flaw = misfits[0]
            if flaw:
                reasons.append(f"{label}: {flaw}")
                continue
            fitting.setdefault(_what_counts(layout, checkpoint), (label, layout))
    if not fitting:
        for label, layout in _used_layouts(checkpoint, frozen, evidence):
            fitting.setdefault(_what_counts(layout, checkpoint), (label, layout))
    if len(fitting) == 1:
        _, layout = next(iter(fitting.values()))
        return layout
    if fitting:
        more = ""
        if checkpoint.missing_ranks and evidence.record.error_dict:
            ranks = ", and nothing says that these are all"
            if checkpoint.world_size:
                ranks = f" of {checkpoint.world_size}"
            more = (
                f"The errors of {len(checkpoint.powersgd)} rank(s) are here{ranks}. Load one file "
                "per rank: from the errors of all ranks the order can be inferred. "
            )
        raise CheckpointMismatch(
            f"{more}The file does not record the bucket layout, and several orders fit it. "
            f"{_HOW_TO}",
            ambiguous=_first_difference(dict(fitting.values())),
        )
    raise CheckpointMismatch(
        f"The file does not record the bucket layout, and no order that torch produces fits. "
        f"{_HOW_TO}",
        mis_shaped=reasons or [_other_size(checkpoint)],
    )


class _Evidence(NamedTuple):
    """The hook state against which every layout is tested.

    Attributes:
      record: The state of the first rank.
      mean: The state with the mean errors; None if some ranks are missing.
      several: True if the errors are those of several ranks.
      rounding: The root mean square of errors that are rounding only.
    """

    record: PowerSGDRecord
    mean: PowerSGDRecord | None
    several: bool
    rounding: float


def _evidence_of(checkpoint: Checkpoint) -> _Evidence:
    """Reads all errors once, because they may be gigabytes and there are many candidates."""
    record = checkpoint.powersgd[0]
    mean = None
    if not checkpoint.missing_ranks:
        mean = checkpoint.mean
    # If the ranks had equal gradients, their errors are rounding only, and need not cancel.
    rounding = 1e-6 * _root_mean_square(record.error_dict.values())
    return _Evidence(record, mean, len(checkpoint.powersgd) > 1, rounding)


def _what_counts(layout: BucketLayout, checkpoint: Checkpoint) -> Any:
    """Returns a key that is equal for layouts that give every parameter the same state."""
    record = checkpoint.powersgd[0]
    if not record.error_dict:  # only the places of the factors count
        parts = layout.parts(record).items()
        return tuple((name, part.bucket) for name, part in parts if part.rank)
    if checkpoint.missing_ranks or len(checkpoint.powersgd) == 1:
        return layout
    # The errors of uncompressed parameters cancel over all ranks, so their places do not matter.
    places = []
    for bucket in layout.buckets:
        start = 0
        for entry in bucket:
            if entry.factor_rank(record):
                places.append((entry.name, start))
            start += entry.size
        places.append(("end of the bucket", start))
    return tuple(places)


def _first_difference(layouts: Mapping[str, BucketLayout]) -> list[str]:
    """Returns one line for each layout: the next parameters where the layouts first differ."""
    orders = [layout.names for layout in layouts.values()]
    shared = len(os.path.commonprefix(orders))  # noqa: RUF071 (of names)
    lines = []
    for label, layout in layouts.items():
        following = ", ".join(layout.names[shared : shared + 3])
        lines.append(f"{label}: after {shared} of {len(layout.names)} parameters {following}")
    return lines


def _other_size(checkpoint: Checkpoint) -> str:
    """Returns the reason if no candidate has the size of the buffers."""
    have = sum(checkpoint.model[name].size for name in trainable(checkpoint.model))
    sizes = dict(sorted(checkpoint.powersgd[0].error_sizes.items()))
    return (
        f"the model's parameters have {have} values, the error buffers {sizes}; frozen parameters "
        f"and the model's buffers have no error, and the file does not mark them (name them in "
        f"infer_layout(..., frozen=[...]))"
    )


def _flaw_of(layout: BucketLayout, evidence: _Evidence) -> str | None:
    """Returns the reason why the hook state cannot have this layout; None if it can."""
    record = evidence.record
    wrong = layout.misfits(record)
    if wrong:
        return wrong[0]
    means = {}
    if evidence.mean:
        means = layout.parts(evidence.mean)
    for name, part in layout.parts(record).items():
        mean = None
        if means:
            mean = means[name].error
        flaw = _flaw_of_part(part, mean, evidence)
        if flaw:
            return flaw
    return None


def _flaw_of_part(part: BucketPart, mean: np.ndarray | None, evidence: _Evidence) -> str | None:
    """Returns the reason why a parameter cannot have this error and these factors.

    Args:
      part: The parameter with its error and factors.
      mean: The mean error of all ranks, with the parameter's shape; None if ranks are missing.
      evidence: The hook state.
    """
    name = part.entry.name
    if part.rank and part.p is not None:
        # A few columns are enough, and all columns of a full rank would take gigabytes.
        p = part.p[:, :_COLUMNS].astype(np.float64)
        if not np.isfinite(p).all():
            return None
        tolerance = max(64 * np.sqrt(len(p)) * float(jnp.finfo(part.p.dtype).eps), 1e-3)
        if np.abs(p.T @ p - np.eye(p.shape[1])).max() > tolerance:
            return f"the factors of {name} would not be orthonormal"
        if mean is None:
            return None
        left_over = p.T @ part.entry.to_memory(mean).reshape(len(p), -1)
        if np.linalg.norm(left_over) > 1e-2 * np.linalg.norm(mean) + 1e-12:
            return f"the error of {name} would not be what its factors left over"
    elif evidence.several and not part.rank and mean is not None:
        assert part.error is not None
        size = np.linalg.norm(part.error.astype(np.float64))
        if np.linalg.norm(mean) > 1e-2 * size + evidence.rounding * np.sqrt(mean.size):
            return f"the errors of {name} would not cancel over the ranks"
    return None


class _Test:
    """Tests many orders of parameters against the hook state, each place of a parameter once."""

    def __init__(
        self, names: Sequence[str], model: Mapping[str, np.ndarray], evidence: _Evidence
    ) -> None:
        self._model = model
        self._evidence = evidence
        self._flaws = {}  # name, bucket, places of error and factor -> flaw or None
        self._entries = BucketLayout.from_order([names], model).entries
        self._sizes = {}
        self._matrices = {}  # shape of the matrix, and the rank of its factors
        for name, entry in self._entries.items():
            self._sizes[name] = entry.size
            self._matrices[name] = (*entry.matrix, entry.factor_rank(evidence.record))
        sizes = evidence.record.error_sizes
        self.lengths = [sizes[bucket] for bucket in sorted(sizes)]

    def flaw(self, order: Sequence[str]) -> str | None:
        """Returns the reason why the hook state cannot have this order, or this beginning of it.

        Returns:
          The reason; None if there is none.
        """
        rest = dict.fromkeys(self._entries)
        buckets = self._buckets(order)
        for bucket, places in enumerate(buckets):
            total = sum(map(self._sizes.__getitem__, places))
            for name in places:
                del rest[name]
            is_whole = bool(self.lengths) and total == self.lengths[bucket]
            may_grow = bucket == len(buckets) - 1 and (rest or not self.lengths)
            if not is_whole and not may_grow:
                return f"no parameter ends where bucket {bucket} does"
            factors = {}
            if is_whole:
                factors = self._factors(places, ())
            elif bucket >= len(self.lengths) - 1:  # the last bucket, or the only one
                factors = self._factors(places, rest)
            for name, place in places.items():
                flaw = self._flaw_at(name, bucket, place, factors.get(name))
                if flaw:
                    return flaw
        if not rest and self.lengths and len(buckets) < len(self.lengths):
            return f"no parameter is in bucket {len(buckets)}"
        return None

    def _buckets(self, order: Sequence[str]) -> list[dict[str, int]]:
        """Fills buckets in order: for each, the parameters and the places of their errors.

        A parameter that does not fit into a bucket goes to the next one, and into the last bucket
        go all others. A parameter without values stays in the bucket of the one before it.
        """
        buckets: list[dict[str, int]] = [{}]
        total = 0
        for name in order:
            size = self._sizes[name]
            bucket = len(buckets) - 1
            if bucket < len(self.lengths) - 1 and total + size > self.lengths[bucket]:
                buckets.append({})
                total = 0
            buckets[-1][name] = total
            total += size
        return buckets

    def _factors(self, names: Collection[str], rest: Collection[str]) -> dict[str, int]:
        """Returns the place of each P in its bucket, where matrices of one shape stand together.

        Args:
          names: The first parameters of the bucket, in their order.
          rest: The other parameters of the bucket, in any order.
        """
        groups = {}
        for name in itertools.chain(names, rest):
            groups.setdefault(self._matrices[name], []).append(name)
        places = {}
        total = 0
        for (rows, _, rank), alike in groups.items():
            for name in alike:
                places[name] = total
                total += rows * rank
        return places

    def _flaw_at(self, name: str, bucket: int, place: int, factor: int | None) -> str | None:
        """Returns the reason why a parameter cannot have its error and factor at these places."""
        key = (name, bucket, place, factor)
        if key in self._flaws:
            return self._flaws[key]
        entry = self._entries[name]
        rows, _, rank = self._matrices[name]
        record = self._evidence.record
        p = None
        if factor is not None and bucket in record.p_memory_dict:
            p = record.p_memory_dict[bucket][factor : factor + rows * rank]
            if len(p) < rows * rank:
                return f"P of bucket {bucket} would end before {name}"
            p = p.reshape(rows, rank)
        errors = []
        for source in (record, self._evidence.mean):
            error = None
            if source is not None and bucket in source.error_dict:
                flat = source.error_dict[bucket][place : place + entry.size]
                error = entry.from_memory(flat)
            errors.append(error)
        part = BucketPart(entry, bucket, rank, errors[0], p, None)
        self._flaws[key] = _flaw_of_part(part, errors[1], self._evidence)
        return self._flaws[key]


def _root_mean_square(arrays: Iterable[np.ndarray]) -> float:
    squares = 0.0
    count = 0
    for array in arrays:
        squares += float(np.sum(np.square(array, dtype=np.float64)))
        count += array.size
    return (squares / max(count, 1)) ** 0.5


def layout_of(
    checkpoint: Checkpoint, layout: BucketLayout | None, pairs: Sequence[Pair] | None
) -> BucketLayout | None:
    """Returns the layout of a checkpoint: the user's, the file's, or inferred from the hook state.

    Args:
      checkpoint: A checkpoint with or without hook state.
      layout: The user's layout, or None.
      pairs: The model's pairs, or None if they are unknown. Tensors without a Flax leaf may be
        buffers.

    Returns:
      The layout; None if there is none and compression has not begun.

    Raises:
      CheckpointMismatch: The layout is unknown or does not fit.
    """
    of_user = layout is not None
    layout = layout or checkpoint.layout
    if not checkpoint.powersgd or not checkpoint.powersgd[0].buckets:
        return layout
    if layout is None:
        frozen = []
        if pairs:
            frozen = unpaired(checkpoint.model, pairs)
        return infer_layout(checkpoint, frozen=frozen)
    wrong = layout.misfits(checkpoint.powersgd[0])
    if wrong:
        raise CheckpointMismatch(
            f"The layout does not fit the hook state: {wrong[0]}. Record it in the same run with "
            f"torch_bridge.record_layout.",
            parameters=("layout",),
        )
    unknown = sorted(set(layout.names) - checkpoint.model.keys())
    if checkpoint.model and unknown:  # they would count as frozen, and lose their state silently
        raise CheckpointMismatch(
            "The layout names parameters that the model does not have. Record it from this "
            "model with torch_bridge.record_layout.",
            unexpected=unknown,
        )
    if of_user:  # in another order of equal sizes, parameters would get the state of others
        flaw = _flaw_of(layout, _evidence_of(checkpoint))
        if flaw:
            raise CheckpointMismatch(
                f"The layout has another order than the hook state: {flaw}. Record it in the same "
                f"run with torch_bridge.record_layout, or leave layout= out to have it inferred.",
                parameters=("layout",),
            )
    return layout


def _orders(
    names: Sequence[str], model: Mapping[str, np.ndarray], test: _Test
) -> dict[str, Sequence[str]]:
    """Returns the usual orders of a model's parameters, by label.

    Args:
      names: The names of the trained parameters, in the order of definition.
      model: The model's tensors by name.
      test: The test, which knows the lengths of the buckets.
    """
    ready, whole = reversed_modules(names, model)
    orders = {
        "gradient-ready order": list(itertools.chain(*ready.values())),
        "reversed definition order": names[::-1],
        "reversed modules": list(itertools.chain(*whole.values())),
    }
    # In the order of definition DDP makes the last bucket first.
    buckets = _cut(names, test.lengths[::-1], model)
    if buckets:
        orders["definition order"] = list(itertools.chain(*buckets[::-1]))
    return orders


def _used_layouts(
    checkpoint: Checkpoint, frozen: Collection[str], evidence: _Evidence
) -> Iterator[tuple[str, BucketLayout]]:
    """Yields the layouts that fit if modules use their parts in any order, with labels."""
    model = checkpoint.model
    for names in _trained(model, frozen):
        test = _Test(names, model, evidence)
        labels = ("gradient-ready order", "reversed modules")
        for label, groups in zip(labels, reversed_modules(names, model), strict=True):
            orders = used_orders(groups, model, lambda order, test=test: not test.flaw(order))
            for place, order in enumerate(orders):
                buckets = _cut(order, test.lengths, model)
                if not buckets:
                    continue
                layout = BucketLayout.from_order(buckets, model)
                if not layout.misfits(evidence.record):
                    yield f"{label}, modules used in another order ({place})", layout


def _trained(model: Mapping[str, np.ndarray], frozen: Collection[str]) -> list[list[str]]:
    """Returns the names of the trained parameters: without those that may be frozen, and all."""
    every = trainable(model)
    if not frozen:
        return [every]
    return [[name for name in every if name not in frozen], every]


def _cut(
    order: Sequence[str], lengths: Sequence[int], model: Mapping[str, np.ndarray]
) -> list[Sequence[str]] | None:
    """Cuts `order` into buckets of exactly `lengths` elements; None if that is impossible.

    If no length is known, all names are one bucket.
    """
    if not lengths:
        return [order]
    ends = np.cumsum([model[name].size for name in order])
    borders = np.cumsum(lengths)
    # An empty tensor belongs to the bucket of the tensor before it.
    cuts = np.searchsorted(ends, borders, side="right")
    fits = bool(len(ends)) and np.array_equal(ends[cuts - 1], borders) and cuts[-1] == len(order)
    if not fits:
        return None
    return [order[start:end] for start, end in itertools.pairwise([0, *cuts])]
