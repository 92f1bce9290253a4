"""Files that mean something else than they seem to say: converted right, or said by name."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import torch_files as files
from torch_bridge import (
    CheckpointMismatch,
    load,
    save_checkpoint,
    state_from_record,
    to_flax,
    to_torch,
)

LIKE = {"kernel": np.zeros((24, 16), np.float32), "bias": np.zeros(16, np.float32)}


def converted(checkpoint, like=LIKE, **options):
    """The run in Flax, and what was said of it besides clipping."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = to_flax(checkpoint, like, **options)
    texts = [str(warning.message) for warning in caught]
    return run, [text for text in texts if "clip_grad_norm_" not in text]


# --- errors in units of a scaled loss -----------------------------------------------------------


def scaled_job(scale):
    """Four steps of a job whose hook compresses gradients of a loss times `scale`."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(24, 16))
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale((ddp(torch.randn(8, 24)) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return ddp, state, optimizer, scaler


@pytest.fixture
def plain(alone):
    ddp, state, optimizer, _ = scaled_job(1)
    document = {"state_dict": ddp.state_dict(), "comm_hook_state": state, "world_size": 1}
    return document | {"optimizer": optimizer.state_dict()}


def written(path, document):
    torch.save(document, path)
    return load(path)


@pytest.mark.parametrize("place", ["scaler", "amp.grad_scaler", "save_checkpoint"])
def test_a_loss_scale_is_taken_out_and_put_in_again(plain, tmp_path, place):
    path = tmp_path / "c.pt"
    unscaled, _ = converted(written(path, plain))
    ddp, state, optimizer, scaler = scaled_job(4096.0)
    if place == "save_checkpoint":
        save_checkpoint(path, ddp, state, optimizer=optimizer, scaler=scaler)
        assert torch.load(path, weights_only=True)["extra"]["scaler"] == scaler.state_dict()
    else:
        document = {"state_dict": ddp.state_dict(), "comm_hook_state": state, "world_size": 1}
        document["optimizer"] = optimizer.state_dict()
        above, _, name = place.rpartition(".")
        entry = {name: scaler.state_dict()}
        document.update({above: entry} if above else entry)
        torch.save(document, path)
    checkpoint = load(path)
    run, said = converted(checkpoint)
    assert not said
    for what in ("residual", "q"):
        pairs = zip(
            jax.tree.leaves(getattr(run.reducer_state, what)),
            jax.tree.leaves(getattr(unscaled.reducer_state, what)),
            strict=True,
        )
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    back = tmp_path / "back.pt"
    to_torch(run.params, run.opt_state, checkpoint, path=back)
    returned = state_from_record(load(back).record(0))
    old = checkpoint.layout or load(back).layout
    for name, part in old.parts(returned).items():
        if part.rank:
            np.testing.assert_array_equal(part.error, old.parts(state)[name].error)
            np.testing.assert_array_equal(part.q, old.parts(state)[name].q)


def test_scalers_that_disagree_need_an_answer(plain, tmp_path):
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0, 1024.0)]
    for scaler in scalers:
        scaler.scale(torch.ones(1))  # which makes its scale
    plain["scaler_g"], plain["scaler_d"] = (scaler.state_dict() for scaler in scalers)
    checkpoint = written(tmp_path / "c.pt", plain)
    with pytest.raises(CheckpointMismatch, match="loss_scale=") as error:
        converted(checkpoint)
    assert error.value.ambiguous == ("scaler_g: 2", "scaler_d: 1024")
    said = dataclasses.replace(checkpoint, loss_scale=2.0)
    run, _ = converted(said)
    same, _ = converted(dataclasses.replace(checkpoint, loss_scale=1))
    ours, theirs = (r.reducer_state.residual["kernel"] for r in (run, same))
    np.testing.assert_array_equal(2 * ours, theirs)


def test_a_scaler_that_is_not_enabled_changes_nothing(plain, tmp_path):
    before, _ = converted(written(tmp_path / "c.pt", plain))
    plain["scaler"] = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    after, _ = converted(written(tmp_path / "c.pt", plain))
    same = jax.tree.map(np.array_equal, before.reducer_state, after.reducer_state)
    assert all(jax.tree.leaves(same))


def test_save_checkpoint_wants_the_scaler_itself(alone, tmp_path):
    ddp, state, _, scaler = scaled_job(1024.0)
    with pytest.raises(TypeError, match="`scaler` must be the GradScaler itself"):
        save_checkpoint(tmp_path / "c.pt", ddp, state, scaler=scaler.state_dict())


@pytest.mark.parametrize("scale", [0, -1.0, "many", float("nan")])
def test_a_loss_scale_that_is_none(tmp_path, scale):
    path = tmp_path / "c.pt"
    path.write_bytes(files.saved(files.own_format(loss_scale=scale)))
    with pytest.raises(CheckpointMismatch, match="`loss_scale` must be a positive number"):
        load(path)
