"""`benchmarks.time_to_loss`: both frameworks train the same thing; the page is of their runs."""

import json
import signal
from dataclasses import asdict, replace
from functools import partial

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from benchmarks.cluster.command import EXIT_UNAVAILABLE
from benchmarks.cluster.jax_trainer import loss_of
from benchmarks.cluster.task import read_task
from benchmarks.common.paths import RESULTS
from benchmarks.common.runs import read_runs
from benchmarks.time_to_loss import __main__ as command
from benchmarks.time_to_loss.report import PAGE, write_report
from benchmarks.time_to_loss.task import Config, task_of
from tests.helpers import networks
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
    np.testing.assert_allclose(loss_in_torch.item(), loss, rtol=0, atol=allowed)
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
        np.testing.assert_allclose(in_torch[name], gradient, rtol=0, atol=allowed)


def test_the_page_shows_the_committed_runs(tmp_path):
    runs = read_runs(RESULTS / "time_to_loss.jsonl")
    picture, text = write_report(runs, asdict(Config()), tmp_path / "out")
    assert text.read_text() in PAGE.read_text()
    assert picture.stat().st_size > 1_000
    with pytest.raises(ValueError, match="no finished run of jax/allreduce"):
        write_report(runs, asdict(replace(Config(), steps=8)), tmp_path / "out")


@pytest.mark.torch
def test_a_small_run_in_both_frameworks_or_a_refusal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)  # this process keeps its own
    tiny = asdict(replace(TINY, layers=1))
    setting = [f"--{name.replace('_', '-')}={value}" for name, value in tiny.items()]
    setting += ["--rates", "100mbit", "--samples", "2", "--out", str(tmp_path / "out")]
    timed_run, phases = "torch/local-sgd-2", "jax/powersgd-2-every-2-from-2"
    code = command.main([*setting, "--runs", f"jax/allreduce,torch/allreduce,{phases}"])
    code = code or command.main([*setting, "--runs", timed_run, "--times"])
    if not networks.work_here():
        assert code == EXIT_UNAVAILABLE
        return
    assert code == 0, capsys.readouterr().err
    runs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    exact, torch, two_phases, times = runs
    assert [step for step, _, _ in exact["curve"]] == [2, 4]
    assert torch["curve"][-1][2] == pytest.approx(exact["curve"][-1][2], rel=1e-4)
    assert two_phases["curve"][0][2] == pytest.approx(exact["curve"][0][2], rel=0.01)
    assert two_phases["sent_per_step"] < exact["sent_per_step"]
    assert exact["sent_per_step"] == pytest.approx(4 * exact["parameters"], rel=0.2)
    assert f"torch/{times['strategy']}" == timed_run
    assert times["steps_per_call"] == 2
    assert len(times["seconds"]["100mbit"]) == 2
