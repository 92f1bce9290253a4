"""Reading torch files: everything that torch writes, and what lies beside it."""

import collections
import functools

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

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


same = functools.partial(assert_array_equal, strict=True)  # shapes and dtypes, too


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_documented_form(put, protocol):
    document = files.documented()
    checkpoint = load(put(files.saved(document, pickle_protocol=protocol)))
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


def test_strides_and_ties_are_kept(put):
    """Besides the values, which fuzz/legitimate.py compares with torch's."""
    conv = torch.arange(72.0).reshape(2, 3, 3, 4).to(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    model = {"conv": conv, "embed.weight": weight, "head.weight": weight}
    checkpoint = load(put(files.saved(model)))
    assert checkpoint.model["conv"].strides == tuple(4 * s for s in conv.stride())
    assert tied(checkpoint.model) == {"head.weight": "embed.weight"}


def test_wrapper_prefixes(put):
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        assert "0.weight" in load(put(files.saved(files.documented(prefix)))).model
    model = {"module.a.weight": torch.zeros(2), "b.weight": torch.zeros(2)}
    assert list(load(put(files.saved(model))).model) == list(model)


def test_cuda_storages_need_no_gpu(put):
    now = files.storage().replace(b"cpu", b"cud")
    legacy = files.storage(kind=("torch.cuda", "FloatStorage"))
    values = np.ones((2, 3), np.float32)
    for source in (now, legacy):
        document = files.pickle_of_tensor(source=source)
        same(load(put(files.archive(document, {"data/0": values.tobytes()}))).model["w"], values)


def test_reading_imports_no_torch_and_no_process_group(put):
    path = put(files.saved(files.documented()))
    code = (
        "import sys; from torch_bridge import load; c = load(sys.argv[1]); "
        "print(c.powersgd[0].iter, 'torch' in sys.modules)"
    )
    assert python("-c", code, path).split() == ["12", "False"]


MODEL = torch.ones(1)

# --- several ranks ----------------------------------------------------------------------------


def test_files_of_different_runs_are_refused_together(put):
    one = files.documented()
    other = files.documented()
    third = files.documented()
    other["comm_hook_state"].iter = 13
    other["comm_hook_state"].min_compression_rate = 3
    third["comm_hook_state"].q_memory_dict[0] = torch.zeros(8)
    paths = [put(files.saved(d), f"{i}.pt") for i, d in enumerate((one, other, third))]
    with pytest.raises(CheckpointMismatch) as error:
        load(paths)
    for part in ("1.pt: iteration 13, not 12", "min_compression_rate 3", "2.pt: other Q factors"):
        assert part in str(error.value)
    with pytest.raises(CheckpointMismatch, match="at least one file"):
        load([])


def test_files_that_cannot_be_the_ranks_of_one_run(tmp_path):
    def write(name, size, **more):
        path = tmp_path / name
        state = files.slots(error_dict={0: torch.zeros(size)})
        path.write_bytes(files.saved({"comm_hook_state": state, **more}))
        return path

    one = write("0", 3)
    two = write("1", 4)
    three = write("2", 3, world_size=1)
    for paths, said in (
        ([one, tmp_path / "." / "0"], "given 2 times"),
        ([one, two], "other buckets of errors"),
        ([three, write("3", 3, world_size=1)], "2 files of a run of 1 ranks"),
    ):
        with pytest.raises(CheckpointMismatch, match=said):
            load(paths)
    assert_array_equal(load([one, three]).powersgd[1].error_dict[0], 0)


def test_hook_states_under_a_key_of_ones_own_are_named(put):
    value = files.documented()
    value["my_state"] = value.pop("comm_hook_state")
    paths = [put(files.saved(value), f"{rank}.pt") for rank in range(2)]
    with pytest.raises(CheckpointMismatch, match=r"extra\['my_state'\] .* as 'comm_hook_state'"):
        load(paths)


def test_the_mean_of_errors_counts_every_rank():
    def mean(*errors):
        records = tuple(PowerSGDRecord(1, 9, e, {}, {}) for e in errors)
        return Checkpoint({}, records).mean.error_dict[0]

    once = {0: np.array([1, 2], np.float32)}
    thrice = {0: np.array([5, 10], np.float32)}
    assert_array_equal(mean(thrice, once, thrice, thrice), [4, 8])
    # At one address, and told apart by shape and strides.
    honest = np.array([1, 2, 3, 4], np.float32)
    expanded = np.lib.stride_tricks.as_strided(honest, (4,), (0,))
    found = mean(*({0: e} for e in (honest, expanded, honest, honest[::-1][::-1])))
    assert_array_equal(found, [1, 1.75, 2.5, 3.25])


# --- what once was refused, or taken for something else ---------------------------------------


@pytest.mark.parametrize("name", ["model", "state_dict", "hook_state", "model.weight", "format"])
def test_a_parameter_may_be_called_as_an_entry_of_a_checkpoint(put, name):
    path = put(files.saved({name: torch.ones(3), "version": torch.ones(2), "module.v": MODEL}))
    checkpoint = load(path)
    assert list(checkpoint.model) == [name, "version", "module.v"]
    assert not checkpoint.extra


def test_several_optimizers_are_kept_as_they_are(put):
    checkpoint = load(put(files.saved({"state_dict": {"w": MODEL}, "optimizer": [{}, {}]})))
    assert checkpoint.optimizer is None
    assert checkpoint.extra == {"optimizer": [{}, {}]}


def test_numbers_beside_the_tensors_of_a_flat_state_dict_are_kept(put):
    document = files.model().state_dict() | {"epoch": 7, "best": collections.defaultdict(int, a=1)}
    checkpoint = load(put(files.saved(document)))  # in protocol 2, where int is a long
    assert list(checkpoint.model) == list(files.model().state_dict())
    assert checkpoint.extra == {"epoch": 7, "best": {"a": 1}}


def test_arguments_of_another_kind_are_not_put_down_to_the_file(put):
    file = put(files.saved(files.documented()))
    with pytest.raises(TypeError, match="`max_bytes` must be a number of bytes"):
        load(file, max_bytes="1GB")
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"positive number of bytes, got {number}"):
            load(file, max_bytes=number)
    with pytest.raises(TypeError, match=r"the file's name, not what torch\.load made of it"):
        load(files.model().state_dict())
