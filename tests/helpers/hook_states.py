"""States of the PowerSGD hook made by hand, with buffers packed as in torch's hook."""

import numpy as np

from torch_bridge import BucketLayout, Checkpoint, PowerSGDRecord


def packed(layout, errors, factors, rank=2, rate=2.0, dtype=np.float32, **fields):
    """Makes one rank's record from errors by name and factors (P, Q) by name."""
    record = PowerSGDRecord(rank, 20, {}, {}, {}, min_compression_rate=rate, **fields)
    for name, sizes in layout.buffer_sizes(record).items():
        for bucket, size in sizes.items():
            getattr(record, name)[bucket] = np.zeros(size, dtype)
    for name, part in layout.parts(record).items():
        part.error[...] = errors[name]
        if part.rank:
            part.p[...], part.q[...] = factors[name]
    return record


def ranks_of(layout, rank, rate):
    """Returns the entry of each compressed parameter, and the rank of its factors."""
    record = PowerSGDRecord(rank, 20, {}, {}, {}, min_compression_rate=rate)
    ranks = [(entry, entry.factor_rank(record)) for entry in layout.entries.values()]
    return [(entry, used) for entry, used in ranks if used]


def random_run(model, order, rank=2, rate=2.0, ranks=1, dtype=np.float32, unused=(), **fields):
    """Returns a checkpoint with random buffers, the errors of its last rank, and the factors.

    The values of parameters in `unused` are NaN, as torch leaves them for a layer that is never
    used. `fields` are fields of the hook's state.
    """
    rng = np.random.default_rng(5)
    layout = BucketLayout.from_order(order, model)

    def drawn(name, shape):
        return np.full(shape, np.nan) if name in unused else rng.standard_normal(shape)

    factors = {}
    for entry, used in ranks_of(layout, rank, rate):
        rows, cols = entry.matrix
        factors[entry.name] = drawn(entry.name, (rows, used)), drawn(entry.name, (cols, used))
    assert factors.keys() >= set(unused)
    records = []
    errors = {}
    for _ in range(ranks):
        errors = {name: drawn(name, model[name].shape) for name in layout.names}
        records.append(packed(layout, errors, factors, rank, rate, dtype, **fields))
    arrays = {name: np.asarray(array).astype(dtype) for name, array in model.items()}
    found = Checkpoint(arrays, tuple(records), layout=layout, world_size=ranks)
    return found, errors, factors


def compressed_step(layout, model, ranks=2, rank=2):
    """Makes a checkpoint without a layout, in which every rank has compressed one gradient.

    The errors of uncompressed parameters cancel over the ranks. The mean error of a compressed
    parameter is orthogonal to its P.
    """
    rng = np.random.default_rng(0)
    gradients = {name: rng.standard_normal((ranks, *model[name].shape)) for name in layout.names}
    outputs = {name: gradient.mean(0) for name, gradient in gradients.items()}
    factors = {}
    for entry, used in ranks_of(layout, rank, 2.0):
        matrix = outputs[entry.name].reshape(entry.matrix)
        p, _ = np.linalg.qr(rng.standard_normal((len(matrix), used)))
        factors[entry.name] = p, matrix.T @ p
        outputs[entry.name] = (p @ factors[entry.name][1].T).reshape(entry.shape)
    records = []
    for index in range(ranks):
        errors = {name: gradient[index] - outputs[name] for name, gradient in gradients.items()}
        records.append(packed(layout, errors, factors, rank, start_powerSGD_iter=10))
    arrays = {name: np.asarray(array, np.float32) for name, array in model.items()}
    return Checkpoint(arrays, tuple(records), world_size=ranks)
