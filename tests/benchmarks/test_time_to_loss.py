"""`benchmarks.time_to_loss`: both frameworks train the same thing; the page is of their runs."""

import json
import signal
from dataclasses import asdict, replace
from functools import partial

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from numpy.testing import assert_allclose

from benchmarks.cluster.command import EXIT_UNAVAILABLE
from benchmarks.cluster.jax_trainer import loss_of
from benchmarks.cluster.task import read_task
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.time_to_loss import __main__ as command
from benchmarks.time_to_loss import measure
from benchmarks.time_to_loss.report import PAGE, write_report
from benchmarks.time_to_loss.task import Config, task_of
from tests.helpers import networks
from tests.helpers.control import apart, assert_no_further
from tests.helpers.rounding import rounding

TINY = Config(steps=4, eval_every=2, sequences=2, layers=2, width=16, heads=2, context=8)
TINY = replace(TINY, eval_sequences=4)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, on import
def test_both_frameworks_compute_the_same_loss_and_gradient(tmp_path):
    from benchmarks.cluster import torch_models, torch_trainer

    task_of(TINY, 3).write(tmp_path / "3.npz")
    task = read_task(tmp_path / "3.npz")
    held_out = (task.held_inputs, task.held_targets)
    loss_of_params = jax.jit(jax.value_and_grad(partial(loss_of, task)))
    loss, grads = loss_of_params(unflatten_dict(task.params, sep="/"), held_out)
    other = torch_models.make_model(task)
    loss_in_torch = torch_trainer.loss_of(other, *torch_trainer.tensors(*held_out))
    loss_in_torch.backward()
    # A loss is a mean over tokens of sums over the width, through two products in each layer.
    terms = [task.held_inputs.size, *[TINY.width, 4 * TINY.width] * TINY.layers, 256]
    allowed = rounding(*terms, largest=loss)
    assert_allclose(loss_in_torch.item(), loss, rtol=0, atol=allowed)
    in_torch = {
        "mlp_in": other.get_submodule("block_1").mlp_in.weight.grad.numpy().T,
        "tokens": other.tokens.weight.grad.numpy(),
    }
    in_jax = {
        "mlp_in": grads["block_1"]["mlp_in"]["kernel"],
        "tokens": grads["tokens"]["embedding"],
    }
    for name, gradient in in_jax.items():  # a gradient goes the same way, and back
        allowed = rounding(*terms, *terms, largest=gradient)
        assert_allclose(in_torch[name], gradient, rtol=0, atol=allowed)


def test_the_page_shows_the_committed_runs(tmp_path):
    runs = read_runs(RESULTS / "time_to_loss.jsonl")
    picture, text = write_report(runs, asdict(Config()), tmp_path / "out")
    assert text.read_text() in PAGE.read_text()
    assert picture.stat().st_size > 1_000
    with pytest.raises(ValueError, match="no finished run of jax/allreduce"):
        write_report(runs, asdict(replace(Config(), steps=8)), tmp_path / "out")


def task_or_control(config, seed):
    """Makes the task of seed 0; as seed 1 the same task with parameters one rounding apart."""
    task = task_of(config, 0)
    return task._replace(params=apart(task.params)) if seed else task


def losses_of(run):
    """Returns a run's held-out losses, after 2 and after 4 steps."""
    losses = {step: loss for step, _, loss in run["curve"]}
    assert [*losses] == [2, 4]
    return np.array([*losses.values()])


@pytest.mark.torch
def test_a_small_run_in_both_frameworks_or_a_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)  # this process keeps its own
    monkeypatch.setattr(measure, "task_of", task_or_control)
    tiny = asdict(replace(TINY, layers=1))
    setting = [f"--{name.replace('_', '-')}={value}" for name, value in tiny.items()]
    setting += ["--rates", "100mbit", "--samples", "2", "--out", str(tmp_path / "out")]
    # Rank 16 is the width: low rank would send no less, so that the first phase is exact.
    phases = "jax/powersgd-16-every-2-from-2"
    whole_runs = f"jax/allreduce,torch/allreduce,{phases},torch/local-sgd-2"
    code = command.main([*setting, "--runs", whole_runs, "--seeds", "2"])
    code = code or command.main([*setting, "--runs", "jax/local-sgd-2", "--times"])
    if not networks.work_here():
        assert code == EXIT_UNAVAILABLE
        return
    assert code == 0, capsys.readouterr().err
    *runs, times = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    exact, torch, two_phases, local, control, torch_control, *_ = runs
    expected = losses_of(exact)
    assert_no_further(losses_of(torch), expected, losses_of(control))
    assert_no_further(losses_of(torch_control), losses_of(control), expected)
    assert_no_further(losses_of(two_phases)[:1], expected[:1], losses_of(control)[:1])
    for fewer in (two_phases, local):
        assert fewer["sent_per_step"] < 0.9 * exact["sent_per_step"]
    # Two processes send each number once, and some headers.
    assert exact["sent_per_step"] == pytest.approx(4 * exact["parameters"], rel=0.2)
    assert times["framework"] == "jax"
    assert times["strategy"] == "local-sgd-2"
    assert times["steps_per_call"] == 2
    assert len(times["seconds"]["100mbit"]) == 2
