"""The commands answer wrong arguments in one sentence."""

import importlib
import os
import sys

import pytest

import benchmarks.cluster.__main__ as cluster
from benchmarks.cluster.command import EXIT_UNAVAILABLE

WRONG = """
cluster --rates=0mbit | --rates: takes 'unlimited' or a rate such as 100mbit
cluster --strategies=powersgd-0 | --strategies: has no 'powersgd-0'
cluster --strategies=powersgd-2-every-2-from-4 | are of two kinds, powersgd-2 and powersgd
cluster --models resnet | --models: has no 'resnet'; there are mlp, transformer
cluster --processes 1 | --processes: must be at least 2, got 1
cluster --seconds-per-case nan | --seconds-per-case: must be at least 0.1, got nan
overhead --ranks 0 | --ranks: must be at least 1, got 0
time_to_loss --runs allreduce | --runs: takes framework/strategy
time_to_loss --runs torch/int8 | which torch does not have
time_to_loss --runs jax/powersgd-2-every-4-from-6 | begin after a multiple of 4 steps
time_to_loss --width 100 | width must be a multiple of heads
optimizers --optimizers adagrad | --optimizers: has no 'adagrad'; there are adamw, muon
gpu_program --trees oak | has no 'oak'
convergence --only nothing | no strategy is called 'nothing'
convergence --steps 5 --eval-every 2 --out {tmp}/x | steps must be a multiple of eval_every
convergence --report --out {tmp}/x | no finished run of allreduce
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_arguments(line, capsys, tmp_path):
    command, message = line.split(" | ")
    name, *arguments = command.format(tmp=tmp_path).split()
    main = importlib.import_module(f"benchmarks.{name}.__main__").main
    with pytest.raises(SystemExit) as stopped:
        sys.exit(main(arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("user", "path", "message"),
    [
        (1000, os.environ["PATH"], "needs root on Linux: run it with sudo"),
        (0, "", "apt-get install iproute2 util-linux"),
    ],
)
def test_what_the_machine_lacks_is_said(user, path, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", path)
    assert cluster.main(["--out", str(tmp_path / "out")]) == EXIT_UNAVAILABLE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
