"""Step for step against torch's own powerSGD_hook, run over gloo by three real processes."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from tests.helpers.paths import ROOT
from tests.helpers.runners import AXIS, simulate
from tests.helpers.script import python

pytestmark = pytest.mark.torch

REPLICAS, START, STEPS = 3, 2, 12  # ten compressed steps
# Rank and eps. The latter is as large as the columns of a factor, so that it changes them; above
# rank 2, where both take QR, it has no part.
SETTINGS = ("1:0", "2:0", "4:0", "1:3", "2:3", "4:3")
TORCH_SHAPES = {
    "conv": (16, 4, 3, 3),
    "conv_bias": (16,),
    "dense": (24, 20),
    "dense_twin": (24, 20),
    "embedding": (50, 18),
    "norm": (24,),
}
# From torch's axes to Flax's, behind (replicas, steps).
TO_FLAX = {"conv": "...oihw->...hwio", "dense": "...oi->...io", "dense_twin": "...oi->...io"}


def to_flax(name, x):
    return jnp.asarray(np.einsum(TO_FLAX.get(name, "...->..."), x))


def q_to_flax(name, q):
    """Moves the columns of a convolution: torch has (I, kh, kw), and Flax (kh, kw, I)."""
    if name == "conv":
        by_axis = q.reshape(4, 3, 3, -1)
        q = by_axis.transpose(1, 2, 0, 3).reshape(36, -1)
    return jnp.asarray(q)


def first_factors(torch, setting):
    """Returns torch's Q at the first compressed step by name, as Flax has it."""
    beginning = f"{setting}/q/"
    factors = {}
    for key, q in torch.items():
        if key.startswith(beginning):
            name = key.removeprefix(beginning)
            factors[name] = q_to_flax(name, q)
    return factors


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Returns the gradients, and what torch's hook made of them at each setting."""
    rng = np.random.default_rng(0)
    grads = {}
    for name, shape in TORCH_SHAPES.items():
        common = rng.normal(size=shape)
        noise = rng.normal(size=(REPLICAS, STEPS, *shape))
        grads[name] = np.float32(common + noise)
    folder = tmp_path_factory.mktemp("torch")
    source = folder / "gradients.npz"
    target = folder / "outputs.npz"
    np.savez(source, **grads)
    python("-m", "tests.helpers.torch_hook", source, target, START, *SETTINGS, cwd=ROOT)
    return grads, dict(np.load(target))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_output_equals_torchs(setting, recorded):
    grads, torch = recorded
    rank, eps = setting.split(":")
    tx = jaxcomp.powersgd(int(rank), axis_name=AXIS, start_step=START, eps=float(eps))
    ours = {name: to_flax(name, x) for name, x in grads.items()}
    state = tx.init({name: x[0, 0] for name, x in ours.items()})
    factors = first_factors(torch, setting)
    assert factors.keys() >= {"conv", "dense", "embedding"}
    state = state._replace(q=state.q | factors)
    outputs, _ = simulate("vmap", tx, ours, state)

    for name in TORCH_SHAPES:
        expected = np.asarray(to_flax(name, torch[f"{setting}/out/{name}"]))
        for step in range(STEPS):
            error = np.linalg.norm(outputs[name][step] - expected[step])
            assert error < 1e-4 * np.linalg.norm(expected[step]), (name, step)
