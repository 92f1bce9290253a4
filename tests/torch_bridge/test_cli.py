"""``python -m torch_bridge``: what it prints, what it converts, how it fails."""

import json
import os
import pathlib
import re
import zipfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from flax.training.train_state import TrainState

import jaxcomp
import torch_bridge
from tests.helpers import cli_model
from tests.helpers import torch_files as files
from tests.helpers.cli_model import PARAMS, document
from tests.helpers.leaves import equal
from tests.helpers.script import python
from tests.helpers.watch import watched
from torch_bridge.__main__ import OK, UNSAFE, UNUSABLE, USAGE
from torch_bridge._cli.files import FlaxFile

FC1 = "fc1.weight"
FC2 = "fc2.weight"


# --- inspect ----------------------------------------------------------------------------------


def test_inspect_shows_what_is_there_and_what_is_missing(call):
    code, out, _ = call("inspect", "checkpoint.pt")
    assert code == OK
    assert out.count("missing") == 1
    ranks = "1 here, world size 1"
    for part in ("matrix_approximation_rank", FC1, "24x32", "not compressed", "epoch", ranks):
        assert part in out
    summary = json.loads(call("inspect", "checkpoint.pt", "--json")[1])
    rows = {row["name"]: row for row in summary["parameters"]}
    value = document()
    weight = value["comm_hook_state"].q_memory_dict[0]
    assert rows[FC2]["q_norm"] == pytest.approx(weight[:48].norm().item(), rel=1e-5)
    assert rows[FC2]["rank"] == 2
    assert rows["fc2.bias"]["rank"] == 0
    assert [line.partition(":")[0] for line in summary["missing"]] == ["an example"]
    assert summary["notes"] == []
    torch.save(value["comm_hook_state"], "state.pt")
    _, out, _ = call("inspect", "state.pt")
    for part in ("the model", "the optimizer", "errors of the other ranks", "bucket layout"):
        assert part in out
    torch.save({"state_dict": value["state_dict"]}, "model.pt")
    assert "missing: the PowerSGD state" in call("inspect", "model.pt")[1]
    weight[:] = torch.nan
    torch.save(value, "nan.pt")
    found = json.loads(call("inspect", "nan.pt", "--json")[1], parse_constant=pytest.fail)
    assert found["parameters"][0]["q_norm"] is None
    assert "never used, or the run diverged" in " ".join(found["missing"])


def test_a_table_has_fifty_rows_and_says_how_many_more(call):
    model = {f"w{index}": torch.ones(2, 2) for index in range(60)}
    extra = {f"entry{index}": index for index in range(30)}
    torch.save({"state_dict": model, **extra}, "many.pt")
    _, out, _ = call("inspect", "many.pt")
    for part, there in (("w49", True), ("w50", False), ("10 more", True), ("and 22 more", True)):
        assert (part in out) == there
    assert len(json.loads(call("inspect", "many.pt", "--json")[1])["parameters"]) == 60


@pytest.mark.parametrize("with_layout", [True, False])
def test_full_rank_factors_of_a_small_file_are_not_multiplied(call, with_layout):
    # 30 kB once took 375 MiB and 7 s.
    size = 2600
    whole = {"state_dict": {"w": torch.zeros(1).expand(1, 1)}}
    factors = {0: torch.zeros(size * size)}
    slots = {"matrix_approximation_rank": size, "min_compression_rate": 0.4}
    slots |= {"iter": 9, "p_memory_dict": factors, "q_memory_dict": factors}
    whole["comm_hook_state"] = files.slots(**slots)
    if with_layout:
        layout = torch_bridge.BucketLayout.from_order([["w"]], {"w": torch.empty(size, size)})
        whole["layout"] = layout.to_json()
    torch.save(whole, "full.pt")
    with (
        zipfile.ZipFile("full.pt") as source,
        zipfile.ZipFile("packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in source.namelist():
            packed.writestr(name, source.read(name))
    assert pathlib.Path("packed.pt").stat().st_size < 40_000
    cost = watched(lambda: call("inspect", "packed.pt"))
    assert cost.error is None
    assert cost.peak < 100 << 20


def test_names_from_a_file_are_escaped(call, tmp_path):
    names = ["layers[red].w", "a\x1b[2Jb", "c\u202ed", "e:fire:\\", "f\ud800g"]
    torch.save({"state_dict": {name: torch.ones(2, 2) for name in names}}, "odd.pt")
    _, out, _ = call("inspect", "odd.pt")
    for shown in ("layers[red].w", r"a\x1b[2Jb", r"c\u202ed", "e:fire:\\", r"f\ud800g"):
        assert shown in out
    code, _, err = call("to-flax", "odd.pt", *PARAMS, "--out", "o")
    assert code == UNUSABLE
    assert r"a\x1b[2Jb" in err
    assert "\x1b" not in out + err
    body = files.stack_glob("os", "a\x1b[31m\u202e")  # in Python, too
    (tmp_path / "bad.pt").write_bytes(files.archive(files.whole(body)))
    with pytest.raises(torch_bridge.UnsafeCheckpoint, match=r"os\.a\\x1b\[31m\\u202e"):
        torch_bridge.load("bad.pt")


# --- conversions ------------------------------------------------------------------------------


def test_to_flax_restores_as_a_train_state(call):
    code, out, _ = call("to-flax", "checkpoint.pt", *PARAMS, "--out", "run")
    assert code == OK
    assert "step 20" in out
    tx = optax.chain(jaxcomp.powersgd(2, axis_name="data"), optax.sgd(0.1, momentum=0.9))
    fresh = TrainState.create(apply_fn=None, params=cli_model.params(), tx=tx)
    fresh = fresh.replace(step=jnp.zeros((), jnp.int32))
    # As examples/language_model/checkpoints.py restores.
    path = pathlib.Path("run").absolute()
    with ocp.CheckpointManager(path, item_names=("state", "config")) as manager:
        like = ocp.args.StandardRestore(jax.device_get(fresh))
        args = ocp.args.Composite(state=like, config=ocp.args.JsonRestore())
        restored = manager.restore(manager.latest_step(), args=args)
    state = restored["state"]
    run = torch_bridge.to_flax(torch_bridge.load("checkpoint.pt"), cli_model.params())
    equal((state.params, state.opt_state, state.step), (run.params, run.opt_state, run.step))
    assert restored["config"]["powersgd"]["rank"] == 2


OPTIONS = ("--ignore", r"aux\..*", "--flatten", "fc1=8,2,2", "--rule", "fc2=fc2")


@pytest.mark.parametrize("options", [(), OPTIONS])
def test_there_and_back(call, options):
    value = document()
    if options:
        value["state_dict"] = dict(value["state_dict"]) | {"aux.weight": torch.zeros(3, 3)}
        del value["optimizer"]
    torch.save(value, "source.pt")
    to_flax = ("to-flax", "source.pt", *PARAMS, "--out", "run")
    if options:
        code, _, err = call(*to_flax)
        assert code == UNUSABLE
        assert "--ignore" in err
    assert call(*to_flax, *options)[::2] == (OK, "")
    back = ("to-torch", "run", "--like", "source.pt", "--out", "sub/back.pt")
    printed = f"sub/back.pt: {len(value['state_dict'])} tensors\n"
    assert call(*back, *options) == (OK, printed, "")
    torch.load("sub/back.pt", weights_only=True)
    old = torch_bridge.load("source.pt")
    new = torch_bridge.load("sub/back.pt")
    assert list(new.model) == list(old.model)
    assert new.extra["epoch"] == 3
    assert new.layout == old.layout
    equal((new.model, new.optimizer), (old.model, old.optimizer))
    one = old.powersgd[0]
    other = new.powersgd[0]
    for name in ("p_memory_dict", "q_memory_dict", "hyperparameters"):
        equal(getattr(one, name), getattr(other, name))
    equal(old.layout.parts(one)[FC1].error, old.layout.parts(other)[FC1].error)


def test_the_way_back_knows_what_was_passed_to_to_flax(call):
    value = document()
    value["state_dict"] = dict(value["state_dict"]) | {"aux.weight": torch.zeros(3, 3)}
    layout = value.pop("layout")
    value["comm_hook_state"].p_memory_dict.clear()  # a layout is checked against the factors
    value["optimizer"]["param_groups"][0].pop("param_names", None)
    torch.save(value, "source.pt")
    pathlib.Path("layout.json").write_text(layout)
    pathlib.Path("names.json").write_text(json.dumps([FC1, "fc1.bias", FC2, "fc2.bias"]))
    answers = (*OPTIONS, "--layout", "layout.json", "--param-names", "names.json")
    assert call("to-flax", "source.pt", *PARAMS, "--out", "run", *answers)[::2] == (OK, "")
    back = ("to-torch", "run", "--like", "source.pt", "--force", "--out")
    assert call(*back, "whole.pt", *answers)[::2] == (OK, "")
    assert call(*back, "alone.pt")[::2] == (OK, "")
    one, other = (torch_bridge.load(name) for name in ("whole.pt", "alone.pt"))
    equal((one.model, one.optimizer), (other.model, other.optimizer))
    equal(one.powersgd[0].error_dict, other.powersgd[0].error_dict)
    # A training script has gone on in the same directory.
    state = FlaxFile(pathlib.Path("run")).read()
    with ocp.CheckpointManager(pathlib.Path("run").absolute(), item_names=("state",)) as manager:
        manager.save(21, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    assert call(*back, "later.pt")[::2] == (OK, "")
    equal(torch_bridge.load("later.pt").model, one.model)
    # Another file than the one that the pairs were made for.
    value["state_dict"]["aux2.weight"] = value["state_dict"].pop(FC2)
    torch.save(value, "other.pt")
    code, _, err = call("to-torch", "run", "--like", "other.pt", "--out", "no.pt")
    assert code == UNUSABLE
    assert FC2 in err


def test_the_model_is_run_on_the_example_of_the_file(call):
    checkpoint = torch_bridge.load("checkpoint.pt")
    run = torch_bridge.to_flax(checkpoint, cli_model.params())
    value = torch_bridge.to_torch(run.params, run.opt_state, checkpoint)
    x = torch.ones(2, 32)
    tensors = value["state_dict"]
    outputs = (x @ tensors[FC1].T + tensors["fc1.bias"]) @ tensors[FC2].T + tensors["fc2.bias"]
    to_flax = ("to-flax", "source.pt", *PARAMS, "--out", "run", *cli_model.APPLY)
    torch.save(value, "source.pt")
    code, _, err = call(*to_flax)
    assert code == UNUSABLE
    assert "no example for --apply" in err
    assert "on the command line: --plain, --rule" in err
    assert "example=(" not in err  # which is for Python
    for far, code in ((1, UNUSABLE), (0, OK)):
        value["example"] = {"inputs": [x], "outputs": outputs + far}
        torch.save(value, "source.pt")
        result = call(*to_flax)
        assert result[0] == code
    assert re.search(r"values, outputs \de[-+]\d\d off where a control is \de[-+]\d\d$", result[1])
    back = ("to-torch", "run", "--like", "source.pt", *cli_model.APPLY, "--out", "back.pt")
    assert call(*back)[::2] == (OK, "")
    equal(torch_bridge.load("back.pt").model, torch_bridge.load("source.pt").model)
    assert call(*to_flax, "--apply", "math:pi")[0] == USAGE


def test_random_states_are_kept(call):
    params = ("--params", "tests.helpers.cli_model:with_keys")
    assert call("to-flax", "checkpoint.pt", *params, "--out", "run")[0] == OK
    with ocp.CheckpointManager(pathlib.Path("run").absolute(), item_names=("state",)) as manager:
        found = manager.restore(20, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    key = found["state"]["params"]["dropout"]["key"]
    equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3)))
    assert call("to-torch", "run", "--like", "checkpoint.pt", "--out", "back.pt")[::2] == (OK, "")


@pytest.mark.parametrize("of_nnx", [False, True])
def test_back_from_what_a_training_script_saved(call, of_nnx):
    params = cli_model.params()
    if of_nnx:
        params = nnx.State(jax.tree.map(nnx.Param, params))
    checkpoint = torch_bridge.load("checkpoint.pt")
    run = torch_bridge.to_flax(checkpoint, params)
    # With a link that the torch file does not have, under orbax's own name of the item.
    states = run.reducer_state, optax.EmptyState(), run.optimizer_state
    state = {"params": run.params, "opt_state": states, "step": 20, "rng": jnp.zeros(2)}
    with ocp.CheckpointManager(pathlib.Path("run").absolute()) as manager:
        manager.save(20, args=ocp.args.StandardSave(state))
    assert call("to-torch", "run", "--like", "checkpoint.pt", "--out", "back.pt")[::2] == (OK, "")
    torch_bridge.to_torch(run.params, states, checkpoint, path="expected.pt")
    one, other = (torch_bridge.load(name) for name in ("expected.pt", "back.pt"))
    equal((one.model, one.optimizer), (other.model, other.optimizer))
    for name in ("error_dict", "q_memory_dict"):
        equal(getattr(one.powersgd[0], name), getattr(other.powersgd[0], name))


# --- failures ---------------------------------------------------------------------------------

CODES = {"usage": USAGE, "unsafe": UNSAFE, "unusable": UNUSABLE}
FAILURES = """
usage | explode | invalid choice
usage | to-flax checkpoint.pt PARAMS | required: --out
usage | to-flax checkpoint.pt --out x | required: --params
usage | to-flax checkpoint.pt --params tests.helpers.cli_model --out x | MODULE:NAME
usage | to-flax checkpoint.pt --params broken:params --out x | KeyError
usage | to-flax checkpoint.pt --params os:getcwd --out x | is a str
usage | to-flax checkpoint.pt PARAMS --out x --rule x | REGEX=PATH
usage | to-flax checkpoint.pt PARAMS --out x --rule ((=x | not a regular expression
usage | to-flax checkpoint.pt PARAMS --out x --flatten a=b | C,H,W
usage | to-flax checkpoint.pt PARAMS --out x --unflatten a=b | --unflatten
usage | to-flax checkpoint.pt PARAMS --out x --ignore * | '*'
unsafe | inspect hostile.pt | os.system
unusable | inspect none.pt | none.pt: No such file
unusable | inspect text.pt/none.pt | text.pt/none.pt: Not a directory
unusable | inspect text.pt | Expected a torch.save file
usage | inspect checkpoint.pt --max-bytes 0 | must be a positive number of bytes, got '0'
unusable | inspect checkpoint.pt --max-bytes 10 | --max-bytes
unusable | inspect checkpoint.pt --layout text.pt | text.pt: A bucket
unusable | inspect checkpoint.pt --layout pipe | a pipe
unusable | inspect checkpoint.pt --layout checkpoint.pt | checkpoint.pt is not text
unusable | to-flax checkpoint.pt --params tests.helpers.cli_model:no_keys --out x | dropout/key
unusable | inspect checkpoint.pt --layout big.json | --max-bytes
unusable | to-flax checkpoint.pt PARAMS --out x --flatten fc9=2,2,2 | flatten: fc9
unusable | to-flax checkpoint.pt PARAMS --out x --param-names names.json | --param-names must be
unusable | to-flax checkpoint.pt PARAMS --out x --param-names big.json | --max-bytes
unusable | to-flax rank0.pt PARAMS --out x | --missing-ranks
unusable | to-flax mixed.pt PARAMS --out x | Only torch.optim.SGD
unusable | to-flax names.pt PARAMS --out x | The layout names parameters
unusable | to-torch none --like checkpoint.pt --out x | does not exist
unusable | to-torch empty --like checkpoint.pt --out x | no orbax checkpoint
unusable | to-torch other --like checkpoint.pt --out x | have the entries params and opt_state
unusable | to-flax none.pt PARAMS --out text.pt --force | is a file
unusable | to-flax none.pt PARAMS --out run.msgpack | be an orbax directory
unusable | to-torch other --like none.pt --out link | --force
unusable | to-torch other --like none.pt --out other | is a folder
"""  # the last four before anything is read


@pytest.fixture
def bad_files(call):
    """Makes what the commands above name, where checkpoint.pt lies."""
    group = {"params": [0, 1, 2, 3], "lr": 0.1, "betas": (0.9, 0.9), 3: 4}
    mixed = {"state": {0: {"exp_avg": 1, 2: 3}, "x": {}}, "param_groups": [group]}
    torch.save(document() | {"world_size": None}, "rank0.pt")
    torch.save(document() | {"optimizer": mixed}, "mixed.pt")
    torch.save(document() | {"layout": document()["layout"].replace("fc2", "fc9")}, "names.pt")
    hostile = files.archive(files.whole(files.assemble("os:system 'x' TUPLE1 REDUCE")))
    pathlib.Path("hostile.pt").write_bytes(hostile)
    pathlib.Path("text.pt").write_text("hello")
    pathlib.Path("broken.py").write_text("def params():\n    raise KeyError('x')\n")
    pathlib.Path("names.json").write_text('["fc1.weight", 2]')
    pathlib.Path("big.json").write_text("[" + "[]," * (5 << 20) + "[]]")
    pathlib.Path("empty").mkdir()
    pathlib.Path("link").symlink_to("nowhere")
    os.mkfifo("pipe")
    with ocp.CheckpointManager(pathlib.Path("other").absolute()) as manager:
        manager.save(0, args=ocp.args.StandardSave({"params": cli_model.params()}))


@pytest.mark.usefixtures("bad_files")
def test_failures_are_one_message_and_a_code(call):
    wrong = {}
    for line in FAILURES.strip().splitlines():
        code, command, message = line.split(" | ")
        got, _, err = call(*command.replace("PARAMS", " ".join(PARAMS)).split())
        error = err.rpartition("error: ")[2]  # without the usage, which names every option
        if got != CODES[code] or message not in error or pathlib.Path("x").exists():
            wrong[command] = got, err
    assert not wrong
    assert pathlib.Path("text.pt").read_text() == "hello"


def test_as_a_module(call):
    assert FC2 in python("-m", "torch_bridge", "inspect", "checkpoint.pt", COLUMNS="100")


def test_inspect_says_the_loss_scale_and_the_example(call):
    state = files.slots(error_dict={0: torch.zeros(3)}, iter=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(1))  # which makes its scale
    document = {"state_dict": {"w": torch.zeros(3)}, "comm_hook_state": state}
    torch.save(document | {"scaler": scaler.state_dict()}, "scaled.pt")
    assert "1024, which a conversion takes out" in call("inspect", "scaled.pt")[1]
    example = {"inputs": [torch.zeros(2, 3)], "outputs": torch.zeros(2)}
    torch.save(files.own_format(example=example), "own.pt")
    assert "inputs of 2x3" in call("inspect", "own.pt")[1]


def test_a_file_without_an_example_is_refused_before_the_users_modules_run(call):
    pathlib.Path("slow.py").write_text("open('ran', 'w')\nparams = apply = print\n")
    asked = ("to-flax", "checkpoint.pt", "--params", "slow:params", "--apply", "slow:apply")
    code, _, err = call(*asked, "--out", "x")
    assert code == UNUSABLE
    assert "no example for --apply" in err
    assert not pathlib.Path("ran").exists()
