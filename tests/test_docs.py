"""Every ``>>>`` example in the public docstrings runs and prints what it says."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import jax
import pytest

import jaxcomp


def modules():
    return [
        f"jaxcomp.{m.name}" for m in pkgutil.iter_modules(jaxcomp.__path__) if m.name != "__main__"
    ]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        result = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert result.failed == 0


def test_every_public_name_is_documented_with_an_example():
    for name in jaxcomp.__all__:
        assert getattr(jaxcomp, name).__doc__, name
    for name in ("powersgd", "allreduce", "local_value_and_grad", "consolidate", "shard_state"):
        assert ">>>" in getattr(jaxcomp, name).__doc__


def test_the_readmes_program_runs_and_its_loss_falls(capsys):
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", printed)]
    assert losses[-1] < 0.5 * losses[0]
    assert "12.8" in printed


def test_every_file_that_the_documents_link_to_exists():
    root = pathlib.Path(__file__).parents[1]
    for page in [*root.glob("*.md"), *root.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[)#]", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page.name, target)
