"""The examples' checkpoints: checked, locked, and never deleted too early."""

import pathlib
import resource
import shutil
import subprocess
import sys

import directories
import numpy as np
import pytest
from checkpoints import CheckpointError, Checkpoints, WriteError
from paths import LANGUAGE_MODEL

STATE = {"w": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30), "step": 0}


@pytest.fixture
def opened(tmp_path):
    """Opens the same directory again and again, as one run after the other does."""
    runs = []

    def open_again(**options):
        if runs:
            runs[-1].close()
        runs.append(
            Checkpoints(
                tmp_path / "run", **({"every": 1, "keep": 2, "resume": bool(runs)} | options)
            )
        )
        return runs[-1]

    yield open_again
    runs[-1].close()


def state(step):
    return {"w": STATE["w"] + step, "step": step}


def read(checkpoints):
    def one(step):
        return checkpoints.restore(step, STATE, checkpoints.metadata(step))

    return checkpoints.restored(one)


def saved(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state(step), {"rank": 4})
    return checkpoints


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "run").glob("[!.]*"))


def test_the_newest_is_restored_and_only_the_last_are_kept(opened, tmp_path):
    assert read(saved(opened(), 1, 2, 3, 4)) is None  # what was there when it was opened
    found = read(opened())
    np.testing.assert_array_equal(found["w"], state(4)["w"])
    assert found["step"] == 4
    assert names(tmp_path) == ["3", "4"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_passed_over_with_the_name_of_the_file(opened, capfd):
    """Before a parser sees it: of orbax's and tensorstore's own errors nothing is printed."""
    newest = saved(opened(), 1, 2).directory / "2"
    opened().close()  # which waits until it is written
    files = [path for folder in ("state", "config") for path in (newest / folder).rglob("*")]
    files = [path for path in files if path.is_file() and path.stat().st_size]
    files.append(newest / "checksums")
    assert len(files) > 6
    for file in files:
        whole = file.read_bytes()
        flip(file)
        checkpoints = opened()
        assert read(checkpoints)["step"] == 1
        name = file.relative_to(newest).as_posix()
        said = f"the checkpoint {newest} is not used: it is damaged: {name} is not what was saved"
        assert checkpoints.passed_over == [said]
        (damaged,) = newest.parent.glob("2.damaged-*")
        damaged.rename(newest)
        file.write_bytes(whole)
    assert read(opened())["step"] == 2
    assert capfd.readouterr() == ("", "")


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGE = {
    "a flipped bit of a leaf": lambda newest: flip(largest(newest / "state")),
    "a flipped bit of the configuration": lambda newest: flip(newest / "config" / "metadata"),
    "cut off": lambda newest: largest(newest / "state").write_bytes(b""),
    "a flipped bit of the checksums": lambda newest: flip(newest / "checksums"),
    "empty": lambda newest: (shutil.rmtree(newest), newest.mkdir()),
    "foreign": lambda newest: (shutil.rmtree(newest), newest.mkdir(), (newest / "x").touch()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_passed_over_and_kept(opened, tmp_path, damage):
    saved(opened(), 1, 2).close()
    damage(tmp_path / "run" / "2")
    checkpoints = opened()
    np.testing.assert_array_equal(read(checkpoints)["w"], state(1)["w"])
    (sentence,) = checkpoints.passed_over
    assert sentence.startswith(f"the checkpoint {tmp_path / 'run' / '2'} is not used: ")
    saved(checkpoints, 2).close()  # again, and beside the damaged one
    again = opened()
    np.testing.assert_array_equal(read(again)["w"], state(2)["w"])
    assert not again.passed_over
    assert any(name.startswith("2.damaged-") for name in names(tmp_path))


def test_other_values_are_named_by_leaf(opened, monkeypatch):
    saved(opened(), 1, 2).close()
    checkpoints = opened()
    whole = Checkpoints._read

    def rotten(self, step, like):
        found = whole(self, step, like)
        if step == 2:
            found["w"] = np.copy(found["w"])
            found["w"].view(np.uint8)[0, 0] ^= 1
        return found

    monkeypatch.setattr(Checkpoints, "_read", rotten)
    assert read(checkpoints)["step"] == 1
    assert "These leaves are not what was saved: ['w']" in checkpoints.passed_over[0]


def test_nothing_starts_anew_where_no_checkpoint_is_usable(opened, tmp_path):
    saved(opened(), 1).close()
    flip(largest(tmp_path / "run" / "1" / "state"))
    with pytest.raises(CheckpointError, match=r"cannot resume: the checkpoint .*/1 is not used"):
        read(opened())
    assert names(tmp_path) == ["1"]


def test_a_write_that_fails_harms_nothing_and_is_said(opened, tmp_path, capfd):
    checkpoints = saved(opened(), 1, 2)
    checkpoints._finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))  # as a full disk would
    try:
        with pytest.raises(WriteError, match="step 3 could not be written, and that of step 2 is"):
            saved(checkpoints, 3)._finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path)[:2] == ["1", "2"]
    assert read(opened())["step"] == 2
    assert names(tmp_path) == ["1", "2"]  # what was begun is gone
    assert capfd.readouterr() == ("", "")  # of orbax's stack trace


def test_one_that_was_not_written_as_it_should_replaces_none(opened, monkeypatch, tmp_path):
    checkpoints = saved(opened(keep=1), 1)
    monkeypatch.setattr(Checkpoints, "_read", lambda self, step, like: state(7))
    with pytest.raises(WriteError, match="step 1 could not be written"):
        saved(checkpoints, 2)
    assert names(tmp_path) == ["1"]


def test_a_directory_belongs_to_one_run(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("directories._LOCK_SECONDS", 0)
    opened()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for path in ("run", "link"):
        with pytest.raises(CheckpointError, match=r"in use by another run \(process \d+ on "):
            Checkpoints(tmp_path / path, every=1, keep=2, resume=True)


def test_what_another_run_wrote_while_this_one_waited_is_found(tmp_path, monkeypatch):
    first = Checkpoints(tmp_path / "run", every=1, keep=2, resume=False)

    def wait(directory):
        saved(first, 1, 2, 3).close()
        return directories.locked(directory)

    monkeypatch.setattr("checkpoints.locked", wait)
    second = Checkpoints(tmp_path / "run", every=1, keep=2, resume=True)
    assert read(second)["step"] == 3
    second.close()


def test_a_name_that_is_no_step_of_ours_is_left_alone(opened, tmp_path):
    saved(opened(), 1)
    (tmp_path / "run" / "030").mkdir()
    assert read(opened())["step"] == 1
    assert (tmp_path / "run" / "030").is_dir()


def test_a_directory_that_cannot_be_made_is_one_sentence():
    with pytest.raises(CheckpointError, match=r"^/proc/self/run cannot be written to: [A-Z]"):
        Checkpoints(pathlib.Path("/proc/self/run"), every=1, keep=2, resume=False)


def test_the_lock_of_a_killed_run_goes_with_it(tmp_path):
    program = (
        "import os, pathlib, sys; sys.path.insert(0, sys.argv[1]); import checkpoints;"
        "run = checkpoints.Checkpoints(pathlib.Path(sys.argv[2]), every=1, keep=2, resume=False);"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, LANGUAGE_MODEL, tmp_path / "run"]
    assert subprocess.run(command, check=False).returncode == -9
    Checkpoints(tmp_path / "run", every=1, keep=2, resume=True).close()
