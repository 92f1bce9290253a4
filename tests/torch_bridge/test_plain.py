"""What `to_torch` keeps of the entries beside a model, for ``torch.load(weights_only=True)``."""

import argparse
import warnings

import numpy as np
import pytest
import torch

from torch_bridge import Checkpoint, to_torch

WEIGHT = {"fc.weight": np.ones((3, 2), np.float32)}


@pytest.fixture
def kept(tmp_path):
    """Returns what is written of such entries, what torch reads, and what is said to be lost."""

    def write(extra):
        path = tmp_path / "run.pt"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params = {"fc": {"kernel": np.zeros((2, 3), np.float32)}}
            document = to_torch(params, (), Checkpoint(WEIGHT, extra=extra), path=path)
        read = torch.load(path, weights_only=True)
        return document["extra"], read["extra"], "".join(str(line.message) for line in caught)

    return write


def test_what_torch_reads_is_kept_as_it_is(kept):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    ema = np.arange(3, dtype=np.float32)
    tree = {
        "lambda": {"last_epoch": 7, "_last_lr": [0.1], "lr_lambdas": [None]},
        "scaler": {"scale": 65536.0, 3: (True, b"x", 1j, {1, 2}), (1, "a"): 2},
        "of torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2])],
        "version": torch.__version__,
        "best": np.float64(0.5),
        "scheduler": scheduler.state_dict(),
    }
    written, read, warned = kept({**tree, "ema": {"w": ema, "tied": ema}})
    assert warned == ""
    np.testing.assert_array_equal(read.pop("ema")["w"], ema)
    assert read == tree
    assert written["ema"]["w"] is written["ema"]["tied"]
    assert type(written["best"]) is float
    assert type(written["version"]) is str
    assert list(read["scheduler"]["milestones"].elements()) == [2, 2, 5]


def test_a_dictionary_lacks_an_entry_and_a_list_is_whole_or_missing(kept):
    odd = argparse.Namespace()
    endless = {"n": 1}
    deep = []
    shared = [0]
    endless["self"] = [endless]
    for _ in range(10_000):
        deep = [deep]
    for _ in range(60):  # 2**60 values, seen one by one
        shared = [shared, shared]
    tree = {"args": {"lr": 0.1, "callback": odd}, "hooks": [1, odd], frozenset(): 1}
    tree |= {"long": np.longdouble(1), "endless": endless, "deep": deep, "shared": shared}
    _, read, warned = kept(tree)
    assert read.pop("shared")[0][1] is not None
    assert read == {"args": {"lr": 0.1}, "endless": {"n": 1}}
    for name in ("args.callback", "hooks", "frozenset()", "long", "endless.self", "deep"):
        assert name in warned
    assert "shared" not in warned


def test_many_references_to_a_refused_list_cost_one_look(kept):
    refused = [*range(10_000), object()]
    assert "and 9,992 more" in kept({str(i): refused for i in range(10_000)})[2]
