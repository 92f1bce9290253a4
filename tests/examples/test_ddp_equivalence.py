"""ddp_equivalence.py: the three ways end with the same weights. And local_sgd.py runs."""

import ddp_equivalence
import jax
import lm
import local_sgd
import numpy as np
import pytest

from tests.helpers.control import apart, assert_no_further
from tests.helpers.runners import mesh_of


@pytest.fixture(scope="module")
def on_two_devices():
    return ddp_equivalence.on_devices(2)


@pytest.fixture(scope="module")
def control():
    """Returns the same weights where the first ones are one rounding apart."""
    return ddp_equivalence.on_devices(2, apart(ddp_equivalence.initial_weights()))


def test_accumulation_on_one_device(on_two_devices, control):
    assert_no_further(ddp_equivalence.accumulating(2), on_two_devices, control)


def test_the_padding_of_the_last_batch_counts():
    steps = list(ddp_equivalence.batches(3))
    assert {len(shards) for shards in steps} == {3}
    read = np.concatenate([np.concatenate(shards) for shards in steps[: len(steps) // 3]])
    assert len(read) == 501
    assert set(read) == set(range(500))


@pytest.mark.torch
def test_torch_ddp(on_two_devices, control):
    assert_no_further(ddp_equivalence.in_torch(2), on_two_devices, control)


def test_the_local_sgd_example(tmp_path):
    config = local_sgd.Config(
        replicas=2, steps=64, batch_size=4, layers=1, width=16, context=8, eval_sequences=8
    )
    mesh = mesh_of(config.replicas)
    corpus = lm.load_corpus()
    with jax.numpy_dtype_promotion("standard"):  # optax's AdamW is not written for strict
        runs = {
            strategy.name: list(local_sgd.train(strategy, config, corpus, mesh))
            for strategy in (local_sgd.STRATEGIES[0], local_sgd.STRATEGIES[4])
        }
    exact, compressed = (points[-1] for points in runs.values())
    assert exact.step == compressed.step == 64
    assert compressed.bytes_sent < exact.bytes_sent / 32
    assert max(exact.held_out, compressed.held_out) < np.log(256)
    assert local_sgd.table(runs, config).count("\n") == 3
    local_sgd.plot(tmp_path / "p.png", runs, config)
    assert (tmp_path / "p.png").stat().st_size > 10_000
