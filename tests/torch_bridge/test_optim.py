"""Optimizers: after conversion the next updates are those that torch would have made."""

from __future__ import annotations

import copy
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from rounding import rounding

from torch_bridge import (
    CheckpointMismatch,
    load,
    optimizer_from_torch,
    optimizer_to_torch,
    params_from_torch,
    params_to_torch,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _standard_promotion():
    """optax.adam computes ``decay**count``, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


SGD = [
    {"momentum": m, "nesterov": n, "weight_decay": w, "maximize": bool(x)}
    for m, n, w, x in itertools.product((0, 0.9), (False, True), (0, 0.1), (False, True))
    if m or not n
]
ADAM = [
    {"betas": b, "eps": e, "weight_decay": w, "maximize": bool(x)}
    for b, e, w, x in itertools.product(
        ((0.9, 0.999), (0.5, 0.9)), (1e-8, 1e-2), (0, 0.1), (False, True)
    )
]
CASES = [
    *((torch.optim.SGD, keywords) for keywords in SGD),
    *((torch.optim.Adam, keywords) for keywords in ADAM),
    *((torch.optim.AdamW, keywords) for keywords in ADAM),
]


def network() -> torch.nn.Sequential:
    """Two layers, each by itself: gradients are given."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(5, 4, bias=False))


LIKE = {
    "Conv_0": {"kernel": np.zeros((3, 3, 2, 3)), "bias": np.zeros(3)},
    "Dense_0": {"kernel": np.zeros((5, 4))},
}


def gradients(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in module.named_parameters()}


def torch_steps(module, optimizer, seeds) -> None:
    parameters = dict(module.named_parameters())
    for seed in seeds:
        for name, gradient in gradients(module, seed).items():
            parameters[name].grad = gradient.clone() if parameters[name].requires_grad else None
        optimizer.step()


def flax_steps(module, like, params, tx, state, seeds, unused=()):
    update = jax.jit(tx.update)
    for seed in seeds:
        grads = params_from_torch(gradients(module, seed), like)
        grads |= {name: jax.tree.map(np.zeros_like, grads[name]) for name in unused}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(params, module, like):
    def close(a, b):
        # A dozen operations in each of six steps; Adam's quotient is of sums of about one.
        allowed = rounding(12 * 6, largest=max(1, np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed)

    jax.tree.map(close, params, params_from_torch(module.state_dict(), like))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("make", "keywords"), CASES)
def test_next_updates_are_equal_there_and_back(make, keywords, steps):
    module = network()
    optimizer = make(module.parameters(), lr=0.05, **keywords)
    torch_steps(module, optimizer, range(steps))
    params = params_from_torch(module.state_dict(), LIKE)
    tx, state = optimizer_from_torch(optimizer.state_dict(), module.state_dict(), params)

    resumed = copy.deepcopy(module)
    params, state = flax_steps(module, LIKE, params, tx, state, (7, 8))
    torch_steps(module, optimizer, (7, 8))
    assert_close(params, module, LIKE)

    resumed.load_state_dict(params_to_torch(params, resumed.state_dict()))
    fresh = make(resumed.parameters(), lr=0.05, **keywords)
    converted = optimizer_to_torch(state, params, fresh.state_dict(), resumed.state_dict())
    fresh.load_state_dict(converted)
    torch_steps(resumed, fresh, (9, 10))
    torch_steps(module, optimizer, (9, 10))
    for ours, theirs in zip(resumed.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("make", "keywords", "own"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, optax.sgd(0.1, 0.9, nesterov=True)),
        (torch.optim.Adam, {}, optax.adam(0.1)),
        (torch.optim.AdamW, {"weight_decay": 0.2}, optax.adamw(0.1, weight_decay=0.2)),
    ],
)
def test_state_fits_the_optimizer_that_one_writes_by_hand(make, keywords, own):
    module = network()
    optimizer = make(module.parameters(), lr=0.1, **keywords)
    torch_steps(module, optimizer, range(2))
    params = params_from_torch(module.state_dict(), LIKE)
    _, state = optimizer_from_torch(optimizer.state_dict(), module.state_dict(), params)
    assert jax.tree.structure(state) == jax.tree.structure(own.init(params))


@pytest.mark.parametrize("named", [True, False])
def test_param_groups_with_their_own_hyperparameters(named):
    module = network()
    matrices = [(n, p) for n, p in module.named_parameters() if p.ndim > 1]
    vectors = [(n, p) for n, p in module.named_parameters() if p.ndim < 2]
    groups = [
        {"params": matrices if named else [p for _, p in matrices], "weight_decay": 0.3},
        {"params": vectors if named else [p for _, p in vectors], "weight_decay": 0.0, "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    torch_steps(module, optimizer, range(3))
    params = params_from_torch(module.state_dict(), LIKE)
    names = None if named else [[n for n, _ in matrices], [n for n, _ in vectors]]
    model = module.state_dict()
    if not named:
        with pytest.raises(ValueError, match="group by group"):
            optimizer_from_torch(optimizer.state_dict(), model, params)
    tx, state = optimizer_from_torch(optimizer.state_dict(), model, params, param_names=names)
    before = copy.deepcopy(optimizer.state_dict())
    back = optimizer_to_torch(state, params, optimizer.state_dict(), model, param_names=names)
    for index, kept in before["state"].items():
        for key, value in kept.items():
            torch.testing.assert_close(back["state"][index][key], value, rtol=0, atol=0)
    params, _ = flax_steps(module, LIKE, params, tx, state, (7, 8))
    torch_steps(module, optimizer, (7, 8))
    assert_close(params, module, LIKE)


@pytest.mark.parametrize(
    ("make", "keywords"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),  # which moves nothing without a gradient
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.3}),
        (torch.optim.Adam, {"weight_decay": 0.3}),
        (torch.optim.AdamW, {"weight_decay": 0.3}),
    ],
)
def test_a_layer_that_is_not_used_yet_waits(make, keywords):
    module = network()
    optimizer = make(module.parameters(), lr=0.05, **keywords)
    module[0].requires_grad_(False)
    torch_steps(module, optimizer, range(3))
    params, before = params_from_torch(module.state_dict(), LIKE), optimizer.state_dict()
    rate = optax.constant_schedule(0.05)
    tx, state = optimizer_from_torch(before, module.state_dict(), params, learning_rate=rate)
    params, state = flax_steps(module, LIKE, params, tx, state, (7, 8), unused=("Conv_0",))
    torch_steps(module, optimizer, (7, 8))
    assert_close(params, module, LIKE)
    if "weight_decay" in keywords:
        back = optimizer_to_torch(state, params, before, module.state_dict())
        assert back["state"].keys() == optimizer.state_dict()["state"].keys() == {2}
        counts = {int(c) for c in jax.tree.leaves(state) if c.dtype == np.int32 and c.ndim == 0}
        assert 2 + (3 if make is not torch.optim.SGD else 0) in counts

    module[0].requires_grad_(True)
    params, _ = flax_steps(module, LIKE, params, tx, state, (9, 10))
    torch_steps(module, optimizer, (9, 10))
    assert_close(params, module, LIKE)


@pytest.mark.parametrize(
    ("make", "keywords"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_packed_and_summed_parameters(make, keywords, kind):
    torch.manual_seed(0)
    x = jnp.ones((2, 3, 4))
    if kind == "lstm":
        module = torch.nn.LSTM(4, 5)
        like = jax.eval_shape(nn.RNN(nn.LSTMCell(5)).init, jax.random.key(0), x)["params"]
        alike = torch.nn.LSTM(4, 5)
    else:
        module = torch.nn.MultiheadAttention(4, 2)
        layer = nn.MultiHeadDotProductAttention(2)
        like = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
        alike = torch.nn.MultiheadAttention(4, 2)
    optimizer = make(module.parameters(), lr=0.01, **keywords)

    def step(module, optimizer, seed):
        values = gradients(module, seed)
        for name, parameter in module.named_parameters():
            parameter.grad = values[name.replace("bias_ih", "bias_hh")].clone()
        optimizer.step()

    for seed in range(3):
        step(module, optimizer, seed)
    params = params_from_torch(module.state_dict(), like)
    tx, state = optimizer_from_torch(optimizer.state_dict(), module.state_dict(), params)
    # Both biases have one gradient, which is that of their sum.
    values = {n: g * 0 if "bias_ih" in n else g for n, g in gradients(module, 7).items()}
    updates, state = tx.update(params_from_torch(values, like), state, params)
    params = optax.apply_updates(params, updates)
    step(module, optimizer, 7)
    assert_close(params, module, like)

    alike.load_state_dict(params_to_torch(params, alike.state_dict()))
    fresh = make(alike.parameters(), lr=0.01, **keywords)
    fresh.load_state_dict(optimizer_to_torch(state, params, fresh.state_dict(), alike.state_dict()))
    step(alike, fresh, 8)
    step(module, optimizer, 8)
    ours, theirs = (params_from_torch(m.state_dict(), like) for m in (alike, module))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), ours, theirs)


def test_schedule_goes_on_where_torch_stopped():
    module = network()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    torch_steps(module, optimizer, range(3))
    params = params_from_torch(module.state_dict(), LIKE)
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    for rates in (schedule, [schedule]):
        _, state = optimizer_from_torch(
            optimizer.state_dict(), module.state_dict(), params, learning_rate=rates
        )
        assert int(state[-1].count) == 3
    with pytest.raises(ValueError, match="one for each group"):
        optimizer_from_torch(
            optimizer.state_dict(), module.state_dict(), params, learning_rate=[schedule] * 2
        )


def test_nnx_optimizer():
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    torch_steps(module, optimizer, range(2))
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    nnx.update(layer, params_from_torch(module, nnx.state(layer)))
    params = nnx.state(layer, nnx.Param)
    tx, state = optimizer_from_torch(optimizer.state_dict(), module, params)
    ours = nnx.Optimizer(layer, tx, wrt=nnx.Param)
    structure = jax.tree.structure(ours.opt_state)
    ours.opt_state = jax.tree.unflatten(structure, jax.tree.leaves(state))
    ours.update(layer, params_from_torch(gradients(module, 7), params))
    torch_steps(module, optimizer, (7,))
    assert_close(nnx.state(layer, nnx.Param), module, params)
    like = optimizer.state_dict()
    back = optimizer_to_torch(ours.opt_state, nnx.state(layer, nnx.Param), like, module)
    for index, kept in like["state"].items():
        for key, value in kept.items():
            torch.testing.assert_close(back["state"][index][key], value, rtol=1e-5, atol=1e-6)


def test_what_has_no_equal_is_refused():
    module = network()
    model = module.state_dict()
    params = params_from_torch(model, LIKE)

    def convert(optimizer, **keywords):
        torch_steps(module, optimizer, range(1))
        return optimizer_from_torch(optimizer.state_dict(), model, params, **keywords)

    with pytest.raises(ValueError, match="amsgrad"):
        convert(torch.optim.Adam(module.parameters(), amsgrad=True))
    with pytest.raises(ValueError, match="dampening"):
        convert(torch.optim.SGD(module.parameters(), momentum=0.9, dampening=0.5))
    with pytest.raises(ValueError, match=r"Only torch\.optim\.SGD"):
        convert(torch.optim.Adagrad(module.parameters()))
    names = list(reversed(model))
    with pytest.raises(CheckpointMismatch, match=r"has exp_avg \(4, 5\)") as caught:
        convert(torch.optim.Adam(module.parameters()), param_names=names)
    assert len(caught.value.mis_shaped) == 4
    like = torch.optim.Adam(module.parameters()).state_dict()
    with pytest.raises(CheckpointMismatch, match="another optimizer") as caught:
        optimizer_to_torch(optax.sgd(0.1).init(params), params, like, model)
    assert caught.value.missing == ("0.weight", "0.bias", "1.weight")


@pytest.mark.parametrize(
    ("make", "group", "state", "said"),
    [
        (torch.optim.Adam, {}, {"exp_avg_var": np.zeros(3)}, r"`state` with \['exp_avg_var'\]"),
        (torch.optim.Adam, {"final_lr": 0.1, "gamma": 0.1}, {}, r"with \['final_lr', 'gamma'\]"),
        (torch.optim.SGD, {"trust_coefficient": 1e-3}, {}, r"\['trust_coefficient'\], which"),
    ],
)
def test_relatives_of_sgd_and_adam_are_refused(make, group, state, said):
    module = network()
    optimizer = make(module.parameters(), lr=0.1)
    torch_steps(module, optimizer, range(1))
    saved, model = optimizer.state_dict(), module.state_dict()
    params = params_from_torch(model, LIKE)
    saved["param_groups"][0].update(group)
    saved["state"].setdefault(1, {}).update(state)
    with pytest.raises(ValueError, match=said):
        optimizer_from_torch(saved, model, params)
    with pytest.raises(ValueError, match=said):
        optimizer_to_torch((), params, saved, model)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_what_schedulers_and_people_note_in_a_group_is_no_other_algorithm(make):
    module = network()
    optimizer = make([{"params": list(module.parameters()), "name": "all"}], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    schedulers.OneCycleLR(optimizer, 0.2, 10, cycle_momentum=make is torch.optim.AdamW)
    torch.optim.swa_utils.SWALR(optimizer, 0.1)
    model = module.state_dict()
    optimizer_from_torch(optimizer.state_dict(), model, params_from_torch(model, LIKE))


def test_older_files_say_which_adam():
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.1)
    torch_steps(module, optimizer, range(1))
    state = optimizer.state_dict()
    del state["param_groups"][0]["decoupled_weight_decay"]
    params = params_from_torch(module.state_dict(), LIKE)
    with pytest.raises(ValueError, match="Set 'decoupled_weight_decay'"):
        optimizer_from_torch(state, module.state_dict(), params)
    state["param_groups"][0]["decoupled_weight_decay"] = True
    tx, optax_state = optimizer_from_torch(state, module.state_dict(), params)
    params, _ = flax_steps(module, LIKE, params, tx, optax_state, (5,))
    torch_steps(module, optimizer, (5,))
    assert_close(params, module, LIKE)


def test_a_learning_rate_in_a_tensor_stays_one(tmp_path):
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-3), foreach=False)
    torch_steps(module, optimizer, range(1))
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    checkpoint = load(tmp_path / "x")
    params = params_from_torch(checkpoint.model, LIKE)
    _, state = optimizer_from_torch(checkpoint.optimizer, checkpoint.model, params)
    back = optimizer_to_torch(state, params, checkpoint.optimizer, checkpoint.model)
    torch.save(back, tmp_path / "back.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    assert torch.is_tensor(optimizer.param_groups[0]["lr"])
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-3)
