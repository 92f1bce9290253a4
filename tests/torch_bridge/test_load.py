"""Reading torch files: everything that torch writes, and what lies beside it."""

import functools

import numpy as np
import pytest
import torch

from tests.helpers import torch_files as files
from tests.helpers.script import python
from torch_bridge import Checkpoint, CheckpointMismatch, PowerSGDRecord, load
from torch_bridge._base.tensors import tied


@pytest.fixture
def put(tmp_path):
    def write(raw, name="file.pt"):
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


same = functools.partial(np.testing.assert_array_equal, strict=True)  # shapes and dtypes, too


def test_documented_form(put):
    document = files.documented()
    checkpoint = load(put(files.saved(document)))
    assert list(checkpoint.model) == list(files.model().state_dict())
    for name, tensor in files.model().state_dict().items():
        same(checkpoint.model[name], tensor.numpy())
    (record,) = checkpoint.powersgd
    state = document["comm_hook_state"]
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        same(getattr(record, name)[0], getattr(state, name)[0].numpy())
    for name in (*record.hyperparameters, "iter", "next_stats_report"):
        assert getattr(record, name) == getattr(state, name)
    assert record.rng.randint(10**9) == state.rng.randint(10**9)
    assert checkpoint.extra == {"epoch": 3}  # without the hook itself
    assert checkpoint.missing_ranks


def test_slots_of_older_releases(put):
    old = {name: value for name, value in files.slots().items() if name in (
        "matrix_approximation_rank", "iter", "error_dict", "p_memory_dict", "q_memory_dict",
        "use_error_feedback", "warm_start", "rng", "start_powerSGD_iter",
    )}  # fmt: skip
    record = load(put(files.saved(old))).powersgd[0]
    assert record.min_compression_rate == 2.0
    assert record.batch_tensors_with_same_shape is False


def test_strides_and_ties_stay(put):
    conv = torch.arange(72.0).reshape(2, 3, 3, 4).to(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    model = load(put(files.saved({"conv": conv, "embed": weight, "head": weight}))).model
    same(model["conv"], conv.numpy())
    assert model["conv"].strides == tuple(4 * step for step in conv.stride())
    assert tied(model) == {"head": "embed"}


def test_wrapper_prefixes(put):
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        assert "0.weight" in load(put(files.saved(files.documented(prefix)))).model
    model = {"module.a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    assert list(load(put(files.saved(model))).model) == list(model)


def test_cuda_storages_need_no_gpu(put):
    raw = files.saved({"w": torch.ones(2, 3)})
    pkl = files.pickle_of_tensor(source=files.storage().replace(b"cpu", b"cud"))
    legacy_type = files.storage(kind=("torch.cuda", "FloatStorage"))
    for data in (pkl, files.pickle_of_tensor(source=legacy_type)):
        array = load(put(files.archive(data, {"data/0": np.ones(6, "<f4").tobytes()}))).model["w"]
        same(array, load(put(raw)).model["w"])


def test_reading_imports_no_torch_and_no_process_group(put):
    path = put(files.saved(files.documented()))
    code = (
        "import sys; from torch_bridge import load; c = load(sys.argv[1]); "
        "print(c.powersgd[0].iter, 'torch' in sys.modules)"
    )
    assert python("-c", code, path).split() == ["12", "False"]


MODEL = torch.ones(1)

# --- several ranks ----------------------------------------------------------------------------


def test_files_that_are_not_the_ranks_of_one_run_are_refused_together(put):
    def rank(name, error=3, world_size=None, **changes):
        state = files.slots(error_dict={0: torch.zeros(error)}, **changes)
        return put(files.saved({"comm_hook_state": state, "world_size": world_size}), name)

    first = rank("0.pt")
    others = [
        rank("1.pt", iter=4, min_compression_rate=3.0),
        rank("2.pt", 4, q_memory_dict={0: torch.zeros(8)}),
        first.parent / "." / "0.pt",
    ]
    with pytest.raises(CheckpointMismatch) as error:
        load([first, *others])
    said = (
        *("1.pt: iteration 4, not 3", "1.pt: min_compression_rate 3.0, not 2.0"),
        *("2.pt: other Q factors", "2.pt: errors of other buckets", "0.pt: given 2 times"),
    )
    for part in said:
        assert part in str(error.value)
    two = [rank("3.pt", world_size=1), rank("4.pt", world_size=1)]
    with pytest.raises(CheckpointMismatch, match="2 files of a run of 1 ranks"):
        load(two)
    with pytest.raises(CheckpointMismatch, match="at least one file"):
        load([])
    assert len(load([first, rank("5.pt")]).powersgd) == 2


def test_the_mean_of_errors_counts_every_rank():
    def mean(*errors):
        records = tuple(PowerSGDRecord(1, 9, e, {}, {}) for e in errors)
        return Checkpoint({}, records).mean.error_dict[0]

    once, thrice = {0: np.array([1, 2], np.float32)}, {0: np.array([5, 10], np.float32)}
    np.testing.assert_array_equal(mean(thrice, once, thrice, thrice), [4, 8])
    # At one address, and told apart by shape and strides.
    honest = np.array([1, 2, 3, 4], np.float32)
    expanded = np.lib.stride_tricks.as_strided(honest, (4,), (0,))
    found = mean(*({0: e} for e in (honest, expanded, honest, honest[::-1][::-1])))
    np.testing.assert_array_equal(found, [1, 1.75, 2.5, 3.25])


# --- what once was refused, or taken for something else ---------------------------------------


@pytest.mark.parametrize("name", ["model", "state_dict", "hook_state", "model.weight", "format"])
def test_a_parameter_may_be_called_as_an_entry_of_a_checkpoint(put, name):
    path = put(files.saved({name: torch.ones(3), "version": torch.ones(2), "module.v": MODEL}))
    checkpoint = load(path)
    assert list(checkpoint.model) == [name, "version", "module.v"]
    assert not checkpoint.extra


def test_several_optimizers_and_numbers_as_keys_are_kept(put):
    samples = [{7 * k: 0.5, 7 * k + 3: 0.25} for k in range(20_000)]
    more = {"optimizer": [{}, {}], "samples": samples}
    checkpoint = load(put(files.saved({"state_dict": {"w": MODEL}, **more})))
    assert checkpoint.optimizer is None
    assert checkpoint.extra == more


def test_what_is_named_again_and_again_is_one(put):
    body = files.dictionary(
        state_dict=b"}",
        names=b"](" + b"ctorch\nint8\n" * 100_000 + b"e",
        nested=b"]" * 90 + b"a" * 89,
    )
    extra = load(put(files.archive(files.whole(body)))).extra
    assert len(extra["names"]) == 100_000
    assert len(set(map(id, extra["names"]))) == 1
    assert list(extra) == ["names", "nested"]
