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

import functools
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import shape_of, trainable
from torch_bridge._hook.buckets import BucketEntry, BucketLayout, in_hook_order
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.ready_orders import reversed_modules, used_orders
from torch_bridge._pairing.pairs import Pair, unpaired

_COLUMNS = 128  # the most columns of P that are tested
_HOW_TO = (
    "Record it in the torch run with torch_bridge.record_layout(ddp_model, state), or pass "
    "layout=BucketLayout.from_order(...)."
)


def infer_layout(checkpoint: Checkpoint, *, frozen: Collection[str] = ()) -> BucketLayout:
    """Finds the bucket layout that fits the hook state, if exactly one of torch's layouts does.

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
    model = checkpoint.model
    every = trainable(model)
    trained = [every]
    if frozen:
        trained.insert(0, list(itertools.filterfalse(frozen.__contains__, every)))
    test = _Test(checkpoint, BucketLayout.from_order([every], model).entries)
    fitting: dict[Any, tuple[str, BucketLayout]] = {}
    reasons = []
    candidates = list(filter(test.fits, trained))
    for orders in (_usual_orders, _further_orders):  # the usual ones decide, if one of them fits
        for names in candidates:
            for label, order in orders(names, test):
                buckets = test.filled(order, test.lengths)
                layout = BucketLayout.from_order(list(map(list, buckets)), model)
                flaws = [*layout.misfits(test.record), test.flaw(buckets)]
                if flaws[0]:
                    reasons.append(f"{label}: {flaws[0]}")
                else:
                    fitting.setdefault(_what_counts(layout, checkpoint), (label, layout))
        if fitting:
            break
    if len(fitting) == 1:
        _, layout = next(iter(fitting.values()))
        return layout
    if fitting:
        more = ""
        if checkpoint.missing_ranks and test.lengths:
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
    if not reasons:
        reasons.append(
            f"the model's parameters have {test.size(every)} values, the error buffers "
            f"{test.record.error_sizes}; frozen parameters and the model's buffers have no error, "
            f"and the file does not mark them (name them in infer_layout(..., frozen=[...]))"
        )
    raise CheckpointMismatch(
        f"The file does not record the bucket layout, and no order that torch produces fits. "
        f"{_HOW_TO}",
        mis_shaped=reasons,
    )


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


class _Test:
    """Tests orders of parameters against the hook state, each place of a parameter once.

    Attributes:
      record: The state of the first rank.
      entries: The parameters, by name.
      lengths: The length of each bucket of errors; empty without errors.
    """

    def __init__(self, checkpoint: Checkpoint, entries: Mapping[str, BucketEntry]) -> None:
        """Reads all errors once, because they may be gigabytes and there are many candidates."""
        self.record = checkpoint.powersgd[0]
        self.entries = entries
        self._sizes = self.record.error_sizes
        self.lengths = list(dict(sorted(self._sizes.items())).values())
        self._errors = self.record.error_dict
        self._means = {}
        if not checkpoint.missing_ranks:
            self._means = checkpoint.mean.error_dict
        self._several = len(checkpoint.powersgd) > 1
        # If the ranks had equal gradients, their errors are rounding only, and need not cancel.
        norms = [np.linalg.norm(error.astype(np.float32)) for error in self._errors.values()]
        self._rounding = 1e-6 * np.linalg.norm(norms) / max(sum(self.lengths), 1) ** 0.5
        self._ranks = {}
        for name, entry in entries.items():
            self._ranks[name] = entry.factor_rank(self.record)
        self._flaw_at = functools.cache(self._flaw_of_place)

    def size(self, names: Iterable[str]) -> int:
        """Returns the number of values that parameters have together."""
        return sum(self.entries[name].size for name in names)

    def fits(self, names: Sequence[str]) -> bool:
        """Returns whether the parameters have as many values as the errors, or there are none."""
        return not self.lengths or self.size(names) == sum(self.lengths)

    def filled(self, order: Iterable[str], lengths: Sequence[int]) -> list[dict[str, int]]:
        """Fills buckets in order: for each, the parameters and the places of their errors.

        A parameter that does not fit into a bucket goes to the next one, and into the last bucket
        go all others. A parameter without values stays in the bucket of the one before it.
        """
        buckets: list[dict[str, int]] = [{}]
        total = 0
        for name in order:
            size = self.entries[name].size
            if len(buckets) < len(lengths) and total + size > lengths[len(buckets) - 1]:
                buckets.append({})
                total = 0
            buckets[-1][name] = total
            total += size
        return buckets

    def flaw(self, buckets: Sequence[Mapping[str, int]], rest: Sequence[str] = ()) -> str | None:
        """Returns the reason why the hook state cannot have these buckets, or begin with them.

        Args:
          buckets: For each bucket, the parameters and the places of their errors.
          rest: The parameters that come behind these in an unknown order.
        """
        for bucket, places in enumerate(buckets):
            total = self.size(places)
            is_whole = self._sizes.get(bucket) == total
            following = rest
            if is_whole or bucket < len(buckets) - 1:
                following = ()
            if bucket in self._sizes and not is_whole and not following:
                return f"no parameter ends where bucket {bucket} does"
            factors = {}
            # Matrices of one shape stand together, so all parameters of the bucket must be known.
            if not following or bucket >= len(self.lengths) - 1:
                place = 0
                for entry in in_hook_order(map(self.entries.__getitem__, (*places, *following))):
                    factors[entry.name] = place
                    place += entry.matrix[0] * self._ranks[entry.name]
            for name, place in places.items():
                flaw = self._flaw_at(name, bucket, place, factors.get(name))
                if flaw:
                    return flaw
        if not rest and len(buckets) < len(self.lengths):
            return f"no parameter is in bucket {len(buckets)}"
        return None

    def _flaw_of_place(self, name: str, bucket: int, place: int, factor: int | None) -> str | None:
        """Returns the reason why a parameter cannot have its error and factor at these places."""
        entry = self.entries[name]
        rank = self._ranks[name]
        mean = None
        if bucket in self._means:
            mean = self._means[bucket][place : place + entry.size]
        if not rank:
            if mean is None or not self._several:
                return None
            error = self._errors[bucket][place : place + entry.size].astype(np.float64)
            allowed = 1e-2 * np.linalg.norm(error) + self._rounding * np.sqrt(mean.size)
            if np.linalg.norm(mean) > allowed:
                return f"the errors of {name} would not cancel over the ranks"
            return None
        if factor is None or bucket not in self.record.p_memory_dict:
            return None
        rows, _ = entry.matrix
        p = self.record.p_memory_dict[bucket][factor : factor + rows * rank]
        if len(p) < rows * rank:
            return f"P of bucket {bucket} would end before {name}"
        tolerance = max(64 * np.sqrt(rows) * float(jnp.finfo(p.dtype).eps), 1e-3)
        # A few columns are enough, and all columns of a full rank would take gigabytes.
        p = p.reshape(rows, rank)[:, :_COLUMNS].astype(np.float64)
        if not np.isfinite(p).all():
            return None
        products = p.T @ p
        identity = np.eye(p.shape[1])
        if np.abs(products - identity).max() > tolerance:
            return f"the factors of {name} would not be orthonormal"
        if mean is not None:
            left_over = p.T @ mean.reshape(rows, -1)
            if np.linalg.norm(left_over) > 1e-2 * np.linalg.norm(mean) + 1e-12:
                return f"the error of {name} would not be what its factors left over"
        return None


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
    begun = bool(checkpoint.powersgd and checkpoint.powersgd[0].buckets)
    if layout is not None:
        try:
            layout = named_layout(layout, checkpoint.model)
        except CheckpointMismatch:
            if of_user or begun:
                raise
            # A hook of state_dict() renames or drops parameters, and no state needs the layout.
            layout = None
    if not begun:
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
    if of_user:  # in another order of equal sizes, parameters would get the state of others
        test = _Test(checkpoint, layout.entries)
        buckets = []
        for bucket in layout.buckets:
            (places,) = test.filled([entry.name for entry in bucket], ())
            buckets.append(places)
        flaw = test.flaw(buckets)
        if flaw:
            raise CheckpointMismatch(
                f"The layout has another order than the hook state: {flaw}. Record it in the same "
                f"run with torch_bridge.record_layout, or leave layout= out to have it inferred.",
                parameters=("layout",),
            )
    return layout


def named_layout(layout: BucketLayout, model: Mapping[str, Any]) -> BucketLayout:
    """Returns a layout with the names of a model; without a model it stays as it is.

    Raises:
      CheckpointMismatch: The model lacks parameters of the layout, which would count as frozen and
        lose their state, or has them with other shapes. The error lists all.
    """
    layout = layout.named_as(model)
    unknown = []
    wrong = []
    for entry in layout:
        if entry.name not in model:
            unknown.append(entry.name)
        elif shape_of(model[entry.name]) != entry.shape:
            wrong.append(f"{entry.name} {entry.shape}, in the model {shape_of(model[entry.name])}")
    if model and (unknown or wrong):
        raise CheckpointMismatch(
            "The layout names parameters that the model does not have, or has with other shapes. "
            "Record it from this model with torch_bridge.record_layout.",
            unexpected=sorted(unknown),
            mis_shaped=wrong,
            parameters=("layout",),
        )
    return layout


def _usual_orders(names: Sequence[str], test: _Test) -> Iterator[tuple[str, Iterable[str]]]:
    """Yields the usual orders of a model's parameters, with labels.

    Args:
      names: The names of the trained parameters, in the order of definition.
      test: The test, which knows the lengths of the buckets.
    """
    ready, whole = reversed_modules(names, test.entries)
    yield "gradient-ready order", itertools.chain(*ready.values())
    yield "reversed definition order", names[::-1]
    yield "reversed modules", itertools.chain(*whole.values())
    # In the order of definition DDP makes the last bucket first.
    buckets = test.filled(names, test.lengths[::-1])
    yield "definition order", itertools.chain(*buckets[::-1])


def _further_orders(names: Sequence[str], test: _Test) -> Iterator[tuple[str, Iterable[str]]]:
    """Yields the orders that fit if modules use their parts in any order, as `_usual_orders`."""
    ready, whole = reversed_modules(names, test.entries)

    def can_begin(order: Sequence[str]) -> bool:
        rest = dict.fromkeys(names)
        for name in order:
            del rest[name]
        return not test.flaw(test.filled(order, test.lengths), tuple(rest))

    for label, groups in (("gradient-ready order", ready), ("reversed modules", whole)):
        for place, order in enumerate(used_orders(groups, test.entries, can_begin)):
            yield f"{label}, modules used in another order ({place})", order
