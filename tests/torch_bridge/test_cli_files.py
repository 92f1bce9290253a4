"""The files that the command line writes: whole or not there, checked, in little memory."""

import errno
import io
import json
import os
import pathlib
import resource
import sys
import time

import orbax.checkpoint as ocp
import pytest
import torch

import torch_bridge
from benchmarks import bridge_memory
from tests.helpers.cli_model import PARAMS, document
from tests.helpers.script import python
from torch_bridge.__main__ import INTERRUPTED, OK, UNUSABLE, main
from torch_bridge._cli import convert, progress

TO_FLAX = ("to-flax", "checkpoint.pt", *PARAMS, "--out")
BACK = ("--like", "checkpoint.pt", "--out", "back.pt")


@pytest.fixture
def fails(call):
    """Returns whether a command fails, where checkpoint.pt lies, with such a message."""

    def run(*arguments, said):
        code, _, err = call(*arguments)
        return code == UNUSABLE and said in err

    return run


def _save_model(value):
    model = {name: torch.full_like(v, value) for name, v in document()["state_dict"].items()}
    torch.save({"state_dict": model}, "checkpoint.pt")


def _bias(folder):
    with ocp.CheckpointManager(folder) as manager:
        assert manager.all_steps() == [0]
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return float(manager.restore(0, args=args)["state"]["params"]["fc1"]["bias"][0])


def test_a_failed_write_leaves_no_folder(fails, tmp_path, monkeypatch):
    def save(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    for out in ("new", "there/new/orbax"):
        assert fails(*TO_FLAX, out, said="No space left")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main([*TO_FLAX, "orbax"]) == OK
    monkeypatch.setattr(torch, "save", save)
    said = ("--like", "checkpoint.pt", "--out", "there/new/back.pt")
    assert fails("to-torch", "orbax", *said, said="No space left")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint.pt", "orbax", "there"]
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("moment", ["saved", "moved"])
def test_an_old_step_goes_when_the_new_one_is_complete(fails, tmp_path, monkeypatch, moment):
    out = tmp_path / "orbax"
    convert = [*TO_FLAX, "orbax"]
    _save_model(1)
    assert main(convert) == OK
    _save_model(2)
    save = ocp.CheckpointManager.save
    rename = pathlib.Path.rename

    def saved(manager, step, **options):
        save(manager, step, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    def moved(path, target):
        if path.name == "0" and path.parent.suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patched:
        if moment == "saved":
            patched.setattr(ocp.CheckpointManager, "save", saved)
        else:
            patched.setattr(pathlib.Path, "rename", moved)
        assert fails(*convert, "--force", said="No space left")
    assert _bias(out) == 1
    assert main([*convert, "--force"]) == OK
    assert _bias(out) == 2
    assert [path.name for path in out.iterdir()] == ["0"]


def test_nothing_is_overwritten_unasked(fails):
    assert main([*TO_FLAX, "run"]) == OK
    assert fails(*TO_FLAX, "run", said="already holds step 20")
    assert main([*TO_FLAX, "run", "--force"]) == OK
    before = pathlib.Path("checkpoint.pt").read_bytes()
    back = ["to-torch", "run", *BACK[:-1], "checkpoint.pt"]
    assert fails(*back, said="--force")
    assert pathlib.Path("checkpoint.pt").read_bytes() == before
    assert main([*back, "--force"]) == OK
    assert list(torch_bridge.load("checkpoint.pt").model) == list(document()["state_dict"])


def test_a_write_that_fails_leaves_the_old_file_with_its_mode_and_follows_no_link(
    fails, monkeypatch
):
    path, target, names = (pathlib.Path(name) for name in ("back.pt", "target", "names.json"))
    names.write_text(json.dumps(list(document()["state_dict"])))
    assert main([*TO_FLAX, "run", "--param-names", "names.json"]) == OK
    convert = ["to-torch", "run", *BACK, "--force", "--param-names", "names.json"]
    path.write_bytes(b"old")
    path.chmod(0o600)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert fails(*convert, said="No space left")
    assert path.read_bytes() == b"old"
    assert main(convert) == OK
    assert path.stat().st_mode & 0o777 == 0o600
    target.write_bytes(b"kept")
    path.unlink()
    path.symlink_to(target)
    assert main(convert) == OK
    assert target.read_bytes() == b"kept"
    assert not path.is_symlink()
    left = {"checkpoint.pt", "back.pt", "target", "names.json", "run"}
    assert {p.name for p in pathlib.Path().iterdir()} == left


def test_a_flipped_bit_in_an_orbax_directory_is_named(fails, tmp_path):
    assert main([*TO_FLAX, "run"]) == OK
    files = [path for path in sorted((tmp_path / "run" / "20").rglob("*")) if path.is_file()]
    for index, path in enumerate(files):
        kept = path.read_bytes()
        changed = bytearray(kept or b"x")
        changed[len(changed) * 7 // 11] ^= 1 << index % 8
        path.write_bytes(changed)
        assert fails("to-torch", "run", *BACK, said="is damaged"), path
        path.write_bytes(kept)
    assert main(["to-torch", "run", *BACK]) == OK
    # sha256sum -c reads it, too.
    lines = (tmp_path / "run" / "20" / "SHA256SUMS").read_text().splitlines()
    assert [line[64:66] for line in lines] == ["  "] * (len(files) - 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(fails, monkeypatch, number):
    def save(*_, **__):
        raise ValueError(f"RESOURCE_EXHAUSTED: Error writing: Failed [os_error_code='{number}']")

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    assert fails(*TO_FLAX, "run", said=f"error: run: {os.strerror(number)}\n")
    assert not pathlib.Path("run").exists()


@pytest.mark.parametrize("values", [1, 100_000])  # noticed at the end, and while it is written
def test_a_full_disk_on_the_way_back_is_one_sentence_and_leaves_the_old_file(fails, values):
    torch.save(document() | {"more": torch.ones(values)}, "checkpoint.pt")
    assert main([*TO_FLAX, "run"]) == OK
    pathlib.Path("back.pt").write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        assert fails("to-torch", "run", *BACK, "--force", said="error: back.pt: File too large\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert pathlib.Path("back.pt").read_bytes() == b"old"
    assert not list(pathlib.Path().glob(".*.tmp"))


def test_an_interrupt_is_one_line(call, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "load", interrupted)
    assert call(*TO_FLAX, "run") == (INTERRUPTED, "", "error: interrupted\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("kind", "seconds", "is_shown"),
    [(Terminal, 0.0, True), (Terminal, 5.0, False), (io.StringIO, 0.0, False)],
)
def test_a_terminal_sees_what_a_long_conversion_is_at(monkeypatch, kind, seconds, is_shown):
    monkeypatch.setattr(progress, "SECONDS", seconds)
    monkeypatch.setenv("TERM", "xterm")
    stderr = kind()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress.steps(2) as begin:
        begin("reading")
        time.sleep(0.3)
    assert ("reading" in stderr.getvalue()) == is_shown


def test_a_pipe_is_not_waited_for_nor_one_behind_a_linked_folder(fails, tmp_path):
    for outside, inside in ((tmp_path / "one", "one"), (tmp_path / "outside", "two")):
        outside.mkdir()
        os.mkfifo(outside / "_METADATA")
        (tmp_path / inside).mkdir(exist_ok=True)
        (tmp_path / inside / "circle").symlink_to(tmp_path / inside)
        (tmp_path / inside / "state").symlink_to(outside)
        assert fails("to-torch", inside, *BACK, said="_METADATA is a pipe, a socket or a device")


MEMORY = """
import resource, sys
import torch_bridge
from torch_bridge.__main__ import main
import jax, orbax.checkpoint  # not part of what a conversion costs
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
said = ["--params", "big_model:params", "--conv1d", ""]
assert main(["to-flax", sys.argv[1], *said, "--out", sys.argv[2]]) == 0
print("used", peak() - before)
"""


def test_a_conversion_stays_below_three_times_the_size(tmp_path):
    layers = 2  # 96 MB; `python -m benchmarks.bridge_memory` does the same with 1 GB
    bridge_memory.write_checkpoint(tmp_path / "big.pt", layers)
    params = bridge_memory.PARAMS.format(width=bridge_memory.WIDTH, layers=layers)
    (tmp_path / "big_model.py").write_text(params)
    said = python("-c", MEMORY, "big.pt", "run", cwd=tmp_path)
    size = (tmp_path / "big.pt").stat().st_size
    assert int(said.split("used")[1]) < 3 * size


@pytest.mark.usefixtures("alone")
def test_an_error_of_torch_is_passed_on_and_leaves_no_file(tmp_path, monkeypatch):
    def save(*_):
        raise RuntimeError("CUDA error")

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    path = tmp_path / "run" / "checkpoint.pt"
    path.parent.mkdir()
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch_bridge.save_checkpoint(path, model, None)
    assert not list(path.parent.iterdir())
