"""What the tests of the command line have around them: a folder with a file."""

import importlib.util

import pytest

from torch_bridge.__main__ import main

# tests/conftest.py leaves this folder out without torch, but not when the folder is named.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs a command where checkpoint.pt lies; (code, standard output, standard error)."""
    import torch

    from tests.helpers import cli_model

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
