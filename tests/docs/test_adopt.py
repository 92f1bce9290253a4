"""docs/adopt.md: every program runs, its diff is true, its checkpoint moves to other devices."""

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import json
import os
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from numpy.testing import assert_array_equal

import jaxcomp
from tests.helpers.control import apart, assert_no_further
from tests.helpers.paths import ROOT
from tests.helpers.runners import MAPPINGS, first, mesh_of, over_replicas, start

PAGE = (ROOT / "docs/adopt.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
PRELUDE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
LOOPS = [title for title, body in SECTIONS.items() if "```diff" in body]
EXPLICIT = "jit, Explicit axes"
EXACT = 'jaxcomp.allreduce(axis_name="data")'
STEPS = 100
MORE = 10
FEW = 20  # after which rounding shows in no digit that a page prints
# Where a run begins; loops of others take no checkpoint.
BEGIN = r"^(?=.*\bcheckpoint\b|for \w+ in steps:)"
NOISE = float(re.search(r"\+ ([\d.]+) \* rng\.normal", PRELUDE)[1]) ** 2


def replaced(text, old, new):
    """Returns the text with another part, which must be there."""
    assert old in text
    return text.replace(old, new)


def lines_of(title):
    return re.search(r"```diff\n(.*?)```", SECTIONS[title], re.S)[1].splitlines()


def program(title, *, compressed=True):
    """Returns the section's program; if it ends early, the rest of the `jit` program follows."""
    lines = [row[1:] for row in lines_of(title) if row[:1] != "+-"[compressed]]
    rest = [row[1:] for row in lines_of("jit") if row[:1] != "+-"[compressed]]
    if not any("def train_step" in row for row in lines):
        lines += rest[rest.index("@jax.jit") :]
    elif not any(row.startswith("for step in steps") for row in lines):
        lines += rest[rest.index("    return state, loss") + 1 :]
    return "\n".join(lines)


class Loop:
    """A program on so many devices, of which the definitions run once, and are compiled once."""

    def __init__(self, text, count=4, prelude=PRELUDE, **others):
        self.names = {"devices": jax.devices()[:count], **others}
        self.mesh = contextlib.nullcontext
        setting = "jax.set_mesh(mesh)\n"
        if setting in text:  # for this program, and no longer
            text = text.replace(setting, "")
            grid = (AxisType.Auto,) * 2
            devices = self.names["devices"]
            mesh = jax.make_mesh((count // 2, 2), ("data", "model"), grid, devices=devices)
            self.mesh = functools.partial(jax.set_mesh, mesh)
        definitions, self.rest = re.split(BEGIN, text, maxsplit=1, flags=re.M)
        self.execute(prelude, self.names)
        self.execute(definitions, self.names)

    def execute(self, text, names):
        with jax.numpy_dtype_promotion("standard"), self.mesh():  # what a user has
            exec(compile(text, "docs/adopt.md", "exec"), names)

    def run(self, steps, checkpoint=None, **others):
        """Returns (losses, checkpoint) of these steps, with other names besides."""
        names = self.names | {"steps": steps, "losses": [], "checkpoint": checkpoint}
        for name, value in names.items():
            if isinstance(value, nnx.Module | nnx.Optimizer):  # which a run changes
                names[name] = copy.deepcopy(value)
        names.update(others)
        self.execute(self.rest, names)
        return names["losses"], names["checkpoint"]

    def control(self, steps):
        """Returns the losses where the inputs are one rounding apart."""
        batch = self.names["batch"]

        def moved(step):
            x, y = batch(step)
            return apart(x, step), y

        return self.run(steps, batch=moved)[0]


def averaging(text):
    """Replaces the reducers that a program makes by an exact average."""
    return re.sub(r"^reducer = .*$", f"reducer = {EXACT}", text, flags=re.M)


def test_all_loops_are_there():
    assert len(LOOPS) == 13
    anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in SECTIONS]
    for title in re.findall(r"\]\(#([\w-]+)\)", PAGE):
        assert title in anchors


def last_losses(losses):
    return np.mean(losses[-10:])


@pytest.mark.parametrize("title", [*LOOPS, EXPLICIT])
def test_a_loop_learns_as_without_compression_and_goes_on_elsewhere(title, monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "jax")
    prelude = PRELUDE
    if title == EXPLICIT:
        title = "jit"
        prelude = replaced(PRELUDE, ", axis_types=(AxisType.Auto,)", "")
    plain = Loop(program(title, compressed=False), prelude=prelude)
    text = program(title)

    uncompressed, _ = plain.run(range(STEPS))
    uncompressed = np.array(uncompressed)
    # With an exact average the lines of the diff change nothing.
    exact, _ = Loop(averaging(text), prelude=averaging(prelude)).run(range(FEW))
    exact_control = plain.control(range(FEW))
    assert_no_further(np.array(exact), uncompressed[:FEW], np.array(exact_control))

    loop = Loop(text, prelude=prelude)
    losses, saved = loop.run(range(STEPS))
    if title != "Scanned layers":  # a narrow residual network cannot reach that far
        # Of the loss, the targets' noise cannot be learnt.
        assert last_losses(losses) - NOISE < 0.5 * (losses[0] - NOISE)
    assert jaxcomp.diagnostics(saved).leaves, "no leaf is compressed"
    # The rank costs at most 1% of the loss; the rest is rounding, which 100 steps amplify.
    control = loop.control(range(STEPS))
    reached = last_losses(uncompressed)
    assert_no_further(reached, last_losses(losses), last_losses(control), level=0.01 * reached)

    more = range(STEPS, STEPS + MORE)
    here, _ = loop.run(more, saved)
    there, _ = Loop(text, 2, prelude).run(more, saved)
    control, _ = loop.run(more, apart(saved))
    assert_no_further(np.array(there), np.array(here), np.array(control))


def test_an_nnx_model_keeps_its_statistics_and_counters():
    text = program("nnx.jit").replace(
        "jnp.tanh,",
        "nnx.BatchNorm(64, rngs=nnx.Rngs(2)), nnx.Dropout(0.1, rngs=nnx.Rngs(3)), jnp.tanh,",
    )
    _, (state, _) = Loop(text, 2).run(range(3))
    model = state[0]["layers"]
    assert abs(model[1]["mean"][...]).min() > 0
    assert model[2]["rngs"]["count"][...] == 3


def shares_in(table):
    """Returns the share in percent of each row."""
    rows = re.findall(r"^(\S+) +([\d.]+)%", table, re.M)
    return {name: np.float64(share) for name, share in rows}


def test_how_much_is_carried_goes_into_every_log(capsys):
    """Runs the recipes behind the loop; the page shows the table that they print."""
    section = SECTIONS["How much is carried"]
    asked, recipe = re.findall(r"```python\n(.*?)```", section, re.S)
    others = {"json": json, "log": io.StringIO(), "wandb": mock.Mock(), "writer": mock.Mock()}
    loop = Loop(f"{program('jit')}\n{asked}\n{recipe}", **others)
    loop.run(range(FEW))
    logged = json.loads(others["log"].getvalue())
    assert logged.pop("step") == FEW - 1
    points = [mock.call(name, value, FEW - 1) for name, value in logged.items()]
    assert others["writer"].add_scalar.call_args_list == points
    assert others["wandb"].log.call_args.args == (logged,)
    printed = shares_in(capsys.readouterr().out)
    (table,) = re.findall(r"```text\n(.*?)```", section, re.S)
    shown = shares_in(table)
    assert [*shown] == [*printed] == ["['in']", "['out']", "all"]
    loop.control(range(FEW))
    control = shares_in(capsys.readouterr().out)
    assert_no_further(shown, printed, control, level=0.1)  # the last digit


# Loops of others, each as a diff: rank 8 from step 10 on, as in the table.
OTHERS = {path.stem: path.read_text() for path in (ROOT / "tests/docs/loops").glob("*.diff")}
AROUND = """
import flax.linen as nn, jax, jax.numpy as jnp, jaxcomp, numpy as np, optax
from flax.training import train_state
from jax.sharding import AxisType
mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
rows = jax.NamedSharding(mesh, jax.P("data"))
reducer = jaxcomp.powersgd(8, axis_name="data", start_step=10)
"""


def moved_on_its_devices(leaf):
    """Moves an array by one rounding; an array that is free to move between devices stays so."""
    if not isinstance(leaf, jax.Array):  # a module is the leaf of a tree
        return leaf
    return jax.device_put(apart(leaf), leaf.sharding if leaf.committed else None)


def moved_beginning(loop):
    """Returns what a loop begins with, one rounding apart."""
    moved = {}
    for name in {"state", "var_params", "model"} & loop.names.keys():
        moved[name] = jax.tree.map(moved_on_its_devices, loop.names[name])
    return moved


@pytest.mark.parametrize("name", OTHERS)
def test_a_loop_of_others_learns_as_its_table_says(name):
    """With as few lines changed, and no more sent."""
    lines = OTHERS[name].splitlines()
    plain = "\n".join(row[1:] for row in lines if row[:1] in " -")
    text = "\n".join(row[1:] for row in lines if row[:1] in " +")
    row = re.search(rf"{name}.*?(\d+), (\d+) .* ([\d.]+) \|$", PAGE, re.M)
    removed, added, shown = row.groups()
    changed = collections.Counter(row[:1] for row in lines)
    assert changed["-"] == int(removed)
    assert changed["+"] == int(added)
    exact, _ = Loop(plain, prelude=AROUND).run(range(STEPS))
    assert last_losses(exact) < 0.95 * exact[0]
    loop = Loop(text, prelude=AROUND)
    losses, _ = loop.run(range(STEPS))
    control, _ = loop.run(range(STEPS), **moved_beginning(loop))
    ratio = last_losses(losses) / last_losses(exact)
    control_ratio = last_losses(control) / last_losses(exact)
    assert_no_further(float(shown), ratio, control_ratio, level=5e-4)  # half of the last digit


SCALED = np.full((16, 16), 1 / 16, np.float32)


def overflowing(step):
    """Draws a batch for two replicas; in step 2 one of them overflows."""
    x = np.random.default_rng(step).normal(size=(2, 8, 16)).astype(np.float32)
    if step == 2:
        x[1] = 1e30
    return x


@pytest.fixture
def recipes():
    """Returns the two programs about DynamicScale, and the names around them."""
    reducer = jaxcomp.powersgd(2, axis_name="data", start_step=0)
    names = {"functools": functools, "jax": jax, "jnp": jnp, "jaxcomp": jaxcomp, "optax": optax}
    names["P"] = jax.P
    names["reducer"] = reducer
    names["optimizer"] = optax.sgd(0.1)
    names["tx"] = optax.chain(reducer, optax.sgd(0.1))
    names["loss_fn"] = lambda params, x: jnp.mean((x @ params) ** 2)
    text = PAGE[PAGE.index("### float16 with flax's DynamicScale") :]
    return re.findall(r"```python\n(.*?)```", text, re.S), names


def assert_one_step_is_left_out(params, scale, names):
    """Asserts it of the parameters after each of five steps, and of the scale after all."""
    assert_array_equal(params[2], params[1])
    assert np.isfinite(params[-1]).all()
    assert (params[3] != params[2]).any()
    assert scale.scale == names["scale"].scale / 2


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_loss_scale_in_a_mapped_function_leaves_one_step_out_everywhere(recipes, mapping):
    (mapped, _), names = recipes
    exec(mapped, names)
    state, specs = start(mapping, names["tx"].init(SCALED), 2)

    def step(x, state, both):
        params, scale = both
        params, state, scale, _ = names["train_step"](params, state, scale, x)
        return (params, scale), state

    run = over_replicas(mapping, step, 2, specs, shared=1)
    both = SCALED, names["scale"]
    seen = []
    for k in range(5):
        both, state = run(overflowing(k), state, both)
        if mapping != "shard_map":  # which proves it
            jax.tree.map(lambda x: assert_array_equal(x[0], x[1]), both)
            both = first(both)
        seen.append(jax.device_get(both[0]))
    assert_one_step_is_left_out(seen, both[1], names)


def test_a_loss_scale_in_a_jit_loop_leaves_one_step_out(recipes):
    (before, loop), names = recipes
    exec(before, names)
    params = SCALED
    scale = names["scale"]
    seen = []
    with jax.set_mesh(mesh_of(2)):
        exec(loop, names)
        state = names["optimizer"].init(params)
        reduced = names["value_and_grad"].init(params)
        for k in range(5):
            batch = overflowing(k).reshape(16, 16)
            params, state, reduced, scale, _ = names["train_step"](
                params, state, reduced, scale, batch
            )
            seen.append(jax.device_get(params))
    assert_one_step_is_left_out(seen, scale, names)
    assert int(reduced.count) == 4


def test_a_state_that_is_laid_out_by_rule_is_noticed_and_the_way_out_works():
    """Copies of all residuals everywhere are gathered on every step."""
    mesh = mesh_of(4)
    params = {"w": jnp.ones((64, 64))}
    reducer = jaxcomp.powersgd(2, axis_name="data", start_step=0)
    run = jaxcomp.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2), reducer, mesh=mesh)
    state = run.init(params)
    whole = jax.NamedSharding(mesh, jax.P())

    def compiled(specs):
        placed = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
        step = jax.jit(run, in_shardings=(placed, whole, None), out_shardings=(None, placed))
        shapes = jax.eval_shape(lambda: state)
        return step.lower(shapes, params, np.ones((8, 64), np.float32)).compile()

    with pytest.raises(ValueError, match="all-gather"):
        jaxcomp.check(compiled(jax.tree.map(lambda _: jax.P(), state)), reducer, params)
    jaxcomp.check(compiled(jaxcomp.state_specs(state, "data")), reducer, params)


def test_named_arrays_go_in_as_plain_ones():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Named:
        array: jax.Array
        axes: tuple = dataclasses.field(metadata={"static": True})

        def __post_init__(self):
            assert self.array is None or np.ndim(self.array) == len(self.axes)

    model = {"w": Named(jnp.ones((16, 16)), ("in", "out"))}
    leaves, treedef = jax.tree.flatten(model)

    def loss(leaves, x):
        return jnp.mean((x @ treedef.unflatten(leaves)["w"].array) ** 2)

    reducer = jaxcomp.powersgd(2, axis_name="data", start_step=0)
    run = jaxcomp.value_and_grad(loss, reducer, mesh=mesh_of(2))
    (_, grads), _ = jax.jit(run)(run.init(leaves), leaves, np.ones((4, 16), np.float32))
    assert treedef.unflatten(grads)["w"].axes == ("in", "out")
