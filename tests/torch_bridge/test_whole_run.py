"""A CNN with everything that files have, through DDP, JAX and a real process group again."""

import dataclasses
import functools
import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import jaxcomp
import torch_bridge
from tests.helpers import whole_run as job
from tests.helpers.control import assert_no_further
from tests.helpers.leaves import all_zero
from tests.helpers.paths import ROOT
from tests.helpers.runners import first
from tests.helpers.script import wait_for
from tests.helpers.two_frameworks import FlaxModel

NETWORK = FlaxModel(job.network, train=True)
FLATTEN = {"frozen": (32, 2, 2), "unused": None}
NOT_TRAINED = [f"{layer}.{kind}" for layer in ("frozen", "unused") for kind in ("weight", "bias")]


@functools.cache
def variables_of_flax():
    return jax.eval_shape(NETWORK.init, jax.random.key(0), jnp.zeros((1, 7, 7, 3)))


def torchs_own(folder, case):
    """Loads what the ranks have saved as torch documents it."""
    return torch_bridge.load([folder / f"{case}.{rank}.pt" for rank in range(job.WORLD)])


def steps_in_jax(case, folder):
    """Trains from the one file to the other, with what `load` and `to_flax` say and nothing else.

    The static graph comes from torch's own files, goes on on more replicas, and goes back in
    another order than DDP's: `resume_powersgd` has to notice, or the state is scrambled.
    """
    checkpoint = torch_bridge.load(folder / f"{case}.to_jax.pt")
    copies = 1
    order = None
    if case == "static":
        copies = 3
        recorded = checkpoint.layout
        checkpoint = torchs_own(folder, case)
        inferred = torch_bridge.infer_layout(checkpoint, frozen=NOT_TRAINED)
        assert inferred == recorded
        checkpoint = dataclasses.replace(checkpoint, layout=inferred)
        definition = [name for name in checkpoint.model if name in inferred.names]
        order = torch_bridge.BucketLayout.from_order([definition], checkpoint.model)
        assert order != inferred
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = torch_bridge.to_flax(checkpoint, variables_of_flax(), flatten=FLATTEN)
    variables, transformation, opt_state, step_number = run
    trained = "unused.weight" in checkpoint.layout.names
    assert [str(w.message).split()[3] for w in said] == ["unused/kernel"] * trained
    assert step_number == job.MOVES[0]
    assert (len(checkpoint.layout.buckets) == 1) == (case == "static")

    def step(params, statistics, opt_state, x, y):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = NETWORK.apply(variables, x, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss, changed["batch_stats"]

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, loss

    params = variables["params"]
    statistics = variables["batch_stats"]
    opt_state = jaxcomp.stack_replicas(opt_state, job.WORLD * copies)
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
        batches = [job.batch(k, rank) for rank in range(job.WORLD)] * copies
        x = np.stack([inputs for inputs, _ in batches])
        y = np.stack([classes for _, classes in batches])
        params, changed, opt_state, loss = update(params, statistics, opt_state, x, y)
        statistics = first(changed)  # those of rank 0, as DDP has it
        losses.append(np.asarray(loss)[: job.WORLD])
    variables = {"params": params, "batch_stats": statistics}
    partial = folder / f"{case}.partial"
    opt_state = jaxcomp.consolidate(opt_state)
    torch_bridge.to_torch(
        variables, opt_state, checkpoint, path=partial, layout=order, flatten=FLATTEN
    )
    partial.rename(folder / f"{case}.to_torch.pt")
    return np.array(losses).T


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the folder of the files, and per case the losses in JAX, shape (ranks, steps)."""
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", job.__name__, str(folder), *job.HOOKS]
    ranks = subprocess.Popen(command, cwd=ROOT)
    try:
        in_jax = {}
        for case in job.HOOKS:
            wait_for((folder / f"{case}.to_jax.pt").exists, lambda: ranks.poll() is None)
            in_jax[case] = steps_in_jax(case, folder)
        assert ranks.wait(timeout=200) == 0
    finally:
        ranks.kill()  # with which its ranks end
        ranks.wait()
    return folder, in_jax


def said_by_ranks(folder, case):
    return [json.loads((folder / f"{case}.{k}.json").read_text()) for k in range(job.WORLD)]


def losses_of(ranks, name):
    """Returns the losses of a run, shape (ranks, steps)."""
    return np.array([rank[name] for rank in ranks])


@pytest.mark.parametrize("case", job.HOOKS)
def test_the_losses_are_those_of_the_run_that_stayed(runs, case):
    folder, in_jax = runs
    ranks = said_by_ranks(folder, case)
    stayed = losses_of(ranks, "stayed")
    controls = losses_of(ranks, "controls").swapaxes(0, 1)
    assert stayed[:, -1].mean() < 0.7 * stayed[:, 0].mean()
    in_between = slice(*job.MOVES)
    afterwards = slice(job.MOVES[1], None)
    assert_no_further(in_jax[case], stayed[:, in_between], *controls[:, :, in_between])
    returned = losses_of(ranks, "returned")
    assert_no_further(returned, stayed[:, afterwards], *controls[:, :, afterwards])


def test_the_running_statistics_go_along(runs):
    rank, _ = said_by_ranks(runs[0], "own")
    controls = map(np.array, rank["control_means"])
    assert_no_further(np.array(rank["mean"]), np.array(rank["stayed_mean"]), *controls)


# --- the files of the static graph ------------------------------------------------------------


@pytest.fixture(scope="module")
def complete(runs):
    """Loads what `save_checkpoint` wrote; also the parameters in Flax with their pairs."""
    checkpoint = torch_bridge.load(runs[0] / "static.to_jax.pt")
    params = variables_of_flax()
    pairs = torch_bridge.pair(checkpoint.model, params, flatten=FLATTEN)
    return checkpoint, params["params"], {"pairs": pairs}


def test_what_only_torch_uses_comes_back(complete):
    checkpoint, params, paired = complete
    old = checkpoint.powersgd[0]
    layout = checkpoint.layout
    state = torch_bridge.powersgd_from_torch(checkpoint, params, **paired)
    new = torch_bridge.powersgd_to_torch(state, params, layout=layout, like=checkpoint, **paired)
    errors = [record.error_dict[0].astype(np.float64) for record in checkpoint.powersgd]
    mean = np.mean(errors, axis=0)
    # Uncompressed segments are zero, which they are up to rounding in the mean as well.
    assert_allclose(new.error_dict[0], mean, atol=3e-6 * np.abs(mean).max())
    for part in layout.parts(new).values():
        assert bool(part.rank) == bool(part.error.any())
    assert new.start_powerSGD_iter == old.iter + 2
    for name in ("iter", "total_numel_before_compression", "next_stats_report"):
        assert getattr(new, name) == getattr(old, name)
    assert new.rng.randint(10**9) == old.rng.randint(10**9)


def test_the_complete_file_holds_what_all_ranks_have_and_torch_reads_it(runs, complete):
    document = torch.load(runs[0] / "static.to_jax.pt", weights_only=True)
    assert document["world_size"] == len(document["errors"]) == 2
    checkpoint, _, _ = complete
    single = torchs_own(runs[0], "static")
    for one, other in zip(checkpoint.powersgd, single.powersgd, strict=True):
        assert_array_equal(one.error_dict[0], other.error_dict[0])
        assert_array_equal(one.rng.get_state()[1], other.rng.get_state()[1])
    assert checkpoint.extra == single.extra == {"epoch": 3}
    assert list(checkpoint.model) == list(single.model)
    (group,) = checkpoint.optimizer["param_groups"]
    assert set(group["param_names"]) == set(checkpoint.layout.names)


def test_one_rank_alone_needs_a_choice(runs, complete):
    both, params, paired = complete
    alone = torch_bridge.load(runs[0] / "static.0.pt")
    state_of = functools.partial(
        torch_bridge.powersgd_from_torch, alone, params, layout=both.layout, **paired
    )
    with pytest.raises(torch_bridge.CheckpointMismatch) as error:
        state_of()
    for part in ("1 rank(s)", 'missing_ranks="zero"', 'missing_ranks="replicate"', "spurious"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="missing_ranks"):
        state_of(missing_ranks="guess")
    zero = state_of(missing_ranks="zero")
    assert all_zero(zero.residual)
    replicated = state_of(missing_ranks="replicate")
    parts = both.layout.parts(alone.powersgd[0])
    error = parts["fc.weight"].error
    assert_array_equal(replicated.residual["fc"]["kernel"], error.T)
