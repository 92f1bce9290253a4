"""States of the PowerSGD hook made by hand, with their buffers packed as torch's hook has them."""

from __future__ import annotations

import numpy as np

from torch_bridge import BucketLayout, Checkpoint, PowerSGDRecord


def packed(layout, errors, factors, rank=2, rate=2.0, dtype=np.float32, **fields):
    """The record of one rank, from arrays by name: errors, and factors (P, Q)."""
    error, p, q = {}, {}, {}
    for bucket, entries in enumerate(layout.buckets):
        error[bucket] = [entry.flatten(errors[entry.name]) for entry in entries]
    for slot in layout.factor_slots(rank, rate):
        for buffers, factor in zip((p, q), factors[slot.entry.name], strict=True):
            buffers.setdefault(slot.bucket, []).append(factor.ravel())
    flat = [
        {bucket: np.concatenate(parts).astype(dtype) for bucket, parts in buffers.items()}
        for buffers in (error, p, q)
    ]
    return PowerSGDRecord(rank, 20, *flat, min_compression_rate=rate, **fields)


def random_run(model, order, rank=2, rate=2.0, ranks=1, dtype=np.float32, unused=(), **fields):
    """A checkpoint with random buffers, the errors of its last rank and the factors, by name.

    Those of `unused` are NaN, which torch leaves for a layer that is never used. `fields` are of
    the hook's state.
    """
    rng = np.random.default_rng(5)
    layout = BucketLayout.from_order(order, model)

    def drawn(name, *shape):
        return np.full(shape, np.nan) if name in unused else rng.standard_normal(shape)

    factors = {
        s.entry.name: tuple(drawn(s.entry.name, size, s.rank) for size in (s.rows, s.cols))
        for s in layout.factor_slots(rank, rate)
    }
    assert factors.keys() >= set(unused)
    records, errors = [], {}
    for _ in range(ranks):
        errors = {name: drawn(name, *model[name].shape) for name in layout.names}
        records.append(packed(layout, errors, factors, rank, rate, dtype, **fields))
    arrays = {name: np.asarray(array).astype(dtype) for name, array in model.items()}
    found = Checkpoint(arrays, tuple(records), layout=layout, world_size=ranks)
    return found, errors, factors


def compressed_step(layout, model, ranks=2, rank=2):
    """A checkpoint without a layout, of which every rank has compressed one gradient.

    What is not compressed cancels over the ranks, and P has taken its part of the rest.
    """
    rng = np.random.default_rng(0)
    gradients = [
        {name: rng.standard_normal(model[name].shape) for name in layout.names}
        for _ in range(ranks)
    ]
    outputs = {name: sum(g[name] for g in gradients) / ranks for name in layout.names}
    factors = {}
    for slot in layout.factor_slots(rank, 2.0):
        name, shape = slot.entry.name, model[slot.entry.name].shape
        matrix = outputs[name].reshape(slot.rows, slot.cols)
        p, _ = np.linalg.qr(rng.standard_normal((slot.rows, slot.rank)))
        factors[name] = p, matrix.T @ p
        outputs[name] = (p @ factors[name][1].T).reshape(shape)
    errors = [{name: g[name] - outputs[name] for name in g} for g in gradients]
    records = [packed(layout, e, factors, rank, start_powerSGD_iter=10) for e in errors]
    arrays = {name: np.asarray(array, np.float32) for name, array in model.items()}
    return Checkpoint(arrays, tuple(records), world_size=ranks)
