"""docs/adopt.md: every program runs, its diff is true, its checkpoint moves to other devices."""

import contextlib
import functools
import io
import json
import os
import re
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.helpers.control import apart, assert_no_further
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs/adopt.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
PRELUDE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
LOOPS = [title for title, body in SECTIONS.items() if "```diff" in body]
EXPLICIT = "jit, Explicit axes"
STEPS, MORE = 100, 10
NOISE = float(re.search(r"\+ ([\d.]+) \* rng\.normal", PRELUDE)[1]) ** 2


def lines_of(title):
    return re.search(r"```diff\n(.*?)```", SECTIONS[title], re.S)[1].splitlines()


def program(title, *, compressed=True):
    """The section's program, with the rest of that of `jit` behind it where it ends early."""
    lines = [row[1:] for row in lines_of(title) if row[:1] != "+-"[compressed]]
    rest = [row[1:] for row in lines_of("jit") if row[:1] != "+-"[compressed]]
    if not any("def train_step" in row for row in lines):
        lines += rest[rest.index("@jax.jit") :]
    elif not any(row.startswith("for step in steps") for row in lines):
        lines += rest[rest.index("    return state, loss") + 1 :]
    return "\n".join(lines)


def run(text, count, steps, checkpoint=None, prelude=PRELUDE, others=None):
    """(losses, checkpoint) of a program on so many devices, with other names for it besides."""
    losses = []
    names = {
        "devices": jax.devices()[:count],
        "steps": steps,
        "losses": losses,
        "checkpoint": checkpoint,
        **(others or {}),
    }
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        exec(compile(prelude, "docs/adopt.md", "exec"), names)
        # For this program, and no longer.
        setting = "jax.set_mesh(mesh)\n"
        grid = (AxisType.Auto,) * 2
        mesh = jax.make_mesh((count // 2, 2), ("data", "model"), grid, devices=names["devices"])
        with jax.set_mesh(mesh) if setting in text else contextlib.nullcontext():
            text = text.replace(setting, "")
            exec(compile(text, "docs/adopt.md", "exec"), names)
    return losses, names["checkpoint"]


def test_all_loops_are_there():
    assert len(LOOPS) == 13
    for title in re.findall(r"\]\(#([\w-]+)\)", PAGE):
        anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in SECTIONS]
        assert title in anchors


@pytest.mark.parametrize("title", [*LOOPS, EXPLICIT])
def test_a_loop_learns_as_without_compression_and_goes_on_elsewhere(title, monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "jax")
    prelude = PRELUDE
    if title == EXPLICIT:
        title, prelude = "jit", PRELUDE.replace(", axis_types=(AxisType.Auto,)", "")
        assert prelude != PRELUDE
    train = functools.partial(run, prelude=prelude)
    exact, _ = train(program(title, compressed=False), 4, range(STEPS))
    text = program(title)
    losses, saved = train(text, 4, range(STEPS))
    if title != "Scanned layers":  # a narrow residual network cannot reach that far
        # Of the loss, the targets' noise cannot be learnt.
        assert np.mean(losses[-10:]) - NOISE < 0.5 * (losses[0] - NOISE)
    np.testing.assert_allclose(np.mean(losses[-10:]), np.mean(exact[-10:]), rtol=0.01)
    here, _ = train(text, 4, range(STEPS, STEPS + MORE), saved)
    there, _ = train(text, 2, range(STEPS, STEPS + MORE), saved)
    control, _ = train(text, 4, range(STEPS, STEPS + MORE), apart(saved))
    assert_no_further(np.array(there), np.array(here), np.array(control))


def test_an_nnx_model_keeps_its_statistics_and_counters():
    text = program("nnx.jit").replace(
        "jnp.tanh,",
        "nnx.BatchNorm(64, rngs=nnx.Rngs(2)), nnx.Dropout(0.1, rngs=nnx.Rngs(3)), jnp.tanh,",
    )
    _, (state, _) = run(text, 2, range(3))
    model = state[0]["layers"]
    assert abs(model[1]["mean"][...]).min() > 0
    assert model[2]["rngs"]["count"][...] == 3


def test_how_much_is_carried_goes_into_every_log(capsys):
    """The recipes run behind the loop, and the table on the page is what they print."""
    section = SECTIONS["How much is carried"]
    asked, recipe = re.findall(r"```python\n(.*?)```", section, re.S)
    log = io.StringIO()
    points = []
    others = {"json": json, "log": log, "wandb": mock.Mock(), "writer": mock.Mock()}
    others["writer"].add_scalar = lambda name, value, step: points.append((name, value, step))
    run(f"{program('jit')}\n{asked}\n{recipe}", 4, range(STEPS), others=others)
    printed = capsys.readouterr().out
    logged = json.loads(log.getvalue())
    assert logged.pop("step") == STEPS - 1
    assert points == [(name, value, STEPS - 1) for name, value in logged.items()]
    assert others["wandb"].log.call_args.args == (logged,)
    shares = r"^(\S+) +([\d.]+)%"
    (shown,) = re.findall(r"```text\n(.*?)```", section, re.S)
    assert [name for name, _ in re.findall(shares, shown, re.M)] == ["['in']", "['out']", "all"]
    there = dict(re.findall(shares, shown, re.M))
    for name, share in re.findall(shares, printed, re.M):
        # Training amplifies rounding: two right runs are some points apart.
        assert float(there[name]) == pytest.approx(float(share), abs=15)
