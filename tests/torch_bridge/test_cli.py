"""``python -m torch_bridge``: what it prints, what it converts, how it fails."""

import json
import os
import pathlib
import tracemalloc
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
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
from tests.helpers.script import python
from torch_bridge.__main__ import OK, UNSAFE, UNUSABLE, USAGE

FC1, FC2 = "fc1.weight", "fc2.weight"


# --- inspect ----------------------------------------------------------------------------------


def test_inspect_shows_what_is_there_and_what_is_missing(call):
    code, out, _ = call("inspect", "checkpoint.pt")
    assert (code, "missing" in out) == (OK, False)
    for part in ("matrix_approximation_rank", FC1, "24x32", "not compressed", "epoch"):
        assert part in out
    code, out, err = call("inspect", "checkpoint.pt", "--json")
    assert (code, err) == (OK, "")
    summary, value = json.loads(out), document()
    rows = {row["name"]: row for row in summary["parameters"]}
    weight = value["comm_hook_state"].q_memory_dict[0]
    assert rows[FC2]["q_norm"] == pytest.approx(weight[:48].norm().item(), rel=1e-5)
    assert (rows[FC2]["rank"], rows["fc2.bias"]["rank"]) == (2, 0)
    assert summary["missing"] == []
    torch.save(value["comm_hook_state"], "state.pt")
    torch.save({"state_dict": value["state_dict"]}, "model.pt")
    _, out, _ = call("inspect", "state.pt")
    for part in ("the model", "the optimizer", "errors of the other ranks", "bucket layout"):
        assert part in out
    assert "missing: the PowerSGD state" in call("inspect", "model.pt")[1]
    weight[:] = torch.nan
    torch.save(value, "nan.pt")
    found = json.loads(call("inspect", "nan.pt", "--json")[1], parse_constant=pytest.fail)
    assert [row["q_norm"] for row in found["parameters"]] == [None] * 4
    assert any("never used, or the run diverged" in line for line in found["missing"])


def test_a_table_has_fifty_rows_and_says_how_many_more(call):
    model = {f"w{index}": torch.ones(2, 2) for index in range(60)}
    extra = {f"entry{index}": index for index in range(30)}
    torch.save({"state_dict": model, **extra}, "many.pt")
    _, out, _ = call("inspect", "many.pt")
    for part, there in (("w49", True), ("w50", False), ("10 more", True), ("and 22 more", True)):
        assert (part in out) == there
    assert len(json.loads(call("inspect", "many.pt", "--json")[1])["parameters"]) == 60


def test_full_rank_factors_of_a_small_file_are_not_multiplied(call):
    # 30 kB once took 375 MiB and 7 s.
    size = 2600
    layout = torch_bridge.BucketLayout.from_order([["w"]], {"w": torch.empty(size, size)})
    factors = {0: torch.zeros(size * size)}
    slots = {"matrix_approximation_rank": size, "iter": 9, "min_compression_rate": 0.4}
    slots |= {"error_dict": {}, "p_memory_dict": factors, "q_memory_dict": factors}
    whole = {"state_dict": {"w": torch.zeros(1).expand(1, 1)}, "comm_hook_state": slots}
    for more in ({"layout": layout.to_json()}, {}):
        torch.save(whole | more, "full.pt")
        with zipfile.ZipFile("full.pt") as source:
            entries = {name: source.read(name) for name in source.namelist()}
        with zipfile.ZipFile("full.pt", "w", zipfile.ZIP_DEFLATED) as packed:
            for name, raw in entries.items():
                packed.writestr(name, raw)
        assert pathlib.Path("full.pt").stat().st_size < 40_000
        tracemalloc.start()
        try:
            assert call("inspect", "full.pt")[0] == OK
            assert tracemalloc.get_traced_memory()[1] < 100 << 20
        finally:
            tracemalloc.stop()


def test_names_from_a_file_are_escaped(call, tmp_path):
    names = ["layers[red].w", "a\x1b[2Jb", "c\u202ed", "e:fire:\\", "f\ud800g"]
    torch.save({"state_dict": {name: torch.ones(2, 2) for name in names}}, "odd.pt")
    _, out, _ = call("inspect", "odd.pt")
    for shown in ("layers[red].w", r"a\x1b[2Jb", r"c\u202ed", "e:fire:\\", r"f\ud800g"):
        assert shown in out
    code, _, err = call("to-flax", "odd.pt", *PARAMS, "--out", "o")
    assert (code, r"a\x1b[2Jb" in err) == (UNUSABLE, True)
    assert "\x1b" not in out + err
    body = files.stack_glob("os", "a\x1b[31m\u202e")  # in Python, too
    (tmp_path / "bad.pt").write_bytes(files.archive(files.whole(body)))
    with pytest.raises(torch_bridge.UnsafeCheckpoint, match=r"os\.a\\x1b\[31m\\u202e"):
        torch_bridge.load("bad.pt")


# --- conversions ------------------------------------------------------------------------------


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_to_flax_restores_as_a_train_state(call):
    code, out, _ = call("to-flax", "checkpoint.pt", *PARAMS, "--out", "run")
    assert (code, "step 20" in out) == (OK, True)
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
    arguments = ("source.pt", *PARAMS, "--out", "run")
    if options:
        code, _, err = call("to-flax", *arguments)
        assert (code, "--ignore" in err) == (UNUSABLE, True)
    assert call("to-flax", *arguments, *options)[::2] == (OK, "")
    old = torch_bridge.load("source.pt")
    back = ("to-torch", "run", "--like", "source.pt", "--out", "sub/back.pt")
    assert call(*back, *options)[::2] == (OK, "")
    torch.load("sub/back.pt", weights_only=True)
    new = torch_bridge.load("sub/back.pt")
    assert list(new.model) == list(old.model)
    assert (new.extra["epoch"], new.layout) == (3, old.layout)
    equal((new.model, new.optimizer), (old.model, old.optimizer))
    one, other = old.powersgd[0], new.powersgd[0]
    for name in ("p_memory_dict", "q_memory_dict", "hyperparameters"):
        equal(getattr(one, name), getattr(other, name))
    errors = [c.layout.parts(c.powersgd[0])[FC1].error for c in (old, new)]
    np.testing.assert_array_equal(*errors)


def test_the_model_is_run_on_the_example_of_the_file(call):
    checkpoint = torch_bridge.load("checkpoint.pt")
    run = torch_bridge.to_flax(checkpoint, cli_model.params())
    value = torch_bridge.to_torch(run.params, run.opt_state, checkpoint)
    x = torch.ones(2, 32)
    tensors = value["state_dict"]
    outputs = (x @ tensors[FC1].T + tensors["fc1.bias"]) @ tensors[FC2].T + tensors["fc2.bias"]
    to_flax = ("to-flax", "source.pt", *PARAMS, *cli_model.APPLY, "--out", "run")
    for example, code in ((None, UNUSABLE), (outputs + 1, UNUSABLE), (outputs, OK)):
        if example is not None:
            value["example"] = {"inputs": [x], "outputs": example}
        torch.save(value, "source.pt")
        assert call(*to_flax)[0] == code
    back = ("to-torch", "run", "--like", "source.pt", *cli_model.APPLY, "--out", "back.pt")
    got = call(*back)
    assert got[::2] == (OK, ""), got[2]
    equal(torch_bridge.load("back.pt").model, torch_bridge.load("source.pt").model)
    lacking = call("to-flax", "checkpoint.pt", *PARAMS, *cli_model.APPLY, "--out", "other")
    assert lacking[0] == UNUSABLE
    assert "no example for --apply" in lacking[2]
    assert "on the command line: --plain, --rule" in lacking[2]
    assert "example=(" not in lacking[2]  # which is for Python
    wrong = ("to-flax", "source.pt", *PARAMS, "--apply", "math:pi", "--out", "other")
    assert call(*wrong)[0] == USAGE


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


def test_before_compression_began_there_and_back(call):
    value = document()
    del value["layout"]
    state = value["comm_hook_state"]
    state.iter, state.error_dict, state.p_memory_dict, state.q_memory_dict = 3, {}, {}, {}
    torch.save(value, "early.pt")
    assert call("to-flax", "early.pt", *PARAMS, "--out", "run")[0] == OK
    assert call("to-torch", "run", "--like", "early.pt", "--out", "back.pt")[0] == OK
    record = torch_bridge.load("back.pt").powersgd[0]
    assert (record.iter, record.buckets) == (3, ())
    state.iter = 2  # JAX has gone on since: now a layout is needed
    torch.save(value, "earlier.pt")
    code, _, err = call("to-torch", "run", "--like", "earlier.pt", "--out", "other.pt")
    assert (code, "--layout" in err) == (UNUSABLE, True)


# --- failures ---------------------------------------------------------------------------------

TO_FLAX = ("to-flax", "checkpoint.pt", *PARAMS, "--out", "x")
OTHER = (*PARAMS, "--out", "x")
BACK = ("--like", "checkpoint.pt", "--out", "x")
FAILURES = [
    (("inspect", "none.pt"), UNUSABLE, "No such file"),
    (("inspect", "text.pt"), UNUSABLE, "Expected a torch.save file"),
    (("inspect", "hostile.pt"), UNSAFE, "os.system"),
    (("inspect", "checkpoint.pt", "--max-bytes", "10"), UNUSABLE, "--max-bytes"),
    (("inspect", "checkpoint.pt", "--layout", "text.pt"), UNUSABLE, "text.pt: A bucket"),
    (("inspect", "checkpoint.pt", "--layout", "pipe"), UNUSABLE, "a pipe"),
    (("inspect", "checkpoint.pt", "--layout", "big.json"), UNUSABLE, "--max-bytes"),
    (("explode",), USAGE, "invalid choice"),
    (
        ("to-flax", "checkpoint.pt", "--params", "tests.helpers.cli_model", "--out", "x"),
        USAGE,
        "MODULE:NAME",
    ),
    (("to-flax", "checkpoint.pt", "--params", "broken:params", "--out", "x"), USAGE, "KeyError"),
    (("to-flax", "checkpoint.pt", "--params", "os:getcwd", "--out", "x"), USAGE, "is a str"),
    ((*TO_FLAX, "--rule", "x"), USAGE, "REGEX=PATH"),
    ((*TO_FLAX, "--rule", "((=x"), USAGE, "not a regular expression"),
    ((*TO_FLAX, "--flatten", "a=b"), USAGE, "C,H,W"),
    ((*TO_FLAX, "--unflatten", "a=b"), USAGE, "--unflatten"),
    ((*TO_FLAX, "--ignore", "*"), USAGE, "'*'"),
    ((*TO_FLAX, "--flatten", "fc9=2,2,2"), UNUSABLE, "flatten: fc9"),
    ((*TO_FLAX, "--param-names", "names.json"), UNUSABLE, "--param-names must be"),
    ((*TO_FLAX, "--param-names", "big.json"), UNUSABLE, "--max-bytes"),
    (("to-flax", "rank0.pt", *OTHER), UNUSABLE, "--missing-ranks"),
    (("to-flax", "mixed.pt", *OTHER), UNUSABLE, "Only torch.optim.SGD"),
    (("to-flax", "names.pt", *OTHER), UNUSABLE, "layout names parameters"),
    (("to-torch", "none", *BACK), UNUSABLE, "does not exist"),
    (("to-torch", "empty", *BACK), UNUSABLE, "no orbax checkpoint"),
    (("to-torch", "other", *BACK), UNUSABLE, "must have the entries params and opt_state"),
    # Before anything is read:
    (("to-flax", "none.pt", *PARAMS, "--out", "text.pt", "--force"), UNUSABLE, "is a file"),
    (("to-flax", "none.pt", *PARAMS, "--out", "run.msgpack"), UNUSABLE, "be an orbax directory"),
    (("to-torch", "other", "--like", "none.pt", "--out", "link"), UNUSABLE, "--force"),
    (("to-torch", "other", "--like", "none.pt", "--out", "other"), UNUSABLE, "is a folder"),
]


def test_failures_are_one_message_and_a_code(call):
    group = {"params": [0, 1, 2, 3], "lr": 0.1, "betas": (0.9, 0.9), 3: 4}
    mixed = {"state": {0: {"exp_avg": 1, 2: 3}, "x": {}}, "param_groups": [group]}
    documents = {
        "rank0.pt": {k: v for k, v in document().items() if k != "world_size"},
        "mixed.pt": document() | {"optimizer": mixed},
        "names.pt": document() | {"layout": document()["layout"].replace("fc2", "fc9")},
    }
    for name, value in documents.items():
        torch.save(value, name)
    raw = files.archive(files.whole(files.call(files.glob("os", "system"), files.text("x"))))
    pathlib.Path("hostile.pt").write_bytes(raw)
    for name, text in {
        "text.pt": "hello",
        "broken.py": "def params():\n    raise KeyError('x')\n",
        "names.json": '["fc1.weight", 2]',
        "big.json": "[" + "[]," * (5 << 20) + "[]]",
    }.items():
        pathlib.Path(name).write_text(text)
    pathlib.Path("empty").mkdir()
    with ocp.CheckpointManager(pathlib.Path("other").absolute()) as manager:
        manager.save(0, args=ocp.args.StandardSave({"params": cli_model.params()}))
    pathlib.Path("link").symlink_to("nowhere")
    os.mkfifo("pipe")
    wrong = {}
    for arguments, code, message in FAILURES:
        got, _, err = call(*arguments)
        if got != code or message not in err or pathlib.Path("x").exists():
            wrong[arguments] = got, err
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
