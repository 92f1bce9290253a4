"""A CNN with everything that files have, through DDP, JAX and a real process group again."""

import json
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import whole_run as job
from two_frameworks import FlaxModel

import jaxcomp
import torch_bridge

# Largest difference of the losses, in JAX and after the way back. Half: torch computes P, Q and the
# error in float16 there, of which JAX narrows what goes on the wire alone.
TOLERANCE = {"own": 1e-5, "rebuilt": 1e-5, "half": 1e-4}

FLATTEN = {"frozen": (32, 2, 2), "unused": None}


def steps_in_jax(path, out):
    """From the one file to the other, with what `load` and `to_flax` say and nothing else."""
    checkpoint, network = torch_bridge.load(path), FlaxModel(job.network, train=True)
    like = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 7, 7, 3)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch_bridge.to_flax(checkpoint, like, flatten=FLATTEN)
    variables, transformation, opt_state, first = run
    trained = "unused.weight" in checkpoint.layout.names
    known = [text for w in said if "clip_grad_norm_" not in (text := str(w.message))]
    assert [text.split()[3] for text in known] == ["unused/kernel"] * trained
    assert len(said) == len(known) + 1
    assert first == job.MOVES[0]
    assert len(checkpoint.layout.buckets) == (3 if trained else 2)

    def step(params, statistics, opt_state, x, y):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = network.apply(variables, x, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss, changed["batch_stats"]

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, loss

    params, statistics = variables["params"], variables["batch_stats"]
    opt_state = jaxcomp.stack_replicas(opt_state, job.WORLD)
    axes = jaxcomp.state_axes(opt_state)
    update = jax.jit(
        jax.vmap(
            step,
            axis_name="data",
            in_axes=(None, None, axes, 0, 0),
            out_axes=(None, 0, axes, 0),
        )
    )
    losses = []
    for k in range(*job.MOVES):
        batches = [job.batch(k, rank) for rank in range(job.WORLD)]
        x, y = (np.stack(part) for part in zip(*batches, strict=True))
        params, changed, opt_state, loss = update(params, statistics, opt_state, x, y)
        statistics = jax.tree.map(lambda leaf: leaf[0], changed)  # those of rank 0, as DDP has it
        losses.append(np.asarray(loss))
    variables = {"params": params, "batch_stats": statistics}
    partial = out.with_suffix(".partial")
    opt_state = jaxcomp.consolidate(opt_state)
    torch_bridge.to_torch(variables, opt_state, checkpoint, path=partial, flatten=FLATTEN)
    partial.rename(out)
    return np.array(losses).T


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Per case what both ranks say, and the losses in JAX, shape (ranks, steps)."""
    folder = tmp_path_factory.mktemp("runs")
    ranks = subprocess.Popen([sys.executable, job.__file__, str(folder), *job.HOOKS])
    try:
        in_jax = {}
        for case in job.HOOKS:
            path, end = folder / f"{case}.to_jax.pt", time.monotonic() + 200
            while not path.exists():
                assert time.monotonic() < end
                assert ranks.poll() is None
                time.sleep(0.05)
            in_jax[case] = steps_in_jax(path, folder / f"{case}.to_torch.pt")
        assert ranks.wait(timeout=200) == 0
    finally:
        ranks.kill()  # with which its ranks end
        ranks.wait()

    def said(case):
        return [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(2)]

    return {case: (said(case), in_jax[case]) for case in job.HOOKS}


@pytest.mark.parametrize("case", job.HOOKS)
def test_the_losses_are_those_of_the_run_that_stayed(runs, case):
    ranks, in_jax = runs[case]
    stayed = np.array([rank["stayed"] for rank in ranks])
    returned = np.array([rank["returned"] for rank in ranks])
    first, last = job.MOVES
    assert stayed[:, -1].mean() < 0.7 * stayed[:, 0].mean()
    apart = [
        np.abs(in_jax - stayed[:, first:last]).max(),
        np.abs(returned - stayed[:, last:]).max(),
    ]
    assert max(apart) < TOLERANCE[case], apart


def test_the_running_statistics_go_along(runs):
    ranks, _ = runs["own"]
    np.testing.assert_allclose(ranks[0]["mean"], ranks[0]["stayed_mean"], atol=1e-5)
