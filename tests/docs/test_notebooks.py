"""The notebooks: what is committed of them is clean, and the one that needs torch runs.

`make docs` executes the others; its environment has no torch.
"""

import json
import re

import numpy as np
import pytest

from tests.helpers.control import assert_no_further
from tests.helpers.paths import ROOT
from tests.helpers.script import python

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/(?:home|root|tmp|usr|work|Users|private|var)/|site-packages")


# What the test adds to a notebook: the run that stays, its weights moved before every step.
CONTROL = """
import json
from tests.helpers.bridge import move_weights

model, optimizer = new_job()
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
control = []
for step in range(STEPS):
    if step >= LEAVE:
        move_weights(model, step)
    control.append(torch_step(model, optimizer, step))
print(json.dumps({"moved": moved, "stayed": stayed, "control": control}))
dist.destroy_process_group()
"""


def code_of(path):
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(path):
    return "\n\n".join("".join(cell["source"]) for cell in code_of(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_those_of_one_run_from_top_to_bottom(path):
    code = code_of(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # nothing failed
    assert not MACHINE.search("".join("".join(output.get("text", [])) for output in outputs))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_file_to_copy(path):
    assert not re.search(r"^\s*(?:from|import) (?:benchmarks|examples)\b", source(path), re.M)


@pytest.mark.torch
def test_the_notebook_that_needs_torch_runs_and_its_run_keeps_its_losses(tmp_path):
    text = source(ROOT / "docs/notebooks/torch_and_back.ipynb")
    end = "dist.destroy_process_group()"
    assert text.count(end) == 1
    program = tmp_path / "notebook.py"
    program.write_text(text.replace(end, CONTROL))
    environment = {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
    said = python(program, PYTHONPATH=str(ROOT), **environment)
    assert "largest relative difference: " in said
    losses = json.loads(said.splitlines()[-1])
    moved, stayed, control = (np.array(losses[name]) for name in ("moved", "stayed", "control"))
    assert_no_further(moved, stayed, control)
