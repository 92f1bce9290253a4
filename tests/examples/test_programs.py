"""The programs to copy, run as a user runs them, and what they say."""

import os
import re
import runpy
import signal
import subprocess
import sys

import include
import jax
import pytest

from tests.helpers.paths import EXAMPLES, imports
from tests.helpers.script import python

PROGRAMS = sorted(EXAMPLES.glob("*.py"))


def output(name, *changes):
    """Runs a program in a process of its own, as each makes its own number of devices."""
    source = (EXAMPLES / name).read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return python("-c", source, JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_is_one_file_that_needs_nothing_of_ours_but_jaxcomp(program):
    source = program.read_text()
    assert len(source.splitlines()) < 100
    ours = {path.stem for path in EXAMPLES.rglob("*.py")}
    assert ours.isdisjoint(name.split(".")[0] for name in imports(source))


@pytest.mark.parametrize("page", include.pages(), ids=lambda path: path.name)
def test_the_documents_show_the_programs_as_they_are(page):
    assert page.read_text() == include.included(page.read_text()), "run python docs/include.py"


@pytest.mark.parametrize("name", ["jit_loop", "quickstart", "diloco"])
def test_an_interrupted_program_ends_with_a_sentence(name, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", [f"{name}.py"])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # of devices, which are there
    monkeypatch.setattr(jax, "jit", interrupt)
    with pytest.raises(SystemExit, match=rf"^{name}\.py: interrupted$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_ctrl_c_ends_a_program_that_saves_with_its_last_checkpoint(tmp_path):
    source = (EXAMPLES / "resume.py").read_text()
    steps = "STEPS, BATCH = 60"
    assert steps in source
    # What a shell starts in the background ignores the signal, and so would what that starts.
    command = ["env", "--default-signal=INT", sys.executable, "-u", "-c"]
    command += [source.replace(steps, "STEPS, BATCH = 10**9"), tmp_path / "run"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()  # a program that does not end would keep the suite waiting
    assert errors == "resume.py: interrupted; the last checkpoint is of step 0\n"


def test_a_full_disk_ends_a_program_that_saves_with_its_last_checkpoint(tmp_path):
    """As far as it goes: a limit on each file."""
    command = ["bash", "-c", 'ulimit -f 8; exec "$@"', "-", sys.executable, EXAMPLES / "resume.py"]
    done = subprocess.run(
        [*command, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},  # needs a disk
    )
    assert done.returncode == 1
    sentence = r"^resume\.py: not saved, the last checkpoint is of step 0 \(.*File too large.*\)$"
    assert re.search(sentence, done.stderr, re.MULTILINE), done.stderr
    # Threads of orbax that finish behind the error may print tracebacks of their own.
    assert 'resume.py", line' not in done.stderr


def excess_and_ratio(printed):
    (excess,) = re.findall(r"([+-][\d.]+)%", printed)
    (ratio,) = re.findall(r"([\d.]+) times fewer bytes", printed)
    return float(excess), float(ratio)


def test_the_quick_start_ends_near_the_exact_loss():
    smaller = "STEPS, BATCH, CONTEXT = 300, 512", "STEPS, BATCH, CONTEXT = 60, 128"
    excess, ratio = excess_and_ratio(output("quickstart.py", smaller))
    assert excess < 2
    assert ratio > 10


def test_diloco_ends_near_the_exact_loss():
    excess, ratio = excess_and_ratio(output("diloco.py", ("STEPS = 512", "STEPS = 256")))
    assert excess < 2
    assert ratio == 16
