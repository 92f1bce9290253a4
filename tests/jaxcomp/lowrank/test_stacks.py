"""Small leaves of one shape as one leaf, as programs for GPUs have them: the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives, sent_bytes
from leaves import random_grads
from runners import AXIS, lower_update, simulate

import jaxcomp
from jaxcomp._lowrank import stacks
from jaxcomp._lowrank.matricize import default_matrix_dims, plan_leaves
from jaxcomp._lowrank.stacks import Stacks
from jaxcomp._reducers import powersgd_step
from jaxcomp._reducers.powersgd_step import Step

# Each shape three times, one of them already a stack of matrices; the order mixes them.
SHAPES = {
    f"{name}{i}": shape
    for i in range(3)
    for name, shape in {
        "a": (20, 24),
        "bias": (7,),
        "conv": (3, 3, 4, 12),
        "layers": (2, 16, 18),
    }.items()
} | {"embedding": (50, 12)}


def dims(path, leaf):
    """Each of several matrices by itself."""
    if path[0].key.startswith("layers"):
        return jaxcomp.MatrixDims(batch=(0,), rows=(2,), cols=(1,))
    return default_matrix_dims(path, leaf)


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def powersgd(**options):
    defaults = {"start_step": 0, "matrix_dims": dims, "min_compression_rate": 0.5}
    return jaxcomp.powersgd(3, axis_name=AXIS, **(defaults | options))


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        ("shard_map", {"start_step": 2}),
        ("shard_map", {"buckets": 3, "not_all": True}),
        ("shard_map", {"alternating": True, "comm_dtype": jnp.bfloat16}),
        ("vmap", {"feedback_every": 2, "error_decay": 0.5, "warm_start": False}),
        ("vmap", {"weighted": True}),
        ("pmap", {"comm_dtype": jnp.int8, "bad": True}),
        ("shard_map", {"error_feedback": False, "half": True}),
    ],
)
def test_an_update_of_stacks_is_that_of_their_leaves(mapping, options, monkeypatch):
    options = dict(options)
    grads = random_grads(SHAPES, 2, 3)
    if options.pop("bad", False):
        grads["a1"][1, 2, 0, 0] = np.nan
    if options.pop("half", False):
        grads["a0"] = grads["a0"].astype(np.float16)
    extra = {"weight": jnp.float32(2)} if options.pop("weighted", False) else {}
    if options.pop("not_all", False):
        options["matrix_dims"] = lambda path, x: None if path[0].key == "a2" else dims(path, x)
    results = []
    for run in (Step._run, Step._run_stacked):
        monkeypatch.setattr(Step, "run", run)
        tx = powersgd(**options)
        results.append(simulate(mapping, tx, grads, **extra))
    leaves, one_shape = (jax.tree.map(np.float32, result) for result in results)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=2e-5), leaves, one_shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_stacks_send_what_their_leaves_would(dtype, monkeypatch):
    sent = []
    for run in (Step._run, Step._run_stacked):
        monkeypatch.setattr(Step, "run", run)
        program = lower_update(powersgd(comm_dtype=dtype), zeros(), 2).compile().as_text()
        sent.append(sent_bytes(collectives(program)))
    assert sent[0] == sent[1] > 0


def test_programs_for_gpus_have_the_products_of_stacks(monkeypatch):
    """And those for CPUs those of leaves, also on a machine that has both."""
    monkeypatch.setattr(powersgd_step, "compiler_found", lambda: True)
    products = {
        platform: lower_update(powersgd(), zeros(), 2, platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    in_stacks = "tensor<3x20x24xf32>"  # the three leaves `a`
    assert in_stacks in products["cuda"]
    assert in_stacks not in products["cpu"]


def test_what_is_stacked(monkeypatch):
    plans = plan_leaves(zeros(), 3, 0.5, dims)
    names = [plan.path for plan in plans]
    residuals = [jnp.zeros(plan.shape) for plan in plans]

    def found(groups):
        each = Stacks.of(plans, groups, residuals).members.values()
        return {tuple(names[i] for i in group) for group in each}

    everything = [list(range(len(plans)))]
    triples = {tuple(f"['{name}{i}']" for i in range(3)) for name in ("a", "conv", "layers")}
    assert found(everything) == triples  # no bias, nothing with one of its shape alone

    monkeypatch.setattr(stacks, "_MOST", 2)
    assert found(everything) == {triple[:2] for triple in triples}
    monkeypatch.setattr(stacks, "SMALL", 479)  # of conv's 432 values, and not of a's 480
    assert found(everything) == {("['conv0']", "['conv1']")}
    monkeypatch.setattr(stacks, "SMALL", 1 << 20)
    monkeypatch.setattr(stacks, "_ALL", 2 * 432 + 2 * 480)  # the smallest first
    assert found(everything) == {("['conv0']", "['conv1']"), ("['a0']", "['a1']")}
    monkeypatch.setattr(stacks, "SMALL", 479)
    half = [i for i, name in enumerate(names) if "0" in name or "2" in name]
    assert found([half]) == {("['conv0']", "['conv2']")}


def test_random_starts_are_those_of_the_leaves(monkeypatch):
    """Of powersgd without warm starts, where each leaf and step has a start of its own."""
    results = []
    for run in (Step._run, Step._run_stacked):
        monkeypatch.setattr(Step, "run", run)
        tx = powersgd(warm_start=False, error_feedback=False)
        results.append(simulate("vmap", tx, random_grads(SHAPES, 2, 2))[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=2e-5), *results)
