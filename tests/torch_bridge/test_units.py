"""Files that mean something else than they seem to say: converted right, or said by name."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.fuzz.legitimate import DTYPES
from tests.helpers import torch_files as files
from tests.helpers.bridge import ddp_job, kernels, linears
from tests.helpers.leaves import equal
from torch_bridge import (
    BucketLayout,
    Checkpoint,
    CheckpointMismatch,
    PowerSGDRecord,
    load,
    record_layout,
    resume_powersgd,
    save_checkpoint,
    state_from_record,
    to_flax,
    to_torch,
)

LIKE = {"kernel": np.zeros((24, 16), np.float32), "bias": np.zeros(16, np.float32)}


def converted(checkpoint, like=LIKE, **options):
    """Returns the run in Flax, and what was said of it, beside what plain=True assumes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Assumed")
        run = to_flax(checkpoint, like, **options)
    return run, [str(warning.message) for warning in caught]


# --- errors in units of a scaled loss -----------------------------------------------------------


def scaled_job(scale):
    """Trains a job whose hook compresses gradients of a loss times `scale`."""
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    return ddp_job(torch.nn.Linear(24, 16), scaler=scaler), scaler


def as_most_loops(ddp, state, optimizer):
    """Makes the document that most loops save."""
    models = {"state_dict": ddp.state_dict(), "optimizer": optimizer.state_dict()}
    return models | {"comm_hook_state": state, "world_size": 1}


@pytest.fixture
def plain(alone):
    return as_most_loops(*scaled_job(1)[0])


def written(path, document):
    torch.save(document, path)
    return load(path)


@pytest.mark.parametrize("place", ["scaler", "amp", "save_checkpoint"])
def test_a_loss_scale_is_taken_out_and_put_in_again(plain, tmp_path, place):
    path = tmp_path / "c.pt"
    unscaled, _ = converted(written(path, plain))
    (ddp, state, optimizer), scaler = scaled_job(4096.0)
    if place == "save_checkpoint":
        save_checkpoint(path, ddp, state, optimizer=optimizer, scaler=scaler)
        assert torch.load(path, weights_only=True)["extra"]["scaler"] == scaler.state_dict()
    else:
        document = as_most_loops(ddp, state, optimizer)
        above = document if place == "scaler" else document.setdefault(place, {})
        above["grad_scaler"] = scaler.state_dict()
        torch.save(document, path)
    checkpoint = load(path)
    run, said = converted(checkpoint)
    assert not said
    close = functools.partial(assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, run.reducer_state, unscaled.reducer_state)
    back = tmp_path / "back.pt"
    to_torch(run.params, run.opt_state, checkpoint, path=back)
    returned = load(back)
    new = returned.layout.parts(state_from_record(returned.record(0)))["weight"]
    old = returned.layout.parts(state)["weight"]
    assert_array_equal(new.error, old.error)
    assert_array_equal(new.q, old.q)


def test_scalers_that_disagree_need_an_answer(plain, tmp_path):
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0, 1024.0)]
    for scaler in scalers:
        scaler.scale(torch.ones(1))  # which makes its scale
    plain["scaler_g"], plain["scaler_d"] = (scaler.state_dict() for scaler in scalers)
    checkpoint = written(tmp_path / "c.pt", plain)
    with pytest.raises(CheckpointMismatch, match="loss_scale=") as error:
        converted(checkpoint)
    assert error.value.ambiguous == (
        "checkpoint.extra['scaler_g']: 2",
        "checkpoint.extra['scaler_d']: 1024",
    )
    said = dataclasses.replace(checkpoint, loss_scale=2.0)
    run, _ = converted(said)
    same, _ = converted(dataclasses.replace(checkpoint, loss_scale=1))
    ours, theirs = (r.reducer_state.residual["kernel"] for r in (run, same))
    assert_array_equal(2 * ours, theirs)


def test_a_scaler_that_is_not_enabled_changes_nothing(plain, tmp_path):
    before, _ = converted(written(tmp_path / "c.pt", plain))
    plain["scaler"] = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    after, _ = converted(written(tmp_path / "c.pt", plain))
    equal(before.reducer_state, after.reducer_state)


def test_save_checkpoint_wants_the_scaler_itself(alone, tmp_path):
    (ddp, state, _), scaler = scaled_job(1024.0)
    with pytest.raises(TypeError, match="`scaler` must be the GradScaler itself"):
        save_checkpoint(tmp_path / "c.pt", ddp, state, scaler=scaler.state_dict())


@pytest.mark.parametrize("scale", [0, "many", float("nan")])
def test_a_loss_scale_that_is_none(tmp_path, scale):
    path = tmp_path / "c.pt"
    path.write_bytes(files.saved(files.own_format(loss_scale=scale)))
    with pytest.raises(CheckpointMismatch, match="`loss_scale` must be a positive number"):
        load(path)


# --- optimizers ---------------------------------------------------------------------------------


def square_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(6, 6, bias=False) for _ in range(3)])


SQUARES = kernels(layers_0=(6, 6), layers_1=(6, 6), layers_2=(6, 6))


def stepped(optimizer, module, schedule=None):
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        (module(torch.randn(8, 6)) ** 2).mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return optimizer


def saved(tmp_path, module, optimizer):
    """Returns what `load` makes of the file that most loops write."""
    document = {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}
    return written(tmp_path / "c.pt", document)


MOMENTUM_DRIVERS = [
    (torch.optim.AdamW, {}, "OneCycleLR", (2e-3, 40), {}, "betas"),
    (torch.optim.SGD, {"momentum": 0.9}, "OneCycleLR", (0.1, 40), {}, "momentum"),
    (torch.optim.SGD, {"momentum": 0.9}, "CyclicLR", (0.01, 0.1), {}, "momentum"),
    (torch.optim.SGD, {"momentum": 0.9}, "OneCycleLR", (0.1, 40), {"cycle_momentum": False}, ""),
    (torch.optim.SGD, {"momentum": 0.9}, "StepLR", (5,), {}, ""),
]


@pytest.mark.parametrize(("make", "options", "name", "args", "more", "kind"), MOMENTUM_DRIVERS)
def test_what_a_scheduler_drove_is_named(tmp_path, make, options, name, args, more, kind):
    module = square_layers()
    optimizer = make(module.named_parameters(), lr=1e-3, **options)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, *args, **more)
    checkpoint = saved(tmp_path, module, stepped(optimizer, module, schedule))
    _, said = converted(checkpoint, SQUARES, plain=True)
    assert len(said) == 1 + bool(kind)
    assert "Pass learning_rate=" in "".join(said)
    _, said = converted(checkpoint, SQUARES, plain=True, learning_rate=lambda step: 1e-3, step=9)
    assert [f"drives the optimizer's `{kind}`" in text for text in said] == [True] * bool(kind)


def test_an_optimizer_without_names_says_what_could_be_exchanged(tmp_path):
    module = square_layers()
    backwards = [parameter for _, parameter in module.named_parameters()][::-1]
    optimizer = stepped(torch.optim.SGD(backwards, 0.1, momentum=0.9), module)
    checkpoint = saved(tmp_path, module, optimizer)
    _, (said,) = converted(checkpoint, SQUARES, plain=True)
    assert "0.weight and 1.weight" in said
    assert "param_names=" in said
    names = ["2.weight", "1.weight", "0.weight"]
    run, said = converted(checkpoint, SQUARES, plain=True, param_names=names)
    assert not said
    moved = run.optimizer_state[0].trace["layers_0"]["kernel"]
    buffer = optimizer.state_dict()["state"][2]["momentum_buffer"]
    assert_array_equal(moved, buffer.numpy().T)
    with pytest.raises(ValueError, match="names a parameter twice"):
        converted(checkpoint, SQUARES, plain=True, param_names=["0.weight", "1.weight", "0.weight"])


def test_sorted_names_do_not_tell_the_order_of_an_optimizer(tmp_path):
    module = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(11)])
    optimizer = stepped(torch.optim.Adam(module.parameters()), module)
    document = {"optimizer": optimizer.state_dict()}
    document["state_dict"] = dict(sorted(module.state_dict().items()))  # as safetensors does
    checkpoint = written(tmp_path / "c.pt", document)
    like = linears(**{f"layers_{index}": (6, 6) for index in range(11)})
    with pytest.raises(ValueError, match="names of the model are sorted, as safetensors"):
        converted(checkpoint, like, plain=True)
    names = [name for name, _ in module.named_parameters()]
    run, said = converted(checkpoint, like, plain=True, param_names=names)
    assert not said
    kept = run.optimizer_state[0].mu["layers_10"]["bias"]
    assert_array_equal(kept, optimizer.state_dict()["state"][21]["exp_avg"].numpy())


def test_moments_take_the_dtype_of_their_parameters(tmp_path):
    module = square_layers()
    optimizer = stepped(torch.optim.AdamW(module.named_parameters(), 0.1), module)
    document = {"optimizer": optimizer.state_dict()}
    document["state_dict"] = module.bfloat16().state_dict()
    checkpoint = written(tmp_path / "c.pt", document)
    like = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), SQUARES)
    run, said = converted(checkpoint, like, plain=True)
    assert ["exp_avg of 0.weight (float32 beside bfloat16)" in text for text in said] == [True]
    fresh = run.optimizer.init(run.params)
    dtypes = [jax.tree.map(jnp.result_type, state) for state in (run.optimizer_state, fresh)]
    assert dtypes[0] == dtypes[1]


def test_a_file_without_an_optimizer_says_that_nothing_goes_downhill(tmp_path):
    module = square_layers()
    checkpoint = written(tmp_path / "c.pt", {"state_dict": module.state_dict()})
    _, said = converted(checkpoint, SQUARES, plain=True)
    assert ["the loss increases" in text for text in said] == [True]


def test_an_optimizers_own_file_is_read(tmp_path):
    module = square_layers()
    optimizer = stepped(torch.optim.AdamW(module.named_parameters(), 0.1), module)
    found = written(tmp_path / "optimizer.bin", optimizer.state_dict()).optimizer
    kept = optimizer.state_dict()["state"][2]["exp_avg"].numpy()
    assert_array_equal(found["state"][2]["exp_avg"], kept)


@pytest.mark.parametrize("feedback", [True, False])
def test_a_hook_that_draws_q_anew_is_equal_in_kind_alone(alone, tmp_path, feedback):
    module = torch.nn.Linear(24, 16)
    ddp, state, _ = ddp_job(module, warm_start=False, use_error_feedback=feedback)
    save_checkpoint(tmp_path / "c.pt", ddp, state)
    checkpoint = load(tmp_path / "c.pt")
    run, said = converted(checkpoint)
    assert "warm_start=False" in "".join(said)
    if not feedback:
        return
    error = checkpoint.layout.parts(checkpoint.powersgd[0])["weight"].error
    assert_array_equal(run.reducer_state.residual["kernel"], error.T)
    document = to_torch(run.params, run.opt_state, checkpoint)
    assert_array_equal(document["errors"][0][0][-24 * 16 :], error.reshape(-1))


# --- jobs of other kinds ------------------------------------------------------------------------


def test_complex_parameters_are_named(alone, tmp_path):
    module = torch.nn.Linear(4, 3, dtype=torch.complex64)
    like = {"kernel": np.zeros((4, 3), np.complex64), "bias": np.zeros(3, np.complex64)}
    ddp = DistributedDataParallel(module)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(4):
        ddp(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    with pytest.raises(CheckpointMismatch, match="twice as many real numbers") as error:
        save_checkpoint(tmp_path / "c.pt", ddp, state)
    assert set(error.value.unexpected) == {"weight", "bias"}
    save_checkpoint(tmp_path / "c.pt", ddp, None, optimizer=optimizer)
    checkpoint = load(tmp_path / "c.pt")
    with pytest.raises(CheckpointMismatch, match="a complex parameter cannot be converted"):
        converted(checkpoint, like)
    run, _ = converted(dataclasses.replace(checkpoint, optimizer=None, hook=None), like)
    assert_array_equal(run.params["kernel"], module.weight.detach().numpy().T)


@pytest.mark.parametrize("has_state", [False, True])
def test_what_was_frozen_before_compression_began_is_frozen(alone, tmp_path, has_state):
    net = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 24))
    _, _, optimizer = ddp_job(net)  # SGD keeps a momentum for both layers, and no count of steps
    net[0].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(None, 2) if has_state else None
    save_checkpoint(tmp_path / "c.pt", ddp, state, optimizer=optimizer)
    like = linears(layers_0=(24, 16), layers_1=(16, 24))
    run, said = converted(load(tmp_path / "c.pt"), like)
    assert "layers_0/bias, layers_0/kernel: the optimizer has them and DDP's" in "".join(said)
    gradients = jax.tree.map(np.ones_like, run.params)
    updates, _ = run.optimizer.update(gradients, run.optimizer_state, run.params)
    assert not np.any(updates["layers_0"]["kernel"])
    assert np.all(updates["layers_1"]["kernel"])


def resumed(state, layout):
    """Returns a state with which a new job of one Linear goes on."""
    ddp = DistributedDataParallel(torch.nn.Linear(24, 16))
    resume_powersgd(ddp, state, layout, lambda: ddp(torch.ones(1, 24)).sum().backward())
    return state


def test_a_run_saved_before_compression_goes_back_after_it_began(alone, tmp_path):
    ddp, state, optimizer = ddp_job(torch.nn.Linear(24, 16), start_powerSGD_iter=100)
    save_checkpoint(tmp_path / "c.pt", ddp, state, optimizer=optimizer)
    run, _ = converted(load(tmp_path / "c.pt"))
    for count in (4, 200):
        reducer_state = run.reducer_state._replace(count=jnp.int32(count))
        to_torch(run.params, (reducer_state, run.optimizer_state), run, path=tmp_path / "back.pt")
        checkpoint = load(tmp_path / "back.pt")
        record = checkpoint.record(0)
        state = resumed(state_from_record(record), checkpoint.layout)
        assert state.iter == count
        assert bool(state.q_memory_dict) == (count == 200)
    with pytest.raises(CheckpointMismatch, match="hold other parameters than the layout"):
        resumed(state_from_record(record), None)
    fresh = resumed(powerSGD_hook.PowerSGDState(None, 2), None)  # has no buffers to lay out
    assert fresh.start_powerSGD_iter == 1_000


def test_a_state_of_post_local_sgd_is_named(alone, tmp_path):
    module = torch.nn.Linear(24, 16)
    ddp = DistributedDataParallel(module)
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    ddp(torch.ones(2, 24)).sum().backward()
    for call in (
        lambda: save_checkpoint(tmp_path / "c.pt", ddp, state),
        lambda: record_layout(ddp, state),
        lambda: resume_powersgd(ddp, state, record_layout(ddp), lambda: None),
    ):
        with pytest.raises(TypeError, match="must be the PowerSGDState, got a PostLocalSGDState"):
            call()
    document = {"state_dict": module.state_dict(), "comm_hook_state": state}
    checkpoint = written(tmp_path / "c.pt", document)
    assert checkpoint.extra["comm_hook_state"]["start_localSGD_iter"] == 100
    with pytest.raises(ValueError, match=r"jaxcomp\.local_sgd \(or local_sgd_round\)"):
        converted(checkpoint)


def test_activation_checkpointing_changes_no_name(alone, tmp_path):
    net = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(24, 16)), torch.nn.Linear(16, 24))
    ddp, state, optimizer = ddp_job(net)
    save_checkpoint(tmp_path / "c.pt", ddp, state, optimizer=optimizer)
    checkpoint = load(tmp_path / "c.pt")
    assert set(checkpoint.layout.names) == set(net.state_dict())
    run, said = converted(checkpoint, linears(layers_0=(24, 16), layers_1=(16, 24)))
    assert run.step == 4
    assert said == []
    document = to_torch(run.params, run.opt_state, checkpoint)
    net.load_state_dict(document["state_dict"])


def test_one_name_with_and_without_a_wrappers_word(tmp_path):
    both = {"0._checkpoint_wrapped_module.w": torch.ones(2), "0.w": torch.ones(2)}
    with pytest.raises(CheckpointMismatch, match="differ only in a wrapper's prefix"):
        written(tmp_path / "c.pt", both)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_is_read_goes_back(tmp_path, name):
    scale = torch.tensor([0, 1, 2]).to(getattr(torch, name))
    document = {"state_dict": {"fc.weight": torch.ones(3, 2), "scale": scale}}
    checkpoint = written(tmp_path / "c.pt", document)
    back = to_torch(kernels(fc=(2, 3)), (), checkpoint, ignore="scale")["state_dict"]["scale"]
    assert back.dtype == scale.dtype
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_a_state_that_no_longer_fits_its_dtype_is_refused():
    weight = np.zeros((16, 24), np.float32)
    layout = BucketLayout.from_order([["weight"]], {"weight": weight})
    error = np.ones(weight.size, np.float16)
    q = np.ones(48, np.float16)
    record = PowerSGDRecord(2, 20, {0: error}, {0: np.ones(32, np.float16)}, {0: q})
    checkpoint = Checkpoint({"weight": weight}, (record,), None, layout, world_size=1)
    checkpoint = dataclasses.replace(checkpoint, loss_scale=1024.0)
    like = {"kernel": np.zeros((24, 16), np.float32)}
    run, _ = converted(checkpoint, like)
    back = to_torch(run.params, run.opt_state, checkpoint)
    assert_array_equal(back["errors"][0][0], error)
    grown = run.reducer_state._replace(
        residual={"kernel": 100 + run.reducer_state.residual["kernel"]}
    )
    with pytest.raises(CheckpointMismatch, match="multiplied by the loss scale") as caught:
        to_torch(run.params, (grown,), checkpoint)
    assert caught.value.mis_shaped == ("error_dict of bucket 0: float16",)


# --- an example of a job ------------------------------------------------------------------------


class Disturbing(torch.nn.Module):
    """Notes how it is run, and changes all that a run may change."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.seen = []

    def forward(self, x):
        self.seen.append((self.training, torch.get_float32_matmul_precision()))
        self.norm.running_mean += torch.rand(2)
        return self.norm(self.fc(x))


@pytest.fixture
def _rounded_products():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_rounded_products")
def test_an_example_is_run_exactly_and_leaves_a_job_as_it_was(alone, tmp_path):
    module = Disturbing()
    ddp = DistributedDataParallel(module)
    random = torch.get_rng_state()
    mean = module.norm.running_mean.clone()
    save_checkpoint(tmp_path / "c.pt", ddp, None, example=torch.ones(4, 3))
    (inputs,), outputs = load(tmp_path / "c.pt").example
    assert inputs.shape == (4, 3)
    assert outputs.shape == (4, 2)
    assert module.seen == [(False, "highest")]
    assert module.training
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(module.norm.running_mean, mean)


# --- tied in torch, and two leaves in Flax ------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.head = torch.nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def test_what_is_tied_in_torch_and_apart_in_flax_is_named_both_ways(tmp_path):
    module = Tied()
    optimizer = torch.optim.SGD(module.named_parameters(), 0.1, momentum=0.9)
    module(torch.arange(10)).square().mean().backward()
    optimizer.step()
    checkpoint = saved(tmp_path, module, optimizer)
    like = {"embed": {"embedding": np.zeros((10, 6))}, "head": {"kernel": np.zeros((6, 10))}}
    with pytest.raises(CheckpointMismatch, match=r"Embed\.attend") as caught:
        converted(checkpoint, like)
    assert caught.value.ambiguous == ("embed.weight: embed/embedding, head/kernel",)
    anew = dataclasses.replace(checkpoint, optimizer=None)
    run, _ = converted(anew, like)
    alike = to_torch(run.params, (), anew)["state_dict"]
    assert torch.equal(alike["embed.weight"], alike["head.weight"])
    run.params["head"]["kernel"] = run.params["head"]["kernel"] + 1
    with pytest.raises(CheckpointMismatch, match="trained apart are one") as caught:
        to_torch(run.params, (), anew)
    assert caught.value.ambiguous == ("embed.weight and head.weight",)
    one, said = converted(checkpoint, {"embed": like["embed"]})
    assert one.optimizer_state[0].trace["embed"]["embedding"].shape == (10, 6)
    assert said == []
    alike = to_torch(one.params, (), anew)["state_dict"]
    assert alike["embed.weight"].data_ptr() == alike["head.weight"].data_ptr()
