"""The same weights as torch's and Accelerate's local SGD after 40 steps, over gloo."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.control import apart, assert_no_further
from tests.helpers.paths import ROOT
from tests.helpers.script import python

pytestmark = pytest.mark.torch

STEPS = 40
BATCH = 4
SHAPES = {"w1": (6, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}
AXES = ("node", "device")


def data_of(world):
    rng = np.random.default_rng(world)
    params = {name: np.float32(rng.normal(0, 0.5, shape)) for name, shape in SHAPES.items()}
    x = rng.normal(size=(world, STEPS, BATCH, 6)).astype(np.float32)
    y = rng.normal(size=(world, STEPS, BATCH, 3)).astype(np.float32)
    return params, x, y


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory):
    """Returns number of processes -> the weights of every rank; one launch for all cases."""
    return functools.cache(lambda world: launch(world, tmp_path_factory.mktemp("gloo")))


def launch(world, folder):
    params, x, y = data_of(world)
    np.savez(folder / "data.npz", x=x, y=y, **params)
    program = ["-m", "tests.helpers.torch_local_sgd"]
    python(*program, folder, world, cwd=ROOT, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    ranks = [dict(np.load(folder / f"{rank}.npz")) for rank in range(world)]
    weights = {}
    for leaf in ranks[0]:
        weights[leaf] = np.stack([rank[leaf] for rank in ranks])
    return weights


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return ((hidden @ params["w2"] + params["b2"] - y) ** 2).mean()


def jax_run(world, tx, move=lambda params: params):
    """Returns all replicas' final weights, nodes of two devices; `move` changes the first ones."""
    params, x, y = data_of(world)
    params = move(params)

    def train(x, y):
        def one(carry, batch):
            params, state = carry
            grads = jax.grad(loss)(params, *batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = jax.tree.map(jnp.asarray, params)
        (final, _), _ = jax.lax.scan(one, (start, tx.init(start)), (x, y))
        return final

    def by_node(leaf):
        return jnp.asarray(leaf).reshape(world // 2, 2, *leaf.shape[1:])

    within = jax.vmap(train, axis_name="device")
    everywhere = jax.jit(jax.vmap(within, axis_name="node"))
    final = everywhere(by_node(x), by_node(y))
    return [np.asarray(final[name]).reshape(world, *shape) for name, shape in SHAPES.items()]


INNER = optax.sgd(0.05, momentum=0.9)
local_sgd = functools.partial(jaxcomp.local_sgd, INNER, axis_name=AXES)
# What each case is here. torch averages on the first step after its warm-up, hence the offsets.
SAME = {
    "periodic": local_sgd(sync_every=4, start_step=10, offset=11),
    "subgroup": local_sgd(sync_every=4, start_step=10, offset=11, local_axis_name="device"),
    "hierarchical": local_sgd(sync_every={"device": 2, AXES: 8}, start_step=5, offset=1),
    "accelerate": local_sgd(sync_every=8),
}


WORLDS = [(2, "periodic"), (2, "accelerate"), (4, "subgroup"), (4, "hierarchical")]


@pytest.mark.parametrize(("world", "case"), WORLDS)
def test_weights_after_forty_steps(torch_run, world, case):
    theirs = [torch_run(world)[f"{case}_{i}"] for i in range(4)]
    ours = jax_run(world, SAME[case])
    control = jax_run(world, SAME[case], apart)
    assert_no_further(theirs, ours, control)
