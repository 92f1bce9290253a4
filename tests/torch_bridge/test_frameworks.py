"""Files of accelerate, Lightning, FSDP and others: converted, refused or warned of by name."""

import copy
import dataclasses
import json
import re
import warnings

import jax
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from numpy.testing import assert_array_equal
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from tests.helpers.bridge import ddp_job, linears
from torch_bridge import Checkpoint, CheckpointMismatch, load, to_flax

LIKE = linears(layers_0=(6, 5), layers_1=(5, 4))


class Job:
    """A network after two steps, whose parameters the optimizer has in an order of its own."""

    def __init__(self, make=AdamW, **options):
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
        self.names = ["1.bias", "0.weight", "1.weight", "0.bias"]
        chosen = [self.module.get_parameter(name) for name in self.names]
        self.optimizer = make(chosen, **{"lr": 0.01, **options})
        self.train(2)

    def train(self, steps, skip=()):
        for _ in range(steps):
            for name, parameter in self.module.named_parameters():
                parameter.grad = None if name in skip else torch.randn_like(parameter)
            self.optimizer.step()

    @property
    def model(self):
        return self.module.state_dict()

    def by_name(self, prefix=""):
        """Returns the optimizer's state as FSDP writes it: with names for numbers."""
        saved = copy.deepcopy(self.optimizer.state_dict())
        names = [prefix + name for name in self.names]
        saved["state"] = {names[key]: entry for key, entry in saved["state"].items()}
        for group in saved["param_groups"]:
            group["params"] = [names[key] for key in group["params"]]
        return saved


def converted(path, document=None, **options):
    """Returns the run in Flax, and the warnings."""
    if document is not None:
        torch.save(document, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = to_flax(load(path), LIKE, **options)
    return run, " ".join(str(warning.message) for warning in caught)


def assert_has_moments_of(job, run):
    """Compares a first moment, and the parameters."""
    moments = run.optimizer_state[0].mu
    for number, name in enumerate(job.names):
        layer, kind = name.split(".")
        expected = job.optimizer.state_dict()["state"][number]["exp_avg"].numpy()
        found = moments[f"layers_{layer}"][{"weight": "kernel", "bias": "bias"}[kind]]
        assert_array_equal(found.T, expected)
    assert_array_equal(run.params["layers_0"]["kernel"].T, job.model["0.weight"])


# --- converted ----------------------------------------------------------------------------------


def of_one_in_a_list(job):
    return {"optimizer_states": [job.by_name()]}


def of_a_network_inside(job):
    """Makes the file of a LightningModule that gives its network's names to the optimizer."""
    model = {f"net.{name}": value for name, value in job.model.items()}
    return {"state_dict": model, "optimizer_states": [job.by_name()]}


CONVERTED = {
    "FSDP": lambda job: {"optimizer": job.by_name()},
    "FSDP, of a wrapped model": lambda job: {"optimizer": job.by_name("module.")},
    "Lightning": of_one_in_a_list,
    "Lightning, of the network inside": of_a_network_inside,
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_names_in_an_optimizer_are_its_order(tmp_path, kind):
    job = Job()
    run, said = converted(tmp_path / "x.pt", {"state_dict": job.model, **CONVERTED[kind](job)})
    assert not said
    assert_has_moments_of(job, run)


def test_names_of_one_of_two_alike_networks_are_refused(tmp_path):
    job = Job()
    model = {f"{net}.{name}": value for net in "ab" for name, value in job.model.items()}
    document = {"model": model, "optimizer": job.by_name()}
    with pytest.raises(CheckpointMismatch, match="does not belong to this model"):
        converted(tmp_path / "x.pt", document, ignore=r"b\..*")


def test_a_model_and_its_optimizer_in_two_files(tmp_path, call):
    job = Job()
    paths = [tmp_path / "pytorch_model.bin", tmp_path / "optimizer.bin"]
    torch.save(job.model, paths[0])
    torch.save(job.by_name(), paths[1])
    for order in (paths, paths[::-1]):
        run, said = converted(order)
        assert not said
        assert_has_moments_of(job, run)
    assert "group(s)" in call("inspect", *paths)[1]
    with pytest.raises(CheckpointMismatch, match="hold 2 optimizers"):
        load([*paths, paths[1]])
    with pytest.raises(CheckpointMismatch, match=r"load\(\[\"pytorch_model\.bin\", \"optimizer"):
        load(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"has no model"):
        to_flax(load(paths[1]), LIKE)
    torch.save({"optimizer": job.by_name()}, paths[1])
    assert load(paths[1]).optimizer["param_groups"]


def test_a_model_in_several_files(tmp_path):
    job = Job()
    paths = [tmp_path / f"pytorch_model-{number}-of-2.bin" for number in (1, 2)]
    for path, start in zip(paths, "01", strict=True):
        part = {name: value for name, value in job.model.items() if name.startswith(start)}
        torch.save(part, path)
    torch.save(job.by_name(), tmp_path / "optimizer.bin")
    run, said = converted([*paths, tmp_path / "optimizer.bin"])
    assert not said
    assert_has_moments_of(job, run)
    with pytest.raises(CheckpointMismatch, match="not the ranks of one run"):
        load([paths[0], paths[0]])


def test_names_may_be_numbers(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(3)) for _ in range(2)])
    module[0].grad, module[1].grad = torch.zeros(3), torch.ones(3)
    optimizer = AdamW([("1", module[1]), ("0", module[0])])
    optimizer.step()
    document = {"state_dict": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(document, tmp_path / "x.pt")
    like = {"0": np.zeros(3, np.float32), "1": np.zeros(3, np.float32)}
    run = to_flax(load(tmp_path / "x.pt"), like, plain=True)
    assert not np.any(run.optimizer_state[0].mu["0"])
    assert np.all(run.optimizer_state[0].mu["1"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_made_one_file(tmp_path):
    job = Job()
    saved = {"model": job.model, "optimizer": job.optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    assert set(load(tmp_path / "whole.pt").optimizer["state"]) == {"0", "1", "2", "3"}
    run, _ = converted(tmp_path / "whole.pt", param_names=job.names)
    assert_has_moments_of(job, run)
    for file in (".metadata", "__0_0.distcp"):
        with pytest.raises(CheckpointMismatch, match="part of a distributed checkpoint"):
            load(tmp_path / "dcp" / file)


def test_a_rate_of_shape_one_and_an_empty_group(tmp_path):
    job = Job()
    saved = job.by_name()
    saved["param_groups"][0]["lr"] = torch.tensor([0.01])
    saved["param_groups"].append(dict(saved["param_groups"][0], params=[]))
    run, said = converted(tmp_path / "x.pt", {"model": job.model, "optimizer": saved})
    assert not said
    assert_has_moments_of(job, run)


SCALERS = {
    "two levels down": lambda state: {"extra": {"amp": {"scaler": state}}},
    "in a list": lambda state: {"scalers": [state]},
    "apex": lambda state: {"amp": {"loss_scaler0": {"loss_scale": 4096.0, "unskipped": 3}}},
    "Megatron": lambda state: {
        "scaler": {"scale": torch.tensor([4096.0]), "growth_tracker": 1, "hysteresis_tracker": 2}
    },
}


def scaled_document():
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    ddp, state, optimizer = ddp_job(torch.nn.Linear(24, 16), scaler=scaler)
    document = {"state_dict": ddp.state_dict(), "optimizer": optimizer.state_dict()}
    return document | {"comm_hook_state": state, "world_size": 1}, scaler.state_dict()


WIDE = linears(only=(24, 16))["only"]


def test_the_scaler_may_be_anywhere(alone, tmp_path):
    document, state = scaled_document()
    residuals = []
    for name, place in {"at the root": lambda state: {"scaler": state}, **SCALERS}.items():
        torch.save(document | place(state), tmp_path / "x.pt")
        residuals.append(to_flax(load(tmp_path / "x.pt"), WIDE).reducer_state.residual["kernel"])
        assert_array_equal(residuals[0], residuals[-1], err_msg=name)


def test_a_scale_that_is_not_in_the_file_is_suspected(alone, tmp_path):
    document, _ = scaled_document()
    torch.save(document, tmp_path / "x.pt")
    checkpoint = load(tmp_path / "x.pt")
    with pytest.warns(UserWarning, match="times as large as the optimizer's moments"):
        to_flax(checkpoint, WIDE)
    for scale in (4096.0, 1.0):  # the user's answer
        to_flax(dataclasses.replace(checkpoint, loss_scale=scale), WIDE)


# --- warned of ----------------------------------------------------------------------------------


def averaged(job):
    average = AveragedModel(job.module)
    return {"model": average.state_dict()}


def of_lightnings_callback(job):
    return {"state_dict": job.model, "current_model_state": job.model, "averaging_state": {}}


def with_a_scheduler(job):
    scheduler = LambdaLR(job.optimizer, lambda epoch: 0.9**epoch).state_dict()
    for group in job.optimizer.param_groups:
        del group["initial_lr"]
    return {"sched": [scheduler]}


WARNED = {
    "torch's AveragedModel": averaged,
    "model=checkpoint.extra['current_model_state']": of_lightnings_callback,
    "mmengine's EMAHook exchanges them": lambda job: {"ema_state_dict": {}, "message_hub": {}},
    "a second model, checkpoint.extra['model']": lambda job: {
        "state_dict": job.model,
        "model": {name: 0 * value for name, value in job.model.items()},
    },
    "further optimizers, which are left out: checkpoint.extra['head'][0]": lambda job: {
        "head": [job.by_name()]
    },
    "learning rate scheduler, checkpoint.extra['sched'][0]": with_a_scheduler,
    "scheduler, checkpoint.extra['plateau']": lambda job: {
        "plateau": ReduceLROnPlateau(job.optimizer).state_dict()
    },
    "as torch's PostLocalSGDOptimizer writes it": lambda job: {
        "optimizer": job.by_name() | {"step": 7}
    },
}


@pytest.mark.parametrize("part", WARNED)
def test_what_changes_the_meaning_of_a_file_is_named(tmp_path, call, part):
    job = Job()
    document = {"state_dict": job.model, "optimizer": job.by_name()} | WARNED[part](job)
    if "model" in document and "a second" not in part:
        del document["state_dict"]
    _, said = converted(tmp_path / "x.pt", document)
    assert part in said
    assert any(part in note for note in json.loads(call("inspect", "x.pt", "--json")[1])["notes"])


def test_parameters_that_fell_behind_are_named(tmp_path):
    job = Job()
    job.train(2, skip=("0.weight",))
    document = {"state_dict": job.model, "optimizer": job.by_name()}
    _, said = converted(tmp_path / "x.pt", document)
    assert "layers_0/kernel: updated in fewer steps" in said


# --- refused ------------------------------------------------------------------------------------

BESIDE = {
    "random number generators": {"python": 1, "numpy": 2, "cpu": torch.ones(3)},
    "of random number": {"torch_manual_seed": torch.ones(3), "step": 3},
    "the state of a learning rate scheduler": {"last_epoch": 3, "_step_count": 4},
    "GradScaler; give its scale": {"scale": 2.0, "growth_factor": 2.0, "_growth_tracker": 0},
    "zero_to_fp32.py": {"ds_version": "0.1", "module": {}},
    "Tensors are in net: save": {"net": {"w": torch.ones(3)}, "opt": {}},
}


@pytest.mark.parametrize("part", BESIDE)
def test_files_that_hold_no_model_are_named(tmp_path, part):
    torch.save(BESIDE[part], tmp_path / "x.pt")
    with pytest.raises(CheckpointMismatch, match=re.escape(part)):
        load(tmp_path / "x.pt")


def flattened(job):
    return {"state.0.weight.step": 2, "param_groups.0.weight.lr": 0.1}


NO_OPTIMIZERS = {
    "checkpoint.optimizer['main']": lambda job: {"main": job.by_name()},
    "float32 copies in fp32_from_fp16": lambda job: {"inner": job.by_name(), "fp32_from_fp16": []},
    "flatten_optimizer_state_dict": flattened,
}
OTHERS = (
    "NAdam",
    "RAdam",
    "Adamax",
    "Adafactor",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)


@pytest.mark.parametrize("part", NO_OPTIMIZERS)
def test_wrapped_states_of_optimizers_are_named(part):
    job = Job()
    with pytest.raises(CheckpointMismatch, match=re.escape(part)):
        to_flax(Checkpoint(load_of(job.model), optimizer=NO_OPTIMIZERS[part](job)), LIKE)


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_named(name):
    job = Job(getattr(torch.optim, name))
    with pytest.raises(ValueError, match=f"seems to be torch.optim.{name}:"):
        to_flax(Checkpoint(load_of(job.model), optimizer=job.by_name()), LIKE)


@pytest.mark.parametrize("entries", ["lr betas eps amsgrad rho", "lr trust"])
def test_optimizers_outside_of_torch_get_no_name_of_torch(entries):
    job = Job()
    saved = job.by_name()
    (group,) = saved["param_groups"]
    strange = {name: group.get(name, 0.05) for name in ("params", *entries.split())}
    saved["param_groups"] = [strange]
    with pytest.raises(ValueError, match=f"and it is another: .*{entries.split()[-1]}"):
        to_flax(Checkpoint(load_of(job.model), optimizer=saved), LIKE)


def load_of(model):
    return jax.tree.map(torch.Tensor.numpy, dict(model))


# --- everything at once -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Assumed, because")
def test_one_error_lists_all_problems_of_a_file(alone, tmp_path, call):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Linear(24, 24))
    ddp, state, _ = ddp_job(module)
    groups = [{"params": [layer.weight]} for layer in module]
    document = {"state_dict": ddp.state_dict(), "optimizer": SGD(groups, 0.1).state_dict()}
    document |= {"comm_hook_state": state}
    for number, scale in enumerate((2.0, 8.0)):
        document[f"s{number}"] = {"scale": scale, "growth_tracker": 0}
    torch.save(document, tmp_path / "x.pt")
    like = linears(layers_0=(24, 24), layers_1=(24, 24))
    parts = ("errors of the other ranks: The", "the loss scale: The", "the optimizer: An optim")
    with pytest.raises(CheckpointMismatch, match="There are ") as error:
        to_flax(load(tmp_path / "x.pt"), like)
    for part in ("which tensor is which leaf: N", *parts):
        assert part in str(error.value)
    assert {"missing_ranks", "rules"} <= set(error.value.parameters)
    assert "checkpoint.extra['s0']: 2" in error.value.ambiguous
    missing = json.loads(call("inspect", "x.pt", "--json")[1])["missing"]
    for part in parts:
        assert any(part in line for line in missing)
    both = Adam([{"params": [module[0].weight], "amsgrad": True}, {"params": [module[1].weight]}])
    saved = both.state_dict()
    saved["param_groups"][1]["eps"] = "small"
    with pytest.raises(CheckpointMismatch, match=r"(?s)group 0: `amsgrad`.*group 1: The.*names"):
        to_flax(Checkpoint(load_of(module.state_dict()), optimizer=saved), like, plain=True)


GROUP = {"momentum": 0, "dampening": 0, "nesterov": False, "params": [0]}
STRANGE = [
    {"param_groups": 5, "state": {}},
    {"param_groups": [5], "state": 5},
    {"param_groups": [GROUP | {"lr": torch.ones(3)}], "state": {}},
    {"param_groups": [GROUP | {"lr": "fast", "initial_lr": []}], "state": {0: {"step": None}}},
    {"step": 5},
]


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_inspect_shows_files_whose_optimizer_is_none(tmp_path, call, number):
    torch.save({"state_dict": {"w": torch.ones(3, 2)}, "optimizer": STRANGE[number]}, "x.pt")
    code, out, _ = call("inspect", "x.pt", "--json")
    assert code == 0
    assert any(line.startswith("the optimizer: ") for line in json.loads(out)["missing"])
