"""The notebooks: what is committed of them is clean, and the one that needs torch runs.

`make docs` executes the others; its environment has no torch.
"""

import json
import re

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.script import python

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/(?:home|root|tmp|usr|work|Users|private|var)/|site-packages")


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
    program = tmp_path / "notebook.py"
    program.write_text(source(ROOT / "docs/notebooks/torch_and_back.ipynb"))
    said = python(program, JAX_PLATFORMS="cpu", MPLBACKEND="Agg", TMPDIR=str(tmp_path))
    (apart,) = re.findall(r"largest relative difference: (\S+)", said)
    assert float(apart) < 1e-4
