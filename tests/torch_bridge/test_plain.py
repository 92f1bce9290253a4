"""`plain_copy`: what a file for ``torch.load(weights_only=True)`` keeps of a tree of anything."""

import argparse
import io

import numpy as np
import pytest
import torch

from torch_bridge._base.plain import plain_copy

pytestmark = pytest.mark.torch


def written_and_read(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_torch_reads_is_kept_as_it_is():
    tree = {
        "scheduler": {"last_epoch": 7, "_last_lr": [0.1], "lr_lambdas": [None]},
        "scaler": {"scale": 65536.0, 3: (True, b"x", 1j, {1, 2})},
        "best": np.float64(0.5),
    }
    kept, lacking = plain_copy(tree)
    assert written_and_read(kept) == {**tree, "best": 0.5}
    assert type(kept["best"]) is float
    assert lacking == []


def test_what_torch_has_beside_tensors_and_what_its_schedulers_count_with():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    tree = {
        "of torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2])],
        "version": torch.__version__,
        "scheduler": scheduler.state_dict(),
    }
    kept, lacking = plain_copy(tree)
    assert lacking == []
    assert written_and_read(kept) == tree
    assert type(kept["version"]) is str
    assert list(kept["scheduler"]["milestones"].elements()) == [2, 2, 5]


def test_arrays_become_tensors_and_one_array_one_tensor():
    ema = np.arange(3, dtype=np.float32)
    kept, _ = plain_copy({"ema": {"w": ema, "tied": ema}})
    assert kept["ema"]["w"] is kept["ema"]["tied"]
    np.testing.assert_array_equal(written_and_read(kept)["ema"]["w"], ema)


def test_a_dictionary_lacks_an_entry_and_a_list_is_whole_or_missing():
    odd = argparse.Namespace()
    tree = {
        "args": {"lr": 0.1, "callback": odd},
        "hooks": [1, odd],
        frozenset(): 1,
        "long": np.longdouble(1),
    }
    kept, lacking = plain_copy(tree)
    assert kept == {"args": {"lr": 0.1}}
    assert lacking == ["args.callback", "hooks", "frozenset()", "long"]


def test_trees_without_an_end_have_one():
    endless, deep = {"n": 1}, []
    endless["self"] = [endless]
    for _ in range(10_000):
        deep = [deep]
    shared = [0]
    for _ in range(60):  # 2**60 values, seen one by one
        shared = [shared, shared]
    kept, lacking = plain_copy({"endless": endless, "deep": deep, "shared": shared})
    assert kept["endless"] == {"n": 1}
    assert kept["shared"][0] is kept["shared"][1]
    assert lacking == ["endless.self", "deep"]
    written_and_read(kept)


def test_many_references_to_a_refused_list_cost_one_look():
    refused = [*range(10_000), object()]
    _, lacking = plain_copy({str(i): refused for i in range(10_000)})
    assert len(lacking) == 10_000
