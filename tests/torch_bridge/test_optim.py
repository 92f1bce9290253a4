"""Optimizers: after conversion the next updates are those that torch would have made."""

import copy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from numpy.testing import assert_allclose
from torch.optim import SGD, Adam, AdamW

from tests.helpers.rounding import rounding
from torch_bridge import (
    Checkpoint,
    CheckpointMismatch,
    load,
    optimizer_from_torch,
    optimizer_to_torch,
    params_from_torch,
    params_to_torch,
    to_flax,
)


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Promotes as optax.adam needs it, which computes ``decay**count``."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def network():
    """Makes two layers that are not connected; their gradients are given."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(5, 4, bias=False))


LIKE = {
    "Conv_0": {"kernel": np.zeros((3, 3, 2, 3)), "bias": np.zeros(3)},
    "Dense_0": {"kernel": np.zeros((5, 4))},
}


class Job:
    """A module and its optimizer in torch, after some steps, and what they are in Flax."""

    def __init__(self, make, module=None, steps=3, like=LIKE, groups=None, **keywords):
        self.module = module or network()
        self.like = like
        self.optimizer = make(groups or self.module.parameters(), **{"lr": 0.05, **keywords})
        self.train(*range(steps))

    @property
    def model(self):
        return self.module.state_dict()

    @property
    def params(self):
        return params_from_torch(self.model, self.like)

    def gradients(self, seed):
        """Draws gradients by name; both biases of a recurrent layer get that of their sum."""
        torch.manual_seed(seed)
        found = {name: torch.randn_like(p) for name, p in self.module.named_parameters()}
        return {name: found[name.replace("bias_ih", "bias_hh")] for name in found}

    def train(self, *seeds):
        for seed in seeds:
            gradients = self.gradients(seed)
            for name, p in self.module.named_parameters():
                p.grad = gradients[name].clone() if p.requires_grad else None
            self.optimizer.step()

    def to_flax(self, **options):
        return optimizer_from_torch(self.optimizer.state_dict(), self.model, self.params, **options)

    def train_in_flax(self, params, tx, state, *seeds, unused=()):
        update = jax.jit(tx.update)
        for seed in seeds:
            gradients = self.gradients(seed)
            gradients |= {n: g * 0 for n, g in gradients.items() if "bias_ih" in n}
            grads = params_from_torch(gradients, self.like)
            grads |= {name: jax.tree.map(np.zeros_like, grads[name]) for name in unused}
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    def back_in_torch(self, params, state, make, module, **keywords):
        """Makes a job of a fresh optimizer that goes on from Flax."""
        module.load_state_dict(params_to_torch(params, module.state_dict()))
        back = Job(make, module, 0, self.like, **keywords)
        fresh = back.optimizer.state_dict()
        back.optimizer.load_state_dict(optimizer_to_torch(state, params, fresh, back.model))
        return back


def assert_close(params, job):
    # Adam divides by the square root of 1 - 0.999**count, whose digits in float32 are lost if count
    # is small: 0.999**count is rounded.
    kept = [1 - 0.999**count for count in range(1, 7)]
    step = 0.05 * float(np.finfo(np.float32).eps) / 2
    lost = sum(step / (2 * part) for part in kept)

    def close(a, b):
        # A dozen operations in each of six steps; Adam's quotient is of sums of about one.
        allowed = rounding(12 * 6, largest=max(1, np.abs(b).max())) + lost
        assert_allclose(a, b, rtol=0, atol=allowed)

    jax.tree.map(close, params, job.params)


DECAY = {"weight_decay": 0.1, "maximize": True}
BETAS = {"betas": (0.5, 0.9), "eps": 1e-2}
CASES = [  # with what somebody writes by hand, which the state has to fit
    (SGD, {}, None),
    (SGD, {"momentum": 0.9}, optax.sgd(0.1, 0.9)),
    (SGD, {"momentum": 0.9, **DECAY}, None),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, None),
    (Adam, {}, optax.adam(0.1)),
    (Adam, {**BETAS, **DECAY}, None),
    (AdamW, {"weight_decay": 0.2}, optax.adamw(0.1, weight_decay=0.2)),
    (AdamW, {**BETAS, **DECAY}, None),
]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("make", "keywords", "own"), CASES)
def test_next_updates_are_equal_there_and_back(make, keywords, own, steps):
    job = Job(make, steps=steps, **keywords)
    tx, state = job.to_flax()
    assert not own or jax.tree.structure(state) == jax.tree.structure(own.init(job.params))
    params, state = job.train_in_flax(job.params, tx, state, 7, 8)
    job.train(7, 8)
    assert_close(params, job)
    back = job.back_in_torch(params, state, make, network(), **keywords)
    for each in (back, job):
        each.train(9, 10)
    torch.testing.assert_close(back.model, job.model, atol=2e-6, rtol=2e-6)


LSTM = nn.RNN(nn.LSTMCell(5))
ATTENTION = nn.MultiHeadDotProductAttention(2)


@pytest.mark.parametrize(
    ("make", "keywords", "module", "twin"),
    [
        (SGD, {"momentum": 0.9, "weight_decay": 0.1}, torch.nn.LSTM(4, 5), LSTM),
        (Adam, {}, torch.nn.LSTM(4, 5), LSTM),
        (AdamW, {"weight_decay": 0.1}, torch.nn.MultiheadAttention(4, 2), ATTENTION),
    ],
)
def test_packed_and_summed_parameters(make, keywords, module, twin):
    keywords["lr"] = 0.01
    like = jax.eval_shape(twin.init, jax.random.key(0), jnp.ones((2, 3, 4)))["params"]
    alike = copy.deepcopy(module)
    job = Job(make, module, like=like, **keywords)
    params, state = job.train_in_flax(job.params, *job.to_flax(), 7)
    job.train(7)
    assert_close(params, job)
    back = job.back_in_torch(params, state, make, alike, **keywords)
    for each in (back, job):
        each.train(8)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=3e-6), back.params, job.params)


@pytest.mark.parametrize("named", [True, False])
def test_param_groups_with_their_own_hyperparameters(named):
    module = network()
    names = [["0.weight", "1.weight"], ["0.bias"]]
    groups = [{"weight_decay": 0.3}, {"lr": 0.05}]
    for group, chosen in zip(groups, names, strict=True):
        parameters = [(name, module.get_parameter(name)) for name in chosen]
        group["params"] = parameters if named else [parameter for _, parameter in parameters]
    job = Job(AdamW, module, groups=groups, lr=0.01, weight_decay=0.0)
    said = {}
    if not named:
        with pytest.raises(ValueError, match="group by group"):
            job.to_flax()
        said["param_names"] = names
    with pytest.raises(ValueError, match="one for each group"):
        job.to_flax(**said, learning_rate=[optax.constant_schedule(0.1)])
    with pytest.warns(UserWarning, match=r"different rates in torch \(0.01, 0.05\)"):
        job.to_flax(**said, learning_rate=0.1)
    tx, state = job.to_flax(**said)
    before = copy.deepcopy(job.optimizer.state_dict())
    back = optimizer_to_torch(state, job.params, before, job.model, **said)
    torch.testing.assert_close(back["state"], before["state"], rtol=0, atol=0)
    params, _ = job.train_in_flax(job.params, tx, state, 7, 8)
    job.train(7, 8)
    assert_close(params, job)


@pytest.mark.parametrize(
    ("make", "keywords"),
    [
        (SGD, {"momentum": 0.9}),  # which moves nothing without a gradient
        (SGD, {"momentum": 0.9, "weight_decay": 0.3}),
        (Adam, {"weight_decay": 0.3}),
        (AdamW, {"weight_decay": 0.3}),
    ],
)
def test_a_layer_that_is_not_used_yet_waits(make, keywords):
    module = network()
    module[0].requires_grad_(False)
    job = Job(make, module, **keywords)
    before = job.optimizer.state_dict()
    tx, state = job.to_flax(learning_rate=optax.constant_schedule(0.05), step=7)
    params, state = job.train_in_flax(job.params, tx, state, 7, 8, unused=("Conv_0",))
    job.train(7, 8)
    assert_close(params, job)
    if "weight_decay" in keywords:
        before["state"] |= {0: {}, 1: {}}
        back = optimizer_to_torch(state, params, before, job.model)
        assert back["state"].keys() == job.optimizer.state_dict()["state"].keys() == {2}
    module[0].requires_grad_(True)
    params, state = job.train_in_flax(params, tx, state, 9, 10)
    job.train(9, 10)
    assert_close(params, job)
    expected = job.optimizer.state_dict()
    back = optimizer_to_torch(state, params, expected, job.model)
    torch.testing.assert_close(back["state"], expected["state"], rtol=0, atol=1e-5)


def test_biases_that_flax_adds_or_lacks_are_refused_where_their_updates_would_be_others():
    like = jax.eval_shape(nn.RNN(nn.LSTMCell(5)).init, jax.random.key(0), jnp.ones((2, 3, 4)))
    with pytest.raises(CheckpointMismatch, match="the sum of 2 torch biases, whose L2"):
        Job(Adam, torch.nn.LSTM(4, 5), like=like["params"], weight_decay=0.1).to_flax()
    module = torch.nn.GRU(4, 5)
    job = Job(SGD, module, 0, nnx.state(nnx.RNN(nnx.GRUCell(4, 5, rngs=nnx.Rngs(0)))))
    module.bias_hh_l0.data[10:] = 0
    with pytest.raises(CheckpointMismatch, match="The optimizer moves bias_hh_l0"):
        job.to_flax()


REFUSED = [  # which torch's SGD and Adam would not do, or what no file of theirs has
    (Adam, {"amsgrad": True}, {}, {}, "amsgrad"),
    (SGD, {"momentum": 0.9, "dampening": 0.5}, {}, {}, "dampening"),
    (torch.optim.Adagrad, {}, {}, {}, r"Only torch\.optim\.SGD"),
    (Adam, {}, {}, {"exp_avg_var": np.zeros(3)}, r"\['exp_avg_var'\]"),
    (Adam, {}, {"final_lr": 0.1, "gamma": 0.1}, {}, r"\['final_lr', 'gamma'\]"),
    (SGD, {}, {"trust_coefficient": 1e-3}, {}, r"\['trust_coefficient'\]"),
]


def changed(make, group, kept, **keywords):
    """Makes a job after a step, and its state with other entries of a group and a parameter."""
    job = Job(make, steps=1, **keywords)
    saved = job.optimizer.state_dict()
    saved["param_groups"][0].update(group)
    saved["state"].setdefault(1, {}).update(kept)
    return job, saved


@pytest.mark.parametrize(("make", "keywords", "group", "kept", "said"), REFUSED)
def test_what_has_no_equal_is_refused(make, keywords, group, kept, said):
    job, saved = changed(make, group, kept, **keywords)
    with pytest.raises(ValueError, match=said):
        optimizer_from_torch(saved, job.model, job.params)
    with pytest.raises(ValueError, match=said):
        optimizer_to_torch((), job.params, saved, job.model)


BROKEN = [
    (SGD, {"lr": "fast"}, {}, "`lr` must be a number, got a str"),
    (SGD, {"momentum": [0.9]}, {}, "`momentum` must be a number, got a list"),
    (SGD, {"weight_decay": np.zeros(3)}, {}, "`weight_decay` must be a number"),
    (SGD, {"momentum": 0.9}, {"momentum_buffer": np.zeros(7)}, "does not belong to this model"),
    (Adam, {}, {"step": float("inf")}, "`step` must be a count"),
    (Adam, {}, {"step": "many"}, "`step` must be a number"),
    (SGD, {"params": [[0]]}, {}, "not an optimizer state"),
    (SGD, {"params": 0}, {}, "not an optimizer state"),
    (SGD, {"param_names": [b"w"]}, {}, "not an optimizer state"),
    (SGD, {"param_names": "w"}, {}, "not an optimizer state"),
]
NO_STATES = [
    {"state": {}},
    {"state": [], "param_groups": []},
    {"state": {}, "param_groups": {"lr": 0.1}},
    {"state": {}, "param_groups": [5]},
    {"state": {0: 1}, "param_groups": [{"lr": 0.1, "params": [0]}]},
]


@pytest.mark.parametrize(("make", "group", "kept", "said"), BROKEN)
def test_entries_of_wrong_types_are_refused(make, group, kept, said):
    job, saved = changed(make, group, kept)
    with pytest.raises(CheckpointMismatch, match=said):
        optimizer_from_torch(saved, job.model, job.params)


@pytest.mark.parametrize("saved", NO_STATES)
def test_what_is_no_state_of_an_optimizer_is_refused(saved):
    with pytest.raises(CheckpointMismatch, match="not an optimizer state"):
        optimizer_from_torch(saved, network().state_dict(), LIKE)


def test_states_of_other_parameters_or_another_optimizer_are_refused():
    job = Job(Adam)
    with pytest.raises(CheckpointMismatch, match=r"has exp_avg \(4, 5\)") as caught:
        job.to_flax(param_names=list(reversed(job.model)))
    assert len(caught.value.mis_shaped) == 4
    like = job.optimizer.state_dict()
    state = optax.sgd(0.1).init(job.params)
    with pytest.raises(CheckpointMismatch, match="another optimizer") as caught:
        optimizer_to_torch(state, job.params, like, job.model)
    assert caught.value.missing == ("0.weight", "0.bias", "1.weight")


@pytest.mark.parametrize("make", [SGD, AdamW])
def test_what_schedulers_and_people_note_in_a_group_is_no_other_algorithm(make):
    job = Job(make, steps=0)
    job.optimizer.param_groups[0]["name"] = "all"
    torch.optim.lr_scheduler.OneCycleLR(job.optimizer, 0.2, 10, cycle_momentum=False)
    torch.optim.swa_utils.SWALR(job.optimizer, 0.1)
    job.to_flax(learning_rate=0.1)


def test_older_files_say_which_adam():
    job = Job(AdamW, weight_decay=0.1)
    state = job.optimizer.state_dict()
    assert state["param_groups"][0].pop("decoupled_weight_decay")  # as the sentence says
    with pytest.raises(ValueError, match="Set 'decoupled_weight_decay'"):
        optimizer_from_torch(state, job.model, job.params)


def test_a_learning_rate_in_a_tensor_stays_one(tmp_path):
    job = Job(AdamW, lr=torch.tensor(1e-3), foreach=False)
    torch.save({"model": job.model, "optimizer": job.optimizer.state_dict()}, tmp_path / "x")
    checkpoint = load(tmp_path / "x")
    _, state = optimizer_from_torch(checkpoint.optimizer, checkpoint.model, job.params)
    back = optimizer_to_torch(state, job.params, checkpoint.optimizer, checkpoint.model)
    torch.save(back, tmp_path / "back.pt")
    job.optimizer.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    assert torch.is_tensor(job.optimizer.param_groups[0]["lr"])
    assert job.optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-3)


def test_a_schedule_goes_on_where_the_user_says_if_nothing_has_counted():
    job = Job(SGD, network(), momentum=0.9)
    checkpoint = Checkpoint(job.model, optimizer=job.optimizer.state_dict())
    schedule = optax.linear_schedule(0.1, 0.0, 40)
    with pytest.raises(ValueError, match=r"nothing in the file counts the steps.*Pass `step`"):
        job.to_flax(learning_rate=schedule)
    with pytest.raises(ValueError, match=r"nothing in the file counts the steps.*Pass `step`"):
        to_flax(checkpoint, job.params, learning_rate=schedule)
    _, state = job.to_flax(learning_rate=schedule, step=30)
    assert optax.tree.get(state, "count") == 30


def test_moments_of_no_parameter_are_refused():
    job = Job(Adam, network())
    document = job.optimizer.state_dict()
    document["state"] = {f"p{key}": value for key, value in document["state"].items()}
    with pytest.raises(CheckpointMismatch, match="belong to nobody") as caught:
        optimizer_from_torch(document, job.model, job.params)
    assert caught.value.unexpected == ("'p0'", "'p1'", "'p2'")


def test_moments_of_two_optimizers_are_refused():
    model = {"fc.weight": np.zeros((3, 2), np.float32)}
    params = {"fc": {"kernel": np.zeros((2, 3), np.float32)}}
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False, "params": [0]}
    like = {"state": {}, "param_groups": [group]}
    state = optax.sgd(0.1, momentum=0.9).init(params)
    with pytest.raises(CheckpointMismatch, match="`trace` of fc/kernel twice"):
        optimizer_to_torch((state, state), params, like, model)
    for step in (-1, 2.5):
        with pytest.raises(ValueError, match="`step` must be a number of updates"):
            optimizer_from_torch(like, model, params, step=step)
