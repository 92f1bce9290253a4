"""Which samples a replica reads: those of torch's sampler."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import torch_bridge


@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 5))
def test_the_samples_are_those_of_torchs_sampler(n, replicas, shuffle, drop_last, epoch):
    for k in range(replicas):
        options = {"shuffle": shuffle, "seed": 3, "drop_last": drop_last}
        sampler = DistributedSampler(range(n), replicas, k, **options)
        sampler.set_epoch(epoch)
        found = torch_bridge.sharded_indices(n, replicas, k, epoch=epoch, **options)
        assert found.tolist() == list(sampler)
        assert found.dtype == np.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0), "n=0"),
        ((5, 2, 2), "`replica` must be below num_replicas=2"),
        ((5, 2, 0, 1), "`shuffle`"),
        ((5, 2, 0, True, 0, 0.5), "`epoch`"),
        ((5, 2, 0, True, True), "seed=True"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        torch_bridge.sharded_indices(*arguments)


def test_the_permutation_of_a_large_data_set_is_torchs():
    generator = torch.Generator().manual_seed(2**32 + 7)
    expected = torch.randperm(50_000, generator=generator).numpy()
    found = torch_bridge.sharded_indices(50_000, 1, 0, seed=2**32, epoch=7)
    np.testing.assert_array_equal(found, expected)
