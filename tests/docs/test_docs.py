"""Every ``>>>`` example in the public docstrings runs and prints what it says."""

import doctest
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import train
from numpy.testing import assert_allclose

import jaxcomp
import torch_bridge.types
from tests.helpers.control import apart, assert_no_further
from tests.helpers.leaves import equal
from tests.helpers.paths import ROOT
from tests.helpers.runners import simulate


def blocks(page, language="python", section=""):
    """Returns the programs of a page, or of a section, that are not files of examples/."""
    text = (ROOT / page).read_text()
    if section:
        text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(rf"(?<!-->\n)```{language}\n(.*?)```", text, re.DOTALL)


def run(page, names, section=""):
    """Executes the programs from top to bottom, in `names`."""
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        exec(compile("\n".join(blocks(page, section=section)), page, "exec"), names)
    return names


def modules():
    """Yields every module with an example, and its source; those of the bridge need torch."""
    for package in (jaxcomp, torch_bridge):
        marks = pytest.mark.torch if package is torch_bridge else ()
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            source = pathlib.Path(importlib.util.find_spec(found.name).origin).read_text()
            if ">>> " in source:
                yield pytest.param(found.name, source, marks=marks, id=found.name)


@pytest.fixture
def job(alone):
    """Makes what the bridge's examples about a torch job have around them."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    state = hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"ddp_model": model, "state": state, "optimizer": optimizer}


@pytest.mark.parametrize(("name", "source"), [*modules()])
def test_docstring_examples(name, source, request):
    module = importlib.import_module(name)
    given = request.getfixturevalue("job") if "ddp_model" in source else {}
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        result = doctest.testmod(module, extraglobs=given)
    assert result.failed == 0
    # None is passed over: all that stand in the file have run.
    assert result.attempted == len(re.findall(r"^ *>>> ", source, re.MULTILINE))


@pytest.mark.parametrize("module", [jaxcomp, jaxcomp.extend, torch_bridge])
def test_every_public_function_has_an_example(module):
    for name in module.__all__:
        member = getattr(module, name)
        assert member.__doc__, name
        optional = module is not torch_bridge and not inspect.isfunction(member)
        assert ">>>" in member.__doc__ or optional, name


def test_every_public_name_has_its_place_in_the_reference():
    listed = re.findall(r":: ([\w.]+)$", (ROOT / "docs/site/api.md").read_text(), re.MULTILINE)
    public = [
        f"{module.__name__}.{name}"
        for module in (jaxcomp, jaxcomp.extend, jaxcomp.types, torch_bridge, torch_bridge.types)
        for name in module.__all__
        if name not in ("extend", "types")
    ]
    assert sorted(listed) == sorted(public)


def test_the_page_about_local_sgd_runs():
    names = run("docs/local_sgd.md", {})
    # The fit of the first program: y is the sum of x.
    assert_allclose(names["params"]["w"], np.ones((5, 1)), atol=0.1)
    assert names["stats"].ratio == 32


def test_the_page_about_meshes_runs(capsys):
    step = run("docs/meshes.md", {"jax": jax, "optax": optax, "jaxcomp": jaxcomp, "loss": sum})
    assert step["value_and_grad"].axis_name == ("slow", "fast")
    assert capsys.readouterr().out.count("bytes of s8 over ('data',)") == 4


def test_the_page_about_choosing_runs(capsys):
    by_leaf = run("docs/choosing.md", {})["ranks"].by_leaf
    assert by_leaf["['sharp']"] < by_leaf["['flat']"]
    (shown,) = blocks("docs/choosing.md", language="text")
    assert shown in capsys.readouterr().out


def unmoved(state):
    return state


def resumed(directory, replicas, monkeypatch, capsys, move=unmoved):
    """Names and printed losses after a run of the program about checkpoints.

    What it begins with, or goes on with, is what `move` makes of it.
    """
    text = (ROOT / "examples/resume.py").read_text()
    # The devices of this process are there already, and every loss is wanted with all its digits.
    text = re.sub(r"^jax.config.update.*$", "", text, flags=re.M).replace("% 10", "% 1")
    text = text.replace("{loss:.6f}", "{loss:.9f}")
    first = "params, opt_state, reducer_state = state\n"
    assert text.count(first) == 1
    text = text.replace(first, f"state = move(state)\n{first}", 1)
    monkeypatch.setattr("sys.argv", ["resume.py", str(directory), "--replicas", str(replicas)])
    names = {"move": move}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(text, "resume.py", "exec"), names)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    return names, losses


def test_a_checkpoint_of_four_devices_goes_on_on_two(tmp_path, monkeypatch, capsys):
    _, first = resumed(tmp_path / "4", 4, monkeypatch, capsys)
    losses = {}
    for name, replicas, move in [("4", 4, unmoved), ("control", 4, apart), ("2", 2, unmoved)]:
        directory = shutil.copytree(tmp_path / "4", tmp_path / f"then {name}")
        names, losses[name] = resumed(directory, replicas, monkeypatch, capsys, move)
    assert losses["4"][0] < first[0]
    assert_no_further(*(np.array(losses[name]) for name in ("2", "4", "control")))
    run("docs/checkpoints.md", names)
    assert names["reducer_state"].q["hidden"].shape == (32, 12)


def test_more_replicas_than_devices_are_a_sentence(tmp_path, monkeypatch, capsys):
    """As on a machine with one GPU, where JAX makes no further devices."""
    with pytest.raises(SystemExit):
        resumed(tmp_path / "16", 16, monkeypatch, capsys)
    assert "--replicas 16, and JAX sees 8 cpu devices; give fewer" in capsys.readouterr().err


def test_the_program_of_the_readme_trains(capsys):
    (program,) = blocks("README.md")
    # The devices of this process are there already.
    program = re.sub(r"^jax.config.update.*$", "", program, flags=re.M)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(program, "README.md", "exec"), {})
    loss = float(re.search(r"loss ([\d.]+)", capsys.readouterr().out)[1])
    assert loss < 0.1  # of 0.4 at the start


def test_the_program_about_steps_that_are_not_finite_leaves_one_out():
    names = {"jaxcomp": jaxcomp, "optax": optax}
    exec(blocks("docs/adopt.md", section="Mixed precision")[0], names)
    gradients = np.ones((4, 2, 16, 8), np.float32)
    gradients[2, 1] = np.inf  # in the second step, on the third replica only
    params = {"w": jnp.ones((16, 8))}
    with jax.numpy_dtype_promotion("standard"):
        good, bad = (
            simulate("shard_map", names["tx"], {"w": gradients[:, :steps]}, params=params)
            for steps in (1, 2)
        )
    assert (good[0]["w"][0] < 0).all()
    assert not bad[0]["w"][1].any()
    equal(bad[1][0], good[1][0])


def test_the_commands_about_checkpoints_are_understood():
    commands = "\n".join(blocks("docs/checkpoints.md", "console")).splitlines()
    assert len(commands) == 3
    for command in commands:
        python, script, *arguments = shlex.split(command, comments=True)
        assert python == "python"
        assert script == "examples/language_model/train.py"
        train.parser().parse_args(arguments)


def test_every_file_that_the_documents_link_to_exists():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/notebooks/*.ipynb")]:
        for target in re.findall(r"\]\(([^)#]+)[)#]", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page.name, target)
