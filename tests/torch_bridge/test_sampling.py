"""Which samples a replica reads: the properties that make an epoch an epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch_bridge


@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 5))
def test_an_epoch_covers_the_data(n, replicas, shuffle, drop_last, epoch):
    shards = [
        torch_bridge.sharded_indices(
            n, replicas, k, shuffle=shuffle, seed=3, epoch=epoch, drop_last=drop_last
        )
        for k in range(replicas)
    ]
    assert {s.dtype for s in shards} == {np.dtype(np.int64)}
    assert len({len(s) for s in shards}) == 1
    together = np.concatenate(shards)
    counts = np.bincount(together, minlength=n)
    if drop_last:
        assert counts.max(initial=0) <= 1
        assert len(together) == n // replicas * replicas
    else:
        assert counts.min() >= 1
        assert len(together) == -(-n // replicas) * replicas


def test_order():
    plain = [torch_bridge.sharded_indices(5, 2, k, shuffle=False).tolist() for k in (0, 1)]
    assert plain == [[0, 2, 4], [1, 3, 0]]
    first, second = (torch_bridge.sharded_indices(50, 1, 0, epoch=e).tolist() for e in (0, 1))
    assert first != second
    assert first == torch_bridge.sharded_indices(50, 1, 0).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0), "n=0"),
        ((5, 0, 0), "num_replicas=0"),
        ((5, 2, 2), "`replica` must be below num_replicas=2"),
        ((5, 2, -1), "replica=-1"),
        ((5, 2, 0, 1), "`shuffle`"),
        ((5, 2, 0, True, -1), "seed=-1"),
        ((5, 2, 0, True, 0, 0.5), "`epoch`"),
        ((5, 2, 0, True, 0, 0, None), "`drop_last`"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        torch_bridge.sharded_indices(*arguments)
