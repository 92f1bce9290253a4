"""What several files of tests have around them: a process group, and a folder for commands."""

import cli_model
import pytest
import torch
import torch.distributed as dist

from torch_bridge.__main__ import main


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs a command where checkpoint.pt lies; (code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    torch.save(cli_model.document(), "checkpoint.pt")

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's, for wrong usage
            code = stop.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run
