"""What the adviser knows of programs for GPUs is what was counted."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.common.paths import RESULTS
from benchmarks.gpu_program import fit
from benchmarks.gpu_program.fit import COMMAND, FLOORS, MODULE, fitted, with_forms
from benchmarks.overhead.trees import TREES
from jaxcomp._adviser.programs import FORMS, Form, gpu_program
from jaxcomp.extend import plan_leaves

SHAPES = {
    "few": {"a": (96, 96), "b": (96, 96), "c": (96, 96), "bias": (96,)},
    "many": {f"{k}_{i}": (64 * (k + 1), 128) for i in range(9) for k in range(5)},
    "odd": {f"a_{i}": (70 + i, 300) for i in range(12)} | {"b": (70, 300), "bias": (300,)},
    "large": {f"{k}_{i}": (1024, 1025 + k) for i in range(4) for k in range(3)},
    "largest": {f"a_{i}": (1100, 1024) for i in range(9)}
    | {f"b_{i}": (90, 300) for i in range(40)},
    "small": {"a": (40, 500)} | {f"bias_{i}": (i + 1,) for i in range(30)},
}


@pytest.fixture
def trees(monkeypatch):
    for name, shapes in SHAPES.items():
        monkeypatch.setitem(TREES, name, lambda shapes=shapes: shapes)


def counted(reducer, form, monkeypatch):
    """Cases as a run would have counted them if the form were exact."""
    monkeypatch.setitem(FORMS, "made", form)
    cases = []
    for tree, shapes in SHAPES.items():
        leaves = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
        values = sum(x.size for x in leaves.values())
        for rank in (1, 2, 4, 8, 16):
            kernels, words = gpu_program("made", plan_leaves(leaves, rank, 2.0))
            case = {"tree": tree, "reducer": reducer, "rank": rank, "values": values}
            cases.append(case | {"kernels": kernels, "words": words / values})
    return cases


def test_factors_are_found_again(trees, monkeypatch):
    form = Form(7, (30.0, 6.0, 9.0, 2.0, 4.0, 0.5, 1.0), (1.5, 0.5, 3.0, 25.0, 2.0, 1.0))
    cases = counted("powersgd", form, monkeypatch)
    cases.append({"tree": "few", "reducer": "powersgd", "rank": 4, "error": "no memory"})
    found = fitted(cases, "powersgd")
    assert found.kernels == pytest.approx(form.kernels, rel=1e-2)
    assert found.words == pytest.approx(form.words, rel=1e-2)
    for _, _, _, kernels, predicted, words, expected in found.rows:
        assert (predicted, expected) == pytest.approx((kernels, words), rel=1e-2)
    with pytest.raises(ValueError, match="no programs of powersgd, int8"):
        fitted(cases, "powersgd, int8")


def test_the_command_writes_the_forms(trees, monkeypatch, tmp_path, capsys):
    cases = []
    for reducer, floor in FLOORS.items():
        form = Form(floor, (30.0, 0.0, 9.0, 2.0, 0.0, 0.5, 1.0), (1.5, 0.0, 3.0, 25.0, 0.0, 0.0))
        cases += counted(reducer, form, monkeypatch)
    results, module, page = (tmp_path / x for x in ("counts.json", "programs.py", "page.md"))
    page.write_text("No command.")
    results.write_text(json.dumps({"cases": cases}))
    module.write_text(MODULE.read_text())
    monkeypatch.setattr(fit, "MODULE", module)
    monkeypatch.setattr(fit, "PAGE", page)
    assert fit.main(["--results", str(results)]) == 0
    assert capsys.readouterr().out.count("\n") == len(cases) + 2
    text = module.read_text()
    assert text.count("Form(\n") == len(FLOORS)
    assert with_forms(text, cases) == text
    assert fit.main(["--results", str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no single place"):
        with_forms("", cases)


def test_the_forms_are_those_of_the_committed_counts():
    cases = json.loads((RESULTS / "gpu_program-h200.json").read_text())["cases"]
    module = MODULE.read_text()
    assert with_forms(module, cases) == module, f"run {COMMAND}"
    for reducer in FLOORS:
        for tree, _, rank, kernels, k, words, w in fitted(cases, reducer).rows:
            assert k == pytest.approx(kernels, rel=0.3), (tree, reducer, rank)
            assert w == pytest.approx(words, rel=0.125), (tree, reducer, rank)
