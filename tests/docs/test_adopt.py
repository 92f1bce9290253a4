"""docs/adopt.md: every program runs, its diff is true, its checkpoint moves to other devices."""

import os
import re

import jax
import numpy as np
import pytest
from paths import ROOT

PAGE = (ROOT / "docs/adopt.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
PRELUDE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
LOOPS = [title for title, body in SECTIONS.items() if "```diff" in body]
STEPS, MORE = 100, 10
NOISE = float(re.search(r"\+ ([\d.]+) \* rng\.normal", PRELUDE)[1]) ** 2


def block(title, language):
    return re.search(rf"```{language}\n(.*?)```", SECTIONS[title], re.S)[1]


def uncompressed(title):
    """The program with its diff taken back."""
    lines = block(title, "python").splitlines()
    for hunk in re.split(r"^@@\n", block(title, "diff"), flags=re.M):
        rows = hunk.splitlines()
        new = [row[1:] for row in rows if row[0] in " +"]
        old = [row[1:] for row in rows if row[0] in " -"]
        places = [i for i in range(len(lines)) if lines[i : i + len(new)] == new]
        assert len(places) == 1, (title, new, places)
        lines[places[0] : places[0] + len(new)] = old
    return "\n".join(lines)


def run(program, count, steps, checkpoint=None):
    """(losses, checkpoint) of a program on so many devices."""
    losses = []
    names = {
        "devices": jax.devices()[:count],
        "steps": steps,
        "losses": losses,
        "checkpoint": checkpoint,
    }
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        exec(compile(PRELUDE + program, "docs/adopt.md", "exec"), names)
    return losses, names["checkpoint"]


def test_all_loops_are_there():
    assert len(LOOPS) == 9
    for title in re.findall(r"\]\(#([\w-]+)\)", PAGE):
        anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in SECTIONS]
        assert title in anchors


@pytest.mark.parametrize("title", LOOPS)
def test_a_loop_learns_as_without_compression_and_goes_on_elsewhere(title, monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "jax")
    program = block(title, "python")
    exact, _ = run(uncompressed(title), 4, range(STEPS))
    losses, saved = run(program, 4, range(STEPS))
    # Of the loss, the targets' noise cannot be learnt.
    assert np.mean(losses[-10:]) - NOISE < 0.5 * (losses[0] - NOISE)
    np.testing.assert_allclose(np.mean(losses[-10:]), np.mean(exact[-10:]), rtol=0.01)
    here, _ = run(program, 4, range(STEPS, STEPS + MORE), saved)
    there, _ = run(program, 2, range(STEPS, STEPS + MORE), saved)
    np.testing.assert_allclose(there, here, rtol=1e-5)


def test_an_nnx_model_keeps_its_statistics_and_counters():
    program = block("nnx.jit", "python").replace(
        "jnp.tanh,",
        "nnx.BatchNorm(64, rngs=nnx.Rngs(2)), nnx.Dropout(0.1, rngs=nnx.Rngs(3)), jnp.tanh,",
    )
    _, (state, _) = run(program, 2, range(3))
    model = state[0]["layers"]
    assert abs(model[1]["mean"][...]).min() > 0
    assert model[2]["rngs"]["count"][...] == 3


def test_jit_loops_change_four_lines_and_one_to_restore():
    for title in ("jit with Auto axes", "jit with Explicit axes", "Equinox", "Haiku"):
        assert len(re.findall(r"^\+", block(title, "diff"), re.M)) == 5
