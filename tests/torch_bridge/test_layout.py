"""Bucket layouts: what is where in torch's flat buffers, recorded, written down and inferred."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.bridge import linears
from tests.helpers.hook_states import compressed_step
from torch_bridge import (
    BucketLayout,
    CheckpointMismatch,
    PowerSGDRecord,
    infer_layout,
    load,
    record_layout,
    resume_powersgd,
    save_checkpoint,
    state_from_record,
    to_flax,
)
from torch_bridge._hook.infer import layout_of
from torch_bridge._hook.ready_orders import MOST_ORDERS, used_orders


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "module."])
def test_a_layout_takes_the_names_of_a_model(prefix):
    # record_layout on a compiled model; with other names than the checkpoint's, the state was lost.
    model = {"w": np.zeros((8, 4)), "b": np.zeros(8), "v": np.zeros((2, 3))}
    wrapped = {prefix + name: array for name, array in model.items()}
    layout = BucketLayout.from_order([[prefix + "b", prefix + "w"], [prefix + "v"]], wrapped)
    assert layout.sizes == (40, 6)
    assert BucketLayout.from_json(layout.to_json()) == layout
    plain = BucketLayout.from_order([["b", "w"], ["v"]], model)
    assert layout.named_as(model) == plain
    assert plain.named_as(wrapped) == layout
    both = {**model, **wrapped}  # an exact name is meant, and another one is not guessed
    assert layout.named_as(both) == layout
    compiled = BucketLayout.from_order([["_orig_mod._orig_mod.w"]], {"_orig_mod._orig_mod.w": 0})
    assert compiled.named_as(both) == compiled


def test_words_of_wrappers_that_only_the_layout_begins_with():
    # All trained parameters lie in the user's own `module`; a compiled model of the same.
    model = {"module.w": np.zeros((8, 4)), "head": np.zeros(4)}
    for word in ("", "_orig_mod.", "module._orig_mod."):
        name = f"{word}module.w"
        layout = BucketLayout.from_order([[name]], {name: model["module.w"]})
        assert layout.named_as(model).names == ("module.w",)


def test_unknown_and_repeated_names():
    model = {"a": np.zeros(8)}
    with pytest.raises(CheckpointMismatch) as error:
        BucketLayout.from_order([["a", "x"], ["y"]], model)
    assert error.value.missing == ("x", "y")
    with pytest.raises(CheckpointMismatch, match="a appears again"):
        BucketLayout.from_order([["a"], ["a"]], model)
    with pytest.raises(CheckpointMismatch, match="a list of names for each bucket"):
        BucketLayout.from_order(["a", "b"], model)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_any_dense_strides(shape, random):
    """from_memory() reads as torch's as_strided does, and to_memory() is its inverse."""
    order = list(range(len(shape)))
    random.shuffle(order)
    memory = torch.arange(float(math.prod(shape))).reshape([shape[axis] for axis in order])
    tensor = memory.permute(np.argsort(order).tolist())
    entry = BucketLayout.from_order([["w"]], {"w": tensor}).buckets[0][0]
    flat = memory.reshape(-1).numpy()
    assert_array_equal(entry.from_memory(flat), tensor.numpy())
    assert_array_equal(entry.to_memory(tensor.numpy()), flat)
    columns = entry.columns()
    if columns is not None:
        logical = tensor.numpy().reshape(shape[0], -1)
        assert_array_equal(flat.reshape(shape[0], -1)[:, columns], logical)


# --- recording, in a real process group of one ----------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(8)
        self.embed = torch.nn.Embedding(32, 32)
        self.fc1 = torch.nn.Linear(8 * 36, 32)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = torch.arange(len(x))
        return self.head(self.fc1(self.norm(self.conv(x)).flatten(1)) + self.embed(tokens)).sum()


def test_save_checkpoint_wants_the_wrapped_model_and_the_optimizer_itself(alone, tmp_path):
    ddp = DistributedDataParallel(Net())
    path = tmp_path / "x.pt"
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="must be the DistributedDataParallel model, got a Net"):
        save_checkpoint(path, ddp.module, None)
    with pytest.raises(TypeError, match="must be the DistributedDataParallel model, got a Net"):
        record_layout(ddp.module)
    with pytest.raises(TypeError, match=r"not its state_dict\(\)"):
        save_checkpoint(path, ddp, None, optimizer=optimizer.state_dict())
    with pytest.raises(RuntimeError, match="does not read args of `extra`"):
        save_checkpoint(path, ddp, None, extra={"args": tmp_path})
    for example in ({"x": torch.ones(1, 4)}, (), [3.0]):
        with pytest.raises(TypeError, match="`example` must be an input of the model"):
            save_checkpoint(path, ddp, None, example=example)
    assert not path.exists()
    extra = {"best": np.float64(0.5), "mean": np.ones(2, np.float32)}
    save_checkpoint(path, ddp, None, optimizer=optimizer, extra=extra)
    assert torch.load(path, weights_only=True)["extra"]["best"] == 0.5


def test_a_model_that_saves_only_some_parameters_needs_no_layout(alone, tmp_path):
    module = torch.nn.ModuleDict({"kept": torch.nn.Linear(4, 3), "left": torch.nn.Linear(5, 2)})

    def drop(_module, state, _prefix, _metadata):
        del state["left.weight"], state["left.bias"]

    module.register_state_dict_post_hook(drop)
    save_checkpoint(tmp_path / "x.pt", DistributedDataParallel(module), None)
    run = to_flax(load(tmp_path / "x.pt"), linears(kept=(4, 3)))
    assert_array_equal(run.params["kept"]["kernel"], module["kept"].weight.detach().numpy().T)


def test_a_saved_file_is_plain_in_every_part(alone, tmp_path, monkeypatch):
    ddp = DistributedDataParallel(Net())
    path = tmp_path / "x.pt"
    state = {"calls": np.int64(3)}
    monkeypatch.setattr(Net, "get_extra_state", lambda _: state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=np.float64(0.1))
    save_checkpoint(path, ddp, None, optimizer=optimizer)
    document = torch.load(path, weights_only=True)
    assert document["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert document["state_dict"]["_extra_state"] == {"calls": 3}
    tied = (document["state_dict"][name] for name in ("embed.weight", "head.weight"))
    assert len({tensor.data_ptr() for tensor in tied}) == 1
    state["path"] = path
    with pytest.raises(RuntimeError, match=r"does not read _extra_state\.path of the model"):
        save_checkpoint(path, ddp, None)


def train(ddp, steps):
    for _ in range(steps):
        ddp(torch.randn(5, 3, 8, 8)).backward()


class Logged(DistributedDataParallel):
    """Has data about its buckets in its log, or none, as at times in torch."""

    logs = True

    def _get_ddp_logging_data(self):
        return super()._get_ddp_logging_data() if self.logs else {}


@pytest.mark.parametrize(("cap", "static"), [(1000, False), (0.02, False), (0.02, True)])
def test_recorded_buckets_are_those_that_the_hook_gets(alone, cap, static):
    ddp = Logged(Net(), bucket_cap_mb=cap, static_graph=static)
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    seen = {}

    def hook(_, bucket):
        seen[bucket.index()] = [names[id(p)] for p in bucket.parameters()]
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(4):
        seen.clear()
        train(ddp, 1)
        layout = record_layout(ddp)
        for bucket, index in zip(layout.buckets, sorted(seen), strict=True):
            assert [entry.name for entry in bucket] == seen[index]
        ddp.logs = False
        assert record_layout(ddp) == layout
        ddp.logs = True
    assert layout.entries["conv.weight"].strides == (27, 1, 9, 3)
    assert "head.weight" not in layout.names
    assert "frozen.weight" not in layout.names


def test_parameters_that_are_frozen_or_not_since_ddp_was_made(alone):
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    net[0].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    for _ in range(3):
        ddp(torch.ones(1, 8)).sum().backward()
    recorded = record_layout(ddp)
    assert recorded.names == ("2.bias", "2.weight", "1.bias", "1.weight")
    net[0].requires_grad_(True)  # DDP's buckets do not get it, and its indices do not count it
    assert record_layout(ddp) == recorded
    net.requires_grad_(False)
    net[1].requires_grad_(True)
    with pytest.warns(UserWarning, match="2.bias, 2.weight: frozen after DDP had made its buckets"):
        assert record_layout(ddp) == recorded


def test_a_state_of_other_buckets_is_refused(alone):
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1000)
    train(ddp, 3)
    state = powerSGD_hook.PowerSGDState(None)
    state.error_dict = {0: torch.zeros(7), 3: torch.zeros(2)}
    with pytest.raises(CheckpointMismatch) as error:
        record_layout(ddp, state)
    assert len(error.value.mis_shaped) == 2


@pytest.mark.parametrize(("static", "rebuilt_after"), [(False, 2), (True, 3)])
def test_a_resumed_state_has_no_layout_before_ddp_rebuilds(alone, static, rebuilt_after):
    # The buckets have its size and another order: the layout would name the wrong parameters.
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1000, static_graph=static)
    state = powerSGD_hook.PowerSGDState(None)
    state.error_dict = {0: torch.zeros(record_layout(ddp).sizes[0])}
    for _ in range(rebuilt_after):
        with pytest.raises(CheckpointMismatch, match="has not rebuilt its buckets"):
            record_layout(ddp, state)
        train(ddp, 1)
    assert record_layout(ddp, state) == record_layout(ddp)


def test_a_backward_beside_ddp_does_not_resume(alone):
    ddp = DistributedDataParallel(Net())
    layout = record_layout(ddp)
    state = powerSGD_hook.PowerSGDState(None)
    with pytest.raises(CheckpointMismatch, match="through `ddp_model` itself"):
        resume_powersgd(ddp, state, layout, lambda: train(ddp.module, 1))


def test_a_bucket_without_factors_does_not_cost_those_of_another(alone):
    ddp = DistributedDataParallel(torch.nn.Linear(32, 32))  # in one bucket
    layout = BucketLayout.from_order([["bias"], ["weight"]], ddp.module.state_dict())
    q = np.ones(32, np.float32)
    state = state_from_record(PowerSGDRecord(1, 20, {}, {1: q}, {1: 2 * q}))
    resume_powersgd(ddp, state, layout, lambda: ddp(torch.ones(1, 32)).sum().backward())
    assert state.q_memory_dict[0].tolist() == [2] * 32


# --- inference --------------------------------------------------------------------------------


VECTORS = ("conv.bias", "norm.weight", "norm.bias", "norm.running_mean")
NETWORK = {"conv.weight": np.zeros((8, 4, 3, 3)), **dict.fromkeys(VECTORS, np.zeros(8))}
for layer in ("fc1", "fc2"):
    NETWORK |= {f"{layer}.weight": np.zeros((24, 32)), f"{layer}.bias": np.zeros(24)}
NETWORK["head.weight"] = np.zeros((12, 40))
TRAINED = [name for name in NETWORK if "running" not in name]
READY = [
    "head.weight", "fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight",
    "norm.weight", "norm.bias", "conv.weight", "conv.bias",
]  # fmt: skip
ORDERS = {
    "definition": [TRAINED],
    "ready": [READY],
    "reversed": [TRAINED[::-1]],
    "ready, two buckets": [READY[:5], READY[5:]],
    "definition, two buckets": [TRAINED[5:], TRAINED[:5]],
}
TWINS = {f"{name}.weight": np.zeros((24, 32)) for name in "ab"}


def checkpoint_of(order, model=NETWORK, errors=True):
    layout = BucketLayout.from_order(order, model)
    trained = {name: model[name] for name in model if name in layout.names}
    checkpoint = compressed_step(layout, trained)
    for record in checkpoint.powersgd if not errors else ():
        record.error_dict.clear()
    return layout, checkpoint


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_is_found_when_only_one_fits(order):
    layout, checkpoint = checkpoint_of(ORDERS[order])
    assert infer_layout(checkpoint) == layout


def test_a_module_of_the_users_may_be_named_module():
    # All parameters begin with the word that wrappers add, and a buffer does not.
    model = {f"module.{name}": array for name, array in NETWORK.items()}
    model["position_ids"] = np.arange(3)
    order = [[f"module.{name}" for name in READY]]
    recorded, checkpoint = checkpoint_of(order, model)
    checkpoint.model["position_ids"] = model["position_ids"]
    for layout in (recorded, BucketLayout.from_json(recorded.to_json()), None):
        used = layout_of(checkpoint, layout, None)
        assert used.names == tuple(order[0])
        record = checkpoint.powersgd[0]
        assert used.parts(record).keys() == set(order[0])


# As in a ViT: the root registers its parameters first, and uses them behind the stem.
VIT = {
    "cls": np.zeros((1, 1, 8)),
    "pos": np.zeros((1, 9, 8)),
    "stem.weight": np.zeros((24, 32)),
    "stem.bias": np.zeros(24),
    "head.weight": np.zeros((24, 32)),
    "head.bias": np.zeros(24),
}
VIT_READY = ["head.bias", "head.weight", "pos", "cls", "stem.bias", "stem.weight"]


def test_parameters_of_the_root_are_found_where_the_model_uses_them():
    layout, checkpoint = checkpoint_of([VIT_READY], VIT)
    expected = layout.parts(checkpoint.mean)
    found = infer_layout(checkpoint).parts(checkpoint.mean)
    for name in ("head.weight", "stem.weight"):  # the errors of the others cancel
        for field in ("error", "p", "q"):
            assert_array_equal(getattr(found[name], field), getattr(expected[name], field))


class Embeddings(torch.nn.Module):
    """Registers a class token and positions before the patches, and uses them behind these."""

    def __init__(self):
        super().__init__()
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 24))
        self.position_embeddings = torch.nn.Parameter(torch.zeros(1, 5, 24))
        self.projection = torch.nn.Conv2d(3, 24, 2, 2)

    def forward(self, x):
        x = self.projection(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        return x + self.position_embeddings


class Attention(torch.nn.Module):
    """May have a table of position biases, which it uses between two projections, as Swin does."""

    def __init__(self, table):
        super().__init__()
        if table:
            self.relative_position_bias_table = torch.nn.Parameter(torch.zeros(9, 2))
        self.qkv = torch.nn.Linear(24, 72)
        self.proj = torch.nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        if hasattr(self, "relative_position_bias_table"):
            scores = scores + self.relative_position_bias_table.sum()
        return self.proj(scores.softmax(-1) @ v)


class Block(torch.nn.Module):
    """Declares its norms last, as transformers' ViT does, and may scale its parts, as BEiT does."""

    def __init__(self, table, scales):
        super().__init__()
        for name in ("lambda_1", "lambda_2")[:scales]:
            setattr(self, name, torch.nn.Parameter(torch.ones(24)))
        self.attention = Attention(table)
        self.intermediate = torch.nn.Linear(24, 48)
        self.output = torch.nn.Linear(48, 24)
        self.layernorm_before, self.layernorm_after = (torch.nn.LayerNorm(24) for _ in range(2))

    def forward(self, x):
        scales = [getattr(self, name, 1.0) for name in ("lambda_1", "lambda_2")]
        x = x + scales[0] * self.attention(self.layernorm_before(x))
        y = self.output(torch.relu(self.intermediate(self.layernorm_after(x))))
        return x + scales[1] * y


class Transformer(torch.nn.Module):
    def __init__(self, table=False, scales=0):
        super().__init__()
        self.embeddings = Embeddings()
        self.layer = torch.nn.ModuleList(Block(table, scales) for _ in range(3))
        self.classifier = torch.nn.Linear(24, 7)

    def forward(self, x):
        x = self.embeddings(x)
        for block in self.layer:
            x = block(x)
        return self.classifier(x[:, 0])


class ConvBlock(torch.nn.Module):
    """Registers the scale of the whole block first, and uses it last, as ConvNeXt does."""

    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(24))
        self.dwconv = torch.nn.Conv2d(24, 24, 3, 1, 1, groups=24)
        self.norm = torch.nn.LayerNorm(24)
        self.pwconv1 = torch.nn.Linear(24, 48)
        self.pwconv2 = torch.nn.Linear(48, 24)

    def forward(self, x):
        y = self.norm(self.dwconv(x).movedim(1, -1))
        y = self.gamma * self.pwconv2(torch.relu(self.pwconv1(y)))
        return x + y.movedim(-1, 1)


def conv_net():
    head = (torch.nn.Flatten(), torch.nn.Linear(24 * 4, 7))
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 24, 2, 2), *(ConvBlock() for _ in range(3)), *head
    )


@pytest.mark.parametrize("cap", [1000, 0.01])
@pytest.mark.parametrize(
    "make",
    [
        Transformer,
        lambda: Transformer(table=True),
        lambda: Transformer(table=True, scales=2),
        conv_net,
    ],
)
def test_modules_that_use_their_parts_in_another_order(alone, make, cap):
    ddp = DistributedDataParallel(make(), bucket_cap_mb=cap)
    for _ in range(3):
        ddp(torch.randn(2, 3, 4, 4)).sum().backward()
    layout = record_layout(ddp)
    assert (len(layout.buckets) > 1) == (cap < 1)
    model = {name: value.numpy() for name, value in ddp.module.state_dict().items()}
    checkpoint = compressed_step(layout, model)
    expected = layout.parts(checkpoint.mean)
    found = infer_layout(checkpoint).parts(checkpoint.mean)
    for name, part in expected.items():
        if part.rank:  # the errors of the others cancel
            for field in ("error", "p", "q"):
                assert_array_equal(getattr(found[name], field), getattr(part, field))


@pytest.mark.parametrize("rank", [1, 3])
def test_factors_of_another_rank_are_refused(rank):
    _, checkpoint = checkpoint_of([VIT_READY], VIT)
    records = []
    for record in checkpoint.powersgd:
        records.append(dataclasses.replace(record, matrix_approximation_rank=rank))
    with pytest.raises(CheckpointMismatch, match=r"[PQ] of bucket 0 has"):
        infer_layout(dataclasses.replace(checkpoint, powersgd=tuple(records)))


def test_parameters_of_the_root_are_found_without_errors():
    model = VIT | {"tail.weight": np.zeros((24, 40)), "table": np.zeros((40, 32))}
    order = ["table", "tail.weight", *VIT_READY]
    layout, checkpoint = checkpoint_of([order], model, errors=False)
    found = infer_layout(checkpoint).parts(checkpoint.powersgd[0])
    expected = layout.parts(checkpoint.powersgd[0])
    for name in ("head.weight", "stem.weight", "tail.weight", "table"):
        assert_array_equal(found[name].p, expected[name].p)


def test_the_orders_that_are_tested_are_limited():
    groups = {f"{name}{k}": [f"{name}{k}.weight"] for name in "abcdefgh" for k in range(3)}
    model = {name: np.zeros((k + 1, 2)) for k, (name,) in enumerate(groups.values())}
    tested = []

    def can_begin(order):
        tested.append(order)
        return len(order) < 20

    assert not list(used_orders(groups, model, can_begin))
    assert len(tested) == MOST_ORDERS


def test_a_layout_in_another_order_is_refused():
    layout, checkpoint = checkpoint_of([VIT_READY], VIT)
    assert layout_of(checkpoint, layout, None) == layout
    wrong = BucketLayout.from_order([["stem.bias", "stem.weight", *VIT_READY[:4]]], VIT)
    assert not wrong.misfits(checkpoint.powersgd[0])  # every size is the same
    with pytest.raises(CheckpointMismatch, match="another order than the hook state"):
        layout_of(checkpoint, wrong, None)


def test_a_layout_is_taken_where_a_bucket_has_no_errors():
    layout, checkpoint = checkpoint_of(ORDERS["ready, two buckets"])
    for record in checkpoint.powersgd:
        del record.error_dict[0]
    assert layout_of(checkpoint, layout, None) == layout


def test_a_layout_is_taken_where_all_ranks_had_the_same_gradients():
    layout, checkpoint = checkpoint_of([VIT_READY], VIT)
    (error,) = checkpoint.powersgd[0].error_dict.values()
    (other,) = checkpoint.powersgd[1].error_dict.values()
    error[:24] = 1e-8  # of head.bias
    other[:24] = 0
    assert layout_of(checkpoint, layout, None) == layout


def test_no_order_or_several_that_fit_are_refused_with_the_candidates():
    _, checkpoint = checkpoint_of([TRAINED[3:] + TRAINED[:3]])  # which torch does not produce
    with pytest.raises(CheckpointMismatch, match="record_layout") as error:
        infer_layout(checkpoint)
    assert len(error.value.mis_shaped) >= 3
    for errors in (True, False):
        _, checkpoint = checkpoint_of([["b.weight", "a.weight"]], TWINS, errors)
        with pytest.raises(CheckpointMismatch, match="several orders") as error:
            infer_layout(checkpoint)
        assert len(error.value.ambiguous) == 2
    # The order of a weight and its bias changes nothing then; with errors it decides.
    model = {"a.weight": np.zeros((24, 32)), "a.bias": np.zeros(24)}
    _, checkpoint = checkpoint_of([["a.bias", "a.weight"]], model, errors=False)
    assert infer_layout(checkpoint).names[:1] == ("a.bias",)


@pytest.mark.parametrize("world_size", [None, 2])
def test_missing_ranks_are_named_where_their_errors_would_decide(world_size):
    layout, checkpoint = checkpoint_of(ORDERS["ready"])
    assert infer_layout(checkpoint) == layout
    alone = dataclasses.replace(checkpoint, powersgd=checkpoint.powersgd[:1], world_size=world_size)
    with pytest.raises(CheckpointMismatch, match=r"errors of 1 rank\(s\).* one file per rank"):
        infer_layout(alone)


def test_frozen_parameters_buffers_and_ties():
    layout, checkpoint = checkpoint_of(ORDERS["ready"])

    def found(model, **options):
        return infer_layout(dataclasses.replace(checkpoint, model=model), **options)

    model = checkpoint.model
    assert found({**model, "tied.weight": model["fc1.weight"]}) == layout
    assert found({"position_ids": np.arange(12), **model}) == layout  # no parameter
    more = {"backbone.weight": np.zeros((3, 3), np.float32), **model}
    with pytest.raises(CheckpointMismatch, match="frozen"):
        found(more)
    assert found(more, frozen=["backbone.weight"]) == layout
