"""Selects the samples that each replica reads, by the rules of torch's ``DistributedSampler``."""

from __future__ import annotations

import numpy as np


def sharded_indices(
    n: int,
    num_replicas: int,
    replica: int,
    shuffle: bool = True,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
) -> np.ndarray:
    """Returns the samples that one replica reads in one epoch: every `num_replicas`-th sample.

    The indices and their order are those of ``torch.utils.data.DistributedSampler`` after
    ``set_epoch(epoch)``. The permutation is the one that torch's CPU generator draws. So a run that
    moves from torch continues with the data that it would have read in torch.

    Args:
      n: Number of samples in the data set.
      num_replicas: Number of replicas.
      replica: Index of this replica, from 0.
      shuffle: Whether to permute the samples, anew in each epoch and equally on every replica.
      seed: The seed of the permutation; torch's generator gets ``seed + epoch``.
      epoch: Index of the epoch.
      drop_last: If `num_replicas` does not divide `n`: True drops the tail, False pads with samples
        from the beginning, so that every replica has the same number of samples.

    Returns:
      int64 array of ``ceil(n / num_replicas)`` indices, or ``floor`` with `drop_last`.

    Raises:
      ValueError: A number is out of range, or an argument has another type.

    Example:
      >>> from torch_bridge import sharded_indices
      >>> [sharded_indices(5, 2, replica, shuffle=False).tolist() for replica in range(2)]
      [[0, 2, 4], [1, 3, 0]]
    """
    numbers = {
        "n": (n, 1),
        "num_replicas": (num_replicas, 1),
        "replica": (replica, 0),
        "seed": (seed, 0),
        "epoch": (epoch, 0),
    }
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ValueError(
                f"`{name}` must be an integer, at least {least}, got {name}={value!r}."
            )
    for name, flag in {"shuffle": shuffle, "drop_last": drop_last}.items():
        if not isinstance(flag, bool | np.bool_):
            raise ValueError(f"`{name}` must be True or False, got {flag!r}.")
    if replica >= num_replicas:
        raise ValueError(
            f"`replica` must be below num_replicas={num_replicas}, got replica={replica}. Replicas "
            "count from 0."
        )
    samples = n // num_replicas if drop_last else -(-n // num_replicas)
    order = _torch_permutation(n, seed + epoch) if shuffle else np.arange(n, dtype=np.int64)
    # Padding repeats the epoch's order, several times if there are more replicas than samples.
    return order[np.arange(replica, samples * num_replicas, num_replicas) % n]


def _torch_permutation(n: int, seed: int) -> np.ndarray:
    """Draws ``torch.randperm(n)`` with a CPU generator seeded with `seed`."""
    # Both are the Mersenne twister, seeded by the same rule with the low 32 bits of the seed.
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    draws = generator.randint(0, 2**32, size=n - 1, dtype=np.uint32).astype(np.int64)
    swaps = draws % np.arange(n, 1, -1)
    order = list(range(n))
    for i, step in enumerate(swaps.tolist()):
        order[i], order[i + step] = order[i + step], order[i]
    return np.array(order, np.int64)
