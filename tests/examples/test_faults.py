"""Harms runs on many hosts, with real processes: the example ends, and goes on from there."""

import os
import re
import resource
import shutil
import signal

import checkpoints as module
import lm
import numpy as np
import pytest
import train
from checkpoints import CheckpointError, Checkpoints
from numpy.testing import assert_array_equal

from tests.helpers import many_faults
from tests.helpers.control import apart, assert_no_further
from tests.helpers.job import Job, in_this_process
from tests.helpers.many_faults import MODEL, curve, files_of, flipped, losses_of, saved

SHORT = [*MODEL, "--steps", 12, "--eval-every", 3, "--checkpoint-every", 4]
LONG = [*MODEL, "--steps", 100_000, "--eval-every", 100_000]
STOPPED = 75


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the curve of one process with two devices; it goes on with what it saves, too."""
    here = tmp_path_factory.mktemp("whole")
    files = ["--log", here / "log", "--checkpoint-dir", here / "run"]
    with Job(1, here, *SHORT, "--devices", 2, *files) as job:
        assert job.codes() == [0], job.said()
    return curve(here / "log")


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    """Returns the same curve of a run whose first parameters are one rounding apart."""
    here = tmp_path_factory.mktemp("control")
    init_params = lm.init_params

    def moved_params(*arguments):
        return apart(init_params(*arguments))

    files = ["--log", here / "log", "--checkpoint-dir", here / "run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "init_params", moved_params)
        in_this_process(train, *SHORT, "--devices", 2, *files)
    return curve(here / "log")


def test_sigterm_in_the_first_second_ends_a_process_that_has_done_nothing(tmp_path):
    with Job(1, tmp_path, *LONG, "--checkpoint-dir", tmp_path / "run") as job:
        job.signal(signal.SIGTERM)
        assert job.codes(10) == [-signal.SIGTERM]
    assert not saved(tmp_path / "run")


def test_without_a_directory_it_says_that_nothing_is_saved(tmp_path):
    with Job(1, tmp_path, *LONG, "--devices", 2) as job:
        job.wait_until(lambda: "from step 0" in job.said())
        job.signal(signal.SIGINT)
        assert job.codes() == [128 + signal.SIGTERM]
        assert "nothing is saved without --checkpoint-dir" in job.said()


def test_a_process_that_dies_ends_the_other_and_one_process_goes_on(tmp_path, undisturbed, control):
    """Two processes with a device each, then one process with two."""
    (tmp_path / "run").mkdir()
    arguments = [*SHORT, "--log", tmp_path / "log", "--checkpoint-dir", tmp_path / "run"]
    arguments += ["--resume", "--heartbeat-timeout", 10]
    with Job(2, tmp_path, *arguments, "--devices", 1, "--steps", 12) as job:
        job.wait_until(lambda: bool(saved(tmp_path / "run")))
        job.signal(signal.SIGKILL, 1)
        assert job.codes(60)[0] != 0 or saved(tmp_path / "run")[-1] == 12
        assert "step" not in job.said(1)  # only process 0 prints
        assert 'train.py", line' not in job.said()  # threads of orbax have tracebacks of their own
    newest = saved(tmp_path / "run")[-1]
    with Job(1, tmp_path, *arguments, "--devices", 2) as job:
        assert job.codes() == [0], job.said()
        assert f"on 2 cpu devices of 1 processes, from step {newest}\n" in job.said()
    resumed = curve(tmp_path / "log")
    assert resumed.keys() == undisturbed.keys()
    assert all(resumed[step][2] == undisturbed[step][2] for step in resumed)  # bytes
    # Two devices of one process and of two add in another order. The logged loss is of the whole
    # batch.
    assert_no_further(*map(losses_of, (resumed, undisturbed, control)))


def test_a_full_disk_ends_both_processes_with_a_sentence(tmp_path):
    """As far as it goes: a limit on each file, which the state is above."""
    (tmp_path / "run").mkdir()
    arguments = [*SHORT, "--devices", 1, "--checkpoint-dir", tmp_path / "run", "--resume"]
    with Job(2, tmp_path, *arguments, largest_file=40_000) as job:  # what they say is one, too
        assert job.codes() == [2, 2], job.said() + job.said(1)
        for i in range(2):
            (sentence,) = re.findall(rf"^process {i}: error: .*$", job.said(i), re.MULTILINE)
            assert "could not be written" in sentence or "could not write" in sentence
            # tensorstore may answer with tracebacks of its own when orbax has given up already.
            assert 'train.py", line' not in job.said(i)


def slurm(process):
    """Returns what srun sets; the first of the nodes holds the coordinator."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost,another",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def test_sigterm_to_one_of_two_stops_both_after_a_saved_step_from_which_one_goes_on(tmp_path):
    """From the first moment at which they say that they begin; Slurm says who the others are."""
    arguments = [*LONG, "--devices", 1, "--checkpoint-dir", tmp_path / "run"]
    with Job(2, tmp_path, *arguments, scheduler=slurm) as job:
        job.wait_until(lambda: "from step 0" in job.said())
        job.signal(signal.SIGTERM, 1)
        assert job.codes() == [STOPPED, STOPPED], job.said() + job.said(1)
        (step,) = saved(tmp_path / "run")
        for i in range(2):
            assert f"stopped by a signal after step {step}, which is saved" in job.said(i)
    arguments = [*LONG, "--devices", 2, "--checkpoint-dir", tmp_path / "run"]
    with Job(1, tmp_path, *arguments, "--resume", "--stop-at", step + 1) as job:
        assert job.codes() == [0], job.said()
        assert f"from step {step}\n" in job.said()


def test_sigterm_while_the_processes_connect_is_not_lost(tmp_path):
    """As JAX loses it: the run went on."""
    arguments = [*LONG, "--devices", 1, "--start-timeout", 30, "--heartbeat-timeout", 10]
    with Job(2, tmp_path, *arguments) as job:
        job.wait_until(lambda: "Gloo" in job.said(1))
        job.signal(signal.SIGTERM, 1)
        assert 0 not in job.codes()


def test_processes_that_begin_with_different_parameters_are_refused(tmp_path):
    seeds = [["--seed", "0"], ["--seed", "1"]]
    with Job(2, tmp_path, *SHORT, "--devices", 1, each=seeds) as job:
        assert 0 not in job.codes()
        assert any("is not the same on each process" in job.said(i) for i in range(2)), (
            job.said() + job.said(1)
        )


def test_who_the_others_are_must_be_known(tmp_path):
    with Job(1, tmp_path, *SHORT, scheduler=lambda process: {}) as job:
        assert job.codes() == [2]
        (line,) = job.said().splitlines()
        assert "the other processes cannot be found: pass --coordinator, --processes" in line


STATE = {"w": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30), "b": np.ones(3)}


def written(directory, *numbers):
    checkpoints = Checkpoints(directory, keep=2, resume=False)
    for number in numbers:
        checkpoints.save(number, STATE | {"b": STATE["b"] * number}, {"config": {"--rank": 4}})
    checkpoints.close()
    return directory


def restored(directory):
    state, about = many_faults.restored(directory, STATE, {"--rank": 4})
    return about["step"], state


def test_the_newest_is_restored_and_the_last_are_kept(tmp_path):
    step, state = restored(written(tmp_path / "run", 1, 2, 3))
    assert step == 3
    assert_array_equal(state["w"], STATE["w"])
    assert_array_equal(state["b"], [3, 3, 3])
    assert saved(tmp_path / "run") == [2, 3]


def test_one_process_has_orbaxs_twenty_minutes_to_write(tmp_path, monkeypatch):
    """It has less beside others, who wait for it: a large model or a pause would end the run."""
    monkeypatch.setattr(module.ocp, "AsyncOptions", None)
    written(tmp_path / "run", 1)


def test_a_flipped_bit_is_named_or_harmless_and_never_goes_unnoticed(tmp_path):
    """Flips a bit in the middle and at the end of each file; what was saved is restored."""
    newest = written(tmp_path / "run", 1, 2) / "2"
    spots = [(file, k, 2) for file, size in files_of(newest) for k in (size // 2, size - 1)]
    refused = flipped(spots, lambda: restored(tmp_path / "run"))
    assert len(refused) >= 4
    assert all(said.startswith(str(newest)) for said in refused)
    assert all("to resume from the checkpoint before it, move" in said for said in refused)
    assert restored(tmp_path / "run")[0] == 2
    shutil.move(newest, tmp_path)  # as the sentence says
    assert restored(tmp_path / "run")[0] == 1


def test_another_value_is_named_by_its_leaf(tmp_path, monkeypatch):
    directory = written(tmp_path / "run", 1)
    plain = module.checksums
    other = {"['w']": "float32[20, 30] 00000000"}
    monkeypatch.setattr(module, "checksums", lambda tree: plain(tree) | other)
    with pytest.raises(CheckpointError, match=r"is damaged: \['w'\] is not what was saved"):
        restored(directory)


@pytest.mark.parametrize("name", ["200", str(2**31 + 7)])
def test_the_name_of_a_directory_is_not_believed(tmp_path, name):
    directory = written(tmp_path / "run", 180)
    shutil.copytree(directory / "180", directory / name)
    with pytest.raises(CheckpointError, match=f"{name} holds step 180; to resume"):
        restored(directory)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    """One of another run is in test_examples.py."""
    directory = written(tmp_path / "run", 1)
    shutil.rmtree(directory / "1" / "run")
    with pytest.raises(CheckpointError, match="truncated, damaged or from another program"):
        restored(directory)


def test_a_full_disk_is_said_and_what_is_half_written_is_passed_over(tmp_path):
    """As far as the checkpoint goes: a limit on each file."""
    directory = written(tmp_path / "run", 1)
    checkpoints = Checkpoints(directory, keep=2, resume=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        checkpoints.save(2, STATE, {"config": {"--rank": 4}})
        with pytest.raises(CheckpointError, match="could not be written, and earlier ones are"):
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(directory.glob("2.*"))  # orbax's temporary directory, not renamed
    assert restored(directory)[0] == 1
