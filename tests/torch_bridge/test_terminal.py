"""What the command line shows of a file, and the files that it writes."""

from __future__ import annotations

import collections
import errno
import os
import pathlib
import tracemalloc

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch_files as files

import torch_bridge
from torch_bridge import BucketLayout, CheckpointMismatch, load
from torch_bridge.__main__ import OK, UNUSABLE, USAGE, main
from torch_bridge._base.atomic import replacing

pytestmark = pytest.mark.torch


def test_names_from_a_file_are_escaped(tmp_path, capsys):
    path = tmp_path / "f.pt"
    names = ["layers[red].w", "a\x1b[2Jb", "c\u202ed", "e:fire:\\", "f\ud800g"]
    torch.save({"state_dict": {name: torch.ones(2, 2) for name in names}}, path)
    assert main(["inspect", str(path), "--quiet"]) == OK
    out = capsys.readouterr().out
    for shown in ("layers[red].w", r"a\x1b[2Jb", r"c\u202ed", "e:fire:\\", r"f\ud800g"):
        assert shown in out
    assert "\x1b" not in out
    to_flax = ["to-flax", str(path), "--params", "cli_model:params", "--out", str(tmp_path / "o")]
    assert main(to_flax) == UNUSABLE
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert r"a\x1b[2Jb" in err


def test_messages_from_a_file_are_escaped_in_python_too(tmp_path):
    path = tmp_path / "f.pt"
    path.write_bytes(files.archive(files.whole(files.glob("os", "a\x1b[31m\u202e"))))
    with pytest.raises(torch_bridge.UnsafeCheckpoint, match=r"os\.a\\x1b\[31m\\u202e"):
        load(path)
    source = torch_bridge.Checkpoint({"w\x1b[2J.weight": np.zeros((2, 3), np.float32)})
    with pytest.raises(CheckpointMismatch) as error:
        torch_bridge.params_from_torch(source.model, {"v": {"kernel": np.zeros((5, 7))}})
    assert "\x1b" not in str(error.value)
    assert r"w\x1b[2J.weight" in str(error.value)


def test_a_rule_with_a_group_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "f.pt"
    torch.save({"state_dict": {"fc1.weight": torch.ones(2, 2)}}, path)
    arguments = ["--params", "cli_model:params", "--out", str(tmp_path / "o"), "--quiet"]
    assert main(["to-flax", str(path), *arguments, "--rule", r"(fc1)=\2"]) in (USAGE, UNUSABLE)
    assert "invalid group reference" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["to-flax", str(path), *arguments, "--rule", "(fc1=x"])
    assert stop.value.code == USAGE
    assert "no regular" in capsys.readouterr().err


def test_a_layout_that_is_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    arguments = ["inspect", str(tmp_path / "f.pt"), "--layout", str(tmp_path / "pipe")]
    assert main(arguments) == UNUSABLE
    assert "no file" in capsys.readouterr().err


def _save_model(path, value=1.0):
    shapes = {"fc1.weight": (24, 32), "fc1.bias": (24,), "fc2.weight": (48, 24), "fc2.bias": (48,)}
    model = {name: torch.full(shape, value) for name, shape in shapes.items()}
    torch.save({"state_dict": model}, path)
    return model


def test_files_of_json_are_charged_before_they_are_read(tmp_path, capsys):
    source, big, layout = (tmp_path / name for name in ("f.pt", "big.json", "layout.json"))
    model = _save_model(source)
    big.write_text("[" + "[]," * (5 << 20) + "[]]")
    convert = ["to-flax", str(source), "--params", "cli_model:params", "--out", str(tmp_path / "x")]
    commands = [["inspect", str(source), "--layout"], [*convert, "--layout"]]
    tracemalloc.start()
    try:
        for command in (*commands, [*convert, "--param-names"]):
            assert main([*command, str(big), "--quiet"]) == UNUSABLE
            said = capsys.readouterr().err
            assert "big.json: contents that unpack to more" in said
            assert "on the command line: --max-bytes" in said
        assert tracemalloc.get_traced_memory()[1] < 15 << 20
    finally:
        tracemalloc.stop()
    layout.write_text(BucketLayout.from_order([list(model)], model).to_json())
    small = [*convert, "--layout", str(layout), "--quiet", "--max-bytes"]
    assert main([*small, "9000"]) == UNUSABLE
    assert main([*small, "9000000"]) == OK


def _bias(folder):
    with ocp.CheckpointManager(folder) as manager:
        assert manager.all_steps() == [0]
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        return float(manager.restore(0, args=args)["state"]["params"]["fc1"]["bias"][0])


@pytest.mark.parametrize("moment", ["saved", "moved"])
def test_an_old_step_goes_when_the_new_one_is_complete(tmp_path, capsys, monkeypatch, moment):
    source, out = tmp_path / "f.pt", tmp_path / "orbax"
    convert = ["to-flax", str(source), "--params", "cli_model:params", "--quiet", "--out", str(out)]
    _save_model(source, 1)
    assert main(convert) == OK
    _save_model(source, 2)
    save, rename = ocp.CheckpointManager.save, pathlib.Path.rename

    def saved(manager, step, **options):
        save(manager, step, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    def moved(path, target):
        if path.name == "0" and target == out / "0":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patched:
        if moment == "saved":
            patched.setattr(ocp.CheckpointManager, "save", saved)
        else:
            patched.setattr(pathlib.Path, "rename", moved)
        assert main([*convert, "--force"]) == UNUSABLE
    assert "No space left" in capsys.readouterr().err
    assert _bias(out) == 1
    assert main([*convert, "--force"]) == OK
    assert _bias(out) == 2
    assert [path.name for path in out.iterdir() if path.name.endswith(".tmp")] == []


def test_nothing_is_overwritten_unasked(tmp_path, capsys):
    model = collections.OrderedDict(
        (f"fc{k}.{n}", torch.ones(s))
        for k, shapes in ((1, ((24, 32), (24,))), (2, ((48, 24), (48,))))
        for n, s in zip(("weight", "bias"), shapes, strict=True)
    )
    source, out = tmp_path / "source.pt", tmp_path / "run.msgpack"
    torch.save({"state_dict": model}, source)
    arguments = ["--params", "cli_model:params", "--quiet", "--out"]
    convert = ["to-flax", str(source), *arguments, str(out)]
    assert main(convert) == OK
    assert main(convert) == UNUSABLE
    assert "--force" in capsys.readouterr().err
    assert main([*convert, "--force"]) == OK
    folder = [*convert[:-1], str(tmp_path / "orbax")]
    assert main(folder) == OK
    assert main(folder) == UNUSABLE
    assert "already holds step 0" in capsys.readouterr().err
    assert main([*folder, "--force"]) == OK
    before = source.read_bytes()
    back = ["to-torch", str(out), "--like", str(source), *arguments, str(source)]
    assert main(back) == UNUSABLE
    assert source.read_bytes() == before
    assert main([*back, "--force"]) == OK
    np.testing.assert_array_equal(load(source).model["fc1.bias"], model["fc1.bias"])
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_a_write_that_fails_leaves_the_old_file_and_follows_no_link(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("no bytes")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    path.unlink()
    path.symlink_to(target)
    with replacing(path) as file:
        file.write(b"new")
    assert target.read_bytes() == b"kept"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_flax_checkpoint_of_another_kind(tmp_path, capsys):
    source = tmp_path / "source.pt"
    weights = {"fc1.weight": (24, 32), "fc1.bias": (24,), "fc2.weight": (48, 24), "fc2.bias": (48,)}
    torch.save({"state_dict": {n: torch.ones(s) for n, s in weights.items()}}, source)
    run = tmp_path / "run.msgpack"
    options = ["--params", "cli_model:params", "--quiet", "--out"]
    assert main(["to-flax", str(source), *options, str(run)]) == OK
    tree = flax.serialization.msgpack_restore(run.read_bytes())
    tree["params"]["fc1"]["bias"] = "text"
    run.write_bytes(flax.serialization.msgpack_serialize(tree))
    back = ["to-torch", str(run), "--like", str(source), *options, str(tmp_path / "back.pt")]
    assert main(back) == UNUSABLE
    assert "another structure" in capsys.readouterr().err
    folder = tmp_path / "orbax"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    back[1] = str(folder)
    assert main(back) == UNUSABLE
    assert "a pipe" in capsys.readouterr().err
