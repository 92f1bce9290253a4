"""Where torch is not installed, what needs it says so in one sentence; the rest works."""

import re
import sys

import numpy as np
import optax
import pytest

import jaxcomp
import torch_bridge
from tests.helpers.paths import ROOT, imports
from tests.helpers.script import python
from torch_bridge.__main__ import USAGE, main

SENTENCE = (
    "This needs torch, which is not installed: pip install torch. Reading a file and going to Flax "
    "need no torch."
)
KERNEL = np.zeros((12, 8), np.float32)
PARAMS = {"fc": {"kernel": KERNEL}}
LIKE = torch_bridge.Checkpoint({"fc.weight": KERNEL.T})
LAYOUT = torch_bridge.BucketLayout.from_order([["fc.weight"]], {"fc.weight": KERNEL.T})
REDUCER = jaxcomp.powersgd(1, axis_name="data").init(PARAMS)
MOMENTUM = optax.sgd(0.1, momentum=0.9).init(PARAMS)
GROUP = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
RECORD = torch_bridge.PowerSGDRecord(1, 20, {0: np.ones(96, np.float32)}, {}, {})

NEED_IT = {
    "optimizer_to_torch": lambda path: torch_bridge.optimizer_to_torch(
        MOMENTUM, PARAMS, {"state": {}, "param_groups": [GROUP]}, LIKE.model
    ),
    "powersgd_to_torch": lambda path: torch_bridge.powersgd_to_torch(
        REDUCER, PARAMS, layout=LAYOUT
    ),
    "resume_powersgd": lambda path: torch_bridge.resume_powersgd(None, RECORD, LAYOUT, print),
    "save_checkpoint": lambda path: torch_bridge.save_checkpoint(path, None, None),
    "state_from_record": lambda path: torch_bridge.state_from_record(RECORD),
    "to_torch": lambda path: torch_bridge.to_torch(PARAMS, (), LIKE, path=path),
    "waiting_hook": lambda path: torch_bridge.waiting_hook(None, None),
}


@pytest.fixture(autouse=True)
def _hidden(monkeypatch):
    """Hides torch, as where it is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("name", NEED_IT)
def test_a_function_that_needs_torch_says_so(name, tmp_path):
    with pytest.raises(ModuleNotFoundError) as caught:
        NEED_IT[name](tmp_path / "run.pt")
    assert str(caught.value) == SENTENCE
    assert caught.value.name == "torch"
    assert caught.value.__suppress_context__
    assert not list(tmp_path.iterdir())


def test_what_torch_itself_lacks_is_named_as_it_is(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import sympy_of_torch")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'sympy_of_torch'$"):
        torch_bridge.state_from_record(RECORD)


def test_the_command_line_says_it_in_one_line(capsys, tmp_path):
    files = [str(tmp_path / name) for name in ("jax", "torch.pt", "out.pt")]
    source, like, out = files
    command = ["to-torch", source, "--like", like, "--out", out]
    assert main(command) == USAGE
    assert capsys.readouterr() == ("", f"error: {SENTENCE}\n")


def test_the_help_needs_nothing():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'flax', 'orbax')));"
        "from torch_bridge.__main__ import main; main(['--help'])"
    )
    assert python("-c", code, cwd=ROOT).startswith("usage: python -m torch_bridge")


def test_no_file_imports_torch_past_its_owner():
    for file in (ROOT / "torch_bridge").glob("**/*.py"):
        source = re.sub(r"^if TYPE_CHECKING:\n(?:    .*\n|\n)+", "", file.read_text(), flags=re.M)
        assert "torch" not in {name.partition(".")[0] for name in imports(source)}, file
