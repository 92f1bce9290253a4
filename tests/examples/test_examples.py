"""The example scripts, at the smallest sizes that still compress.

All run in this process, which has imported everything; `train.py` runs as a user runs it in
test_faults.py.
"""

import functools
import importlib
import json
import re
import runpy
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import demo
import hybrid_mesh
import jax
import lm
import numpy as np
import pytest
import train

import jaxcomp
from tests.helpers.control import apart, assert_no_further
from tests.helpers.job import in_this_process as here
from tests.helpers.many_faults import MODEL, curve, losses_of, saved
from tests.helpers.paths import EXAMPLES

STEPS = 12
STOP = 6


def program(name):
    """Returns a program to copy as if it were a module: its `main` runs all of it."""
    path = str(EXAMPLES / f"{name}.py")
    return SimpleNamespace(__name__=name, main=partial(runpy.run_path, path, run_name="__main__"))


PROGRAMS = {name: program(name) for name in ("resume", "jit_loop", "quickstart", "diloco")}
TINY = [*MODEL, "--steps", STEPS, "--eval-every", 3, "--checkpoint-every", 2]


@pytest.fixture(scope="module", autouse=True)
def devices():
    """Makes all eight before a script that runs in this process asks for another number."""
    return jax.devices()


@pytest.fixture(scope="module", autouse=True)
def made_once():
    """Keeps the text and parameters of runs here; a process of its own makes them again."""
    init_params = lm.init_params
    initial = functools.cache(lambda *arguments: jax.device_get(init_params(*arguments)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_mesh, "load_corpus", functools.cache(lm.load_corpus))
        patch.setattr(lm, "load_corpus", hybrid_mesh.load_corpus)
        patch.setattr(lm, "init_params", initial)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with `train.py` and returns the curve and what it prints."""
    directory = tmp_path_factory.mktemp("logs")

    def run(log, *arguments):
        printed = here(train, *TINY, "--log", directory / log, *arguments)
        with (directory / log).open() as file:
            assert json.loads(file.readline())["config"]["steps"] == STEPS
        return curve(directory / log), printed

    return run


@pytest.fixture(scope="module")
def uninterrupted(trained, tmp_path_factory):
    # It saves as the others do: what is saved is a mean of residuals, from which it goes on itself.
    directory = tmp_path_factory.mktemp("whole") / "checkpoints"
    return trained("whole", "--devices", 4, "--checkpoint-dir", directory)[0]


@pytest.fixture(scope="module")
def interrupted(trained, tmp_path_factory):
    """Returns the checkpoints of a run that stopped half way, for each test to copy."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    trained(
        "resumed", "--devices", 4, "--checkpoint-dir", directory, "--keep", 2, "--stop-at", STOP
    )
    return directory


def test_the_curve_goes_down_and_counts_bytes(uninterrupted):
    first = uninterrupted[3]
    last = uninterrupted[STEPS]
    assert last[1] < first[1] < 5.6
    # Two exact steps and then compressed ones; between two records only compressed ones.
    per_step = (last[2] - first[2]) / (STEPS - 3)
    assert per_step == (uninterrupted[6][2] - first[2]) / 3
    assert (first[2] - per_step) / 2 > 4 * per_step


def test_resuming_continues_the_curve_exactly(trained, uninterrupted, interrupted, tmp_path):
    directory = shutil.copytree(interrupted, tmp_path / "checkpoints")
    assert saved(directory) == [STOP - 2, STOP]  # --keep 2
    resumed, output = trained("resumed", "--devices", 4, "--checkpoint-dir", directory, "--resume")
    assert f"from step {STOP}" in output
    assert resumed.keys() == uninterrupted.keys()
    # Bit for bit: a run goes on with the state that it saved.
    for step, values in uninterrupted.items():
        np.testing.assert_array_equal(resumed[step], values)


def test_resuming_on_another_number_of_devices(
    trained, uninterrupted, interrupted, tmp_path, monkeypatch
):
    directory = shutil.copytree(interrupted, tmp_path / "checkpoints")
    resumed, _ = trained("two", "--devices", 2, "--checkpoint-dir", directory, "--resume")
    # The new log begins where the run was resumed.
    assert min(resumed) > STOP

    restore = train.Run.restore

    def restore_moved(run, start, state, bytes_sent):
        restore(run, start, apart(state), bytes_sent)

    monkeypatch.setattr(train.Run, "restore", restore_moved)
    directory = shutil.copytree(interrupted, tmp_path / "control")
    control, _ = trained("control", "--devices", 4, "--checkpoint-dir", directory, "--resume")
    assert control.keys() == resumed.keys()
    expected = {step: uninterrupted[step] for step in resumed}
    assert_no_further(losses_of(resumed), losses_of(expected), losses_of(control))


WRONG = """
train --strategy magic | invalid choice: 'magic'
train --batch-size 9 --devices 4 | --batch-size 9 is not a multiple of the 4
train --rank 0 --steps -1 | --rank must be positive; --steps must be positive
train --strategy int8 --comm-dtype int6 | --comm-dtype int6 is only for the factors of
train --width 30 --heads 4 | --width 30 is not a multiple of --heads 4
train --devices 9999 | at most 8, got 9999
train --context 999999999 | is longer than the text
train --resume | --resume needs --checkpoint-dir
train --resume --checkpoint-dir {tmp}/none | /none does not exist
train --checkpoint-dir {tmp}/none/run | /none does not exist
train --log {tmp}/none/log | none/log could not be written ([Errno 2] No such file
train --checkpoint-dir {tmp}/file | /file is a file; checkpoints need a directory
train --log {tmp} | is a directory; --log needs a file
train --log /dev/full | log /dev/full could not be written ([Errno 28] No space left
train --checkpoint-dir {saved} | already holds checkpoints: add --resume
train --checkpoint-dir {saved} --resume --width 64 | with --width 32, not
train --checkpoint-dir {saved} --resume --rank 3 | with --rank 2, not
train --checkpoint-dir {saved} --resume --strategy allreduce | with --strategy powersgd, not
resume {tmp}/run --replicas 3 | --replicas must divide the batch of 64, got 3
resume {tmp}/file | /file: File exists; checkpoints need a directory
resume {tmp}/file/below | /file/below: Not a directory
quickstart --steps 3 | unrecognized arguments: --steps 3
diloco --steps 3 | unrecognized arguments: --steps 3
resume | required: directory
jit_loop --steps -3 | --steps must be at least 3, got -3
hybrid_mesh --rank -1 | --rank positive or 0
hybrid_mesh --width 24 | --width must be a multiple of 16
local_sgd --width 30 | --width must be a multiple of 4
local_sgd --steps 48 | --eval-every must be a multiple of 32
local_sgd --replicas 99 --batch-size 99 | at most 8, got 99
local_sgd --plot {tmp}/none/x.png | cannot write to
demo --ranks 0 | --ranks and --devices must be positive
demo --output {tmp}/file/x | cannot be a directory (Not a directory
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_input_gives_one_sentence(line, capsys, tmp_path, interrupted):
    command, message = line.split(" | ")
    (tmp_path / "file").touch()
    name, *arguments = command.format(tmp=tmp_path, saved=interrupted).split()
    if name == "train":
        arguments = [*TINY, "--devices", 4, *arguments]
    with pytest.raises(SystemExit) as exit_:
        here(PROGRAMS.get(name) or importlib.import_module(name), *arguments)
    assert exit_.value.code == 2
    *usage, said = capsys.readouterr().err.strip().splitlines()
    assert not usage or name in PROGRAMS
    assert said.startswith(f"{name}.py: error: ")
    assert message in said


@pytest.mark.parametrize(("strategy", "wire"), [("powersgd", "int6"), ("int8", "float32")])
def test_without_options_it_compresses_from_the_first_step_on(strategy, wire):
    config = train.config_of(train.parser().parse_args(["--strategy", strategy]))
    config.check()
    assert config.start_step == 0
    assert config.comm_dtype == wire


def test_a_log_that_was_cut_off_goes_on(tmp_path):
    path = tmp_path / "curve.jsonl"
    path.write_text('{"config": 1}\n{"step": 10}\n{"step": 2')
    train.Log(path, train.RunConfig(), start=10)
    assert path.read_text() == '{"config": 1}\n{"step": 10}\n'


@pytest.mark.parametrize("mode", hybrid_mesh.MODES)
def test_hybrid_mesh_trains_and_sends_what_the_stats_say(mode):
    arguments = ["--mode", mode, "--width", 32, "--steps", 20, "--rank", 2]
    printed = here(hybrid_mesh, *arguments)
    (sent,) = re.findall(r"bytes between hosts, per device and step: ([\d,]+)", printed)
    sizes = lm.ModelConfig(layers=2, width=32, heads=4, context=64)
    params = lm.init_params(lm.Transformer(sizes), 0)
    stats = jaxcomp.powersgd(2, axis_name=hybrid_mesh.SLOW).bytes(params)
    spec = partial(hybrid_mesh.weight_spec, mode, 4)
    specs = jax.tree.leaves(jax.tree_util.tree_map_with_path(spec, params))
    expected = 0
    for leaf, spec in zip(stats.leaves, specs, strict=True):
        # Of a factor, or of a weight that is split, each of a host's four devices sends a part.
        parts = 4 if mode != "replicated" and (leaf.rank or hybrid_mesh.FAST in spec) else 1
        expected += leaf.bytes_after // parts
    assert int(sent.replace(",", "")) == expected
    tenth, twentieth = map(float, re.findall(r"loss ([\d.]+)", printed))
    assert twentieth < tenth < np.log(256)


def test_demo_writes_its_table_picture_and_json(tmp_path, monkeypatch):
    small = replace(demo.CONFIG, layers=1, heads=2, context=16, eval_sequences=16)
    monkeypatch.setattr(demo, "CONFIG", small)
    arguments = ["--steps", 4, "--width", 32, "--ranks", 2, "--devices", 2]
    printed = here(demo, *arguments, "--output", tmp_path / "new" / "out")
    assert len(re.findall(r"the factors carried \d+% in the last step", printed)) == 3
    *_, first, _, _, _, last = printed.strip().splitlines()
    assert first.startswith("The exact average sends")
    assert last.endswith("demo.png")
    assert (tmp_path / "new/out/demo.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "new/out/demo.json").read_text())["results"]
    names = [result["name"] for result in results]
    assert names[1:3] == ["PowerSGD rank 2", "PowerSGD rank 10, int6"]
    exact, compressed, narrow, by_spectrum = (result["ratio"] for result in results)
    assert exact == 1
    assert min(compressed, narrow) > 5
    assert by_spectrum == pytest.approx(narrow, rel=0.1)
    for result in results:
        assert len(result["steps"]) == len(result["held_out"]) == len(result["bytes_sent"])


def test_the_corpus_is_split_by_file_and_skips_tests(tmp_path):
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(f"{i:04}\n")
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "tests" / "no.py").write_text("none\n")
    corpus = lm.load_corpus(tmp_path)
    train, held_out = (set(bytes(x).split()) for x in (corpus.train, corpus.held_out))
    assert len(train) > len(held_out) > 0
    assert not train & held_out
    assert b"none" not in train | held_out
    with pytest.raises(ValueError, match="source was not found"):
        lm.load_corpus(tmp_path / "pkg")
