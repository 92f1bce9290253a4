"""``python -m torch_bridge``: what it prints, what it writes, how it fails."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import tracemalloc
import zipfile

import cli_model
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
import torch_files as files
from flax.training.train_state import TrainState
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import jaxcomp
import torch_bridge
from torch_bridge.__main__ import OK, UNSAFE, UNUSABLE, USAGE, main
from torch_bridge._hook.registered import hook_name

pytestmark = pytest.mark.torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(32, 24)
        self.fc2 = torch.nn.Linear(24, 48)

    def forward(self, x):
        return self.fc2(self.fc1(x))


ORDER = [["fc2.bias", "fc2.weight", "fc1.bias", "fc1.weight"]]


def document():
    """What a run of one rank with momentum leaves behind; random factors and errors."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    layout = torch_bridge.BucketLayout.from_order(ORDER, model.state_dict())
    slots = list(layout.factor_slots(2, 2.0))
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=5)
    state.iter = 20
    state.error_dict = {0: torch.randn(layout.sizes[0])}
    state.p_memory_dict = {0: torch.randn(sum(slot.rows * slot.rank for slot in slots))}
    state.q_memory_dict = {0: torch.randn(sum(slot.cols * slot.rank for slot in slots))}
    return {
        "state_dict": model.state_dict(),
        "comm_hook_state": state,
        "optimizer": optimizer.state_dict(),
        "layout": layout.to_json(),
        "world_size": 1,
        "epoch": 3,
    }


def adagrad():
    return torch.optim.Adagrad(Model().parameters()).state_dict()


@pytest.fixture
def torch_file(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save(document(), path)
    return path


@pytest.fixture
def call(capsys):
    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse's, for wrong usage
            code = stop.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


PARAMS = ("--params", "cli_model:params")


def test_inspect_shows_hyperparameters_parameters_and_what_is_missing(call, torch_file):
    code, out, err = call("inspect", torch_file)
    assert code == OK
    for part in ("iteration", "20", "matrix_approximation_rank", "fc1.weight", "24x32", "epoch"):
        assert part in out
    assert "not compressed" in out
    assert "missing" not in out
    assert "kB" in err  # progress
    code, out, err = call("inspect", torch_file, "--json", "--quiet")
    assert (code, err) == (OK, "")
    summary = json.loads(out)
    rows = {row["name"]: row for row in summary["parameters"]}
    weight = document()["comm_hook_state"].q_memory_dict[0]
    assert rows["fc2.weight"]["q_norm"] == pytest.approx(weight[:48].norm().item(), rel=1e-5)
    assert (rows["fc2.weight"]["rank"], rows["fc2.bias"]["rank"]) == (2, 0)
    assert summary["missing"] == []


def test_inspect_says_what_is_missing(call, tmp_path):
    path = tmp_path / "rank0.pt"
    torch.save(document()["comm_hook_state"], path)
    code, out, _ = call("inspect", path, "--quiet")
    assert code == OK
    for part in ("the model", "the optimizer", "errors of the other ranks", "bucket layout"):
        assert part in out
    other = {name: value for name, value in document().items() if name == "state_dict"}
    torch.save(other, path)
    code, out, _ = call("inspect", path, "--quiet")
    assert "missing: the PowerSGD state" in out


def test_to_flax_restores_as_a_train_state(call, torch_file, tmp_path):
    code, out, _ = call("to-flax", torch_file, *PARAMS, "--out", tmp_path / "run")
    assert code == OK, out
    assert "step 20" in out
    tx = optax.chain(jaxcomp.powersgd(2, axis_name="data"), optax.sgd(0.1, momentum=0.9))
    like = TrainState.create(apply_fn=None, params=cli_model.params(), tx=tx)
    like = like.replace(step=jnp.zeros((), jnp.int32))
    # As examples/language_model/checkpoints.py restores.
    with ocp.CheckpointManager(tmp_path / "run", item_names=("state", "config")) as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.device_get(like)), config=ocp.args.JsonRestore()
        )
        restored = manager.restore(manager.latest_step(), args=args)
    state = restored["state"]
    assert int(state.step) == 20
    assert restored["config"]["powersgd"]["rank"] == 2
    source = document()
    np.testing.assert_array_equal(
        state.params["fc1"]["kernel"], source["state_dict"]["fc1.weight"].numpy().T
    )
    reducer, sgd = state.opt_state
    assert isinstance(reducer, jaxcomp.PowerSGDState)
    expected = torch_bridge.powersgd_from_torch(torch_bridge.load(torch_file), cli_model.params())
    for mine, theirs in zip(jax.tree.leaves(reducer), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    momentum = source["optimizer"]["state"][0]["momentum_buffer"].numpy().T
    np.testing.assert_array_equal(jax.tree.leaves(sgd)[1], momentum)


@pytest.mark.parametrize("out", ["run", "run.msgpack"])
def test_there_and_back(call, torch_file, tmp_path, out):
    code, _, err = call("to-flax", torch_file, *PARAMS, "--out", tmp_path / out, "--quiet")
    assert (code, err) == (OK, "")
    back = tmp_path / "sub" / "back.pt"
    code, _, err = call("to-torch", tmp_path / out, "--like", torch_file, *PARAMS, "--out", back)
    assert code == OK, err
    assert "converting the optimizer" in err
    torch.load(back, weights_only=True)
    old, new = torch_bridge.load(torch_file), torch_bridge.load(back)
    assert list(old.model) == list(new.model)
    for name, array in old.model.items():
        np.testing.assert_array_equal(array, new.model[name])
    one, other = old.powersgd[0], new.powersgd[0]
    np.testing.assert_array_equal(one.q_memory_dict[0], other.q_memory_dict[0])
    np.testing.assert_array_equal(one.p_memory_dict[0], other.p_memory_dict[0])
    np.testing.assert_array_equal(one.rng.key, other.rng.key)
    assert one.hyperparameters == other.hyperparameters
    buffers = [c.optimizer["state"][2]["momentum_buffer"] for c in (old, new)]
    np.testing.assert_array_equal(*buffers)
    assert new.extra["epoch"] == 3
    assert new.layout == old.layout


def test_msgpack_is_flax_serialization(call, torch_file, tmp_path):
    path = tmp_path / "run.msgpack"
    call("to-flax", torch_file, *PARAMS, "--out", path, "--quiet")
    tx = optax.chain(jaxcomp.powersgd(2, axis_name="data"), optax.sgd(0.1, momentum=0.9))
    like = TrainState.create(apply_fn=None, params=cli_model.params(), tx=tx)
    state = flax.serialization.from_bytes(like, path.read_bytes())
    assert int(state.opt_state[0].count) == 20


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "none.pt"], UNUSABLE, "No such file"),
        (["inspect", "text.pt"], UNUSABLE, "Expected a torch.save file"),
        (["inspect", "hostile.pt"], UNSAFE, "os.system"),
        (["to-flax", "checkpoint.pt", "--params", "cli_model", "--out", "x"], USAGE, "MODULE:NAME"),
        (["to-flax", "checkpoint.pt", "--params", "no:no", "--out", "x"], USAGE, "No module"),
        (["to-flax", "checkpoint.pt", *PARAMS, "--rule", "x", "--out", "x"], USAGE, "REGEX=PATH"),
        (["to-flax", "other.pt", *PARAMS, "--out", "x"], UNUSABLE, "fc1"),
        (["to-flax", "rank0.pt", *PARAMS, "--out", "x"], UNUSABLE, "--missing-ranks"),
        (
            ["to-torch", "none", "--like", "checkpoint.pt", *PARAMS, "--out", "x"],
            UNUSABLE,
            "does not exist",
        ),
        (
            ["to-torch", "text.pt", "--like", "checkpoint.pt", *PARAMS, "--out", "x"],
            UNUSABLE,
            "error",
        ),
        (["inspect", "checkpoint.pt", "--max-bytes", "10"], UNUSABLE, "--max-bytes"),
        (["inspect", "checkpoint.pt", "--layout", "bytes.bin"], UNUSABLE, "bytes.bin: "),
        (["inspect", "checkpoint.pt", "--layout", "text.pt"], UNUSABLE, "text.pt: A bucket"),
        (["to-flax", "checkpoint.pt", *PARAMS, "--rule", "((=x", "--out", "x"], USAGE, "'(('"),
        (["to-flax", "checkpoint.pt", *PARAMS, "--flatten", "a=b", "--out", "x"], USAGE, "C,H,W"),
        (
            ["to-flax", "checkpoint.pt", *PARAMS, "--unflatten", "a=b", "--out", "x"],
            USAGE,
            "--unfl",
        ),
        (["to-flax", "checkpoint.pt", *PARAMS, "--ignore", "*", "--out", "x"], USAGE, "'*'"),
        (
            ["to-flax", "checkpoint.pt", "--params", "broken:params", "--out", "x"],
            USAGE,
            "KeyError",
        ),
        (
            ["to-flax", "checkpoint.pt", "--params", "os:getcwd", "--out", "x"],
            USAGE,
            "the result is a str",
        ),
        (
            ["to-flax", "checkpoint.pt", *PARAMS, "--flatten", "fc9=2,2,2", "--out", "x"],
            UNUSABLE,
            "flatten: fc9",
        ),
        (
            ["to-flax", "checkpoint.pt", *PARAMS, "--unflatten", "fc1=8,2,2", "--out", "x"],
            UNUSABLE,
            "with unflatten=(8, 2, 2)",
        ),
        (["to-flax", "adagrad.pt", *PARAMS, "--out", "x"], UNUSABLE, "optax"),
        (["to-flax", "names.pt", *PARAMS, "--out", "x"], UNUSABLE, "layout names parameters"),
    ],
)
def test_failures_are_one_message_and_a_code(
    call, torch_file, tmp_path, monkeypatch, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.pt").write_text("hello")
    raw = files.archive(files.whole(files.call(files.glob("os", "system"), files.text("x"))))
    pathlib.Path("hostile.pt").write_bytes(raw)
    torch.save({"state_dict": {"fc9.weight": torch.zeros(2, 2)}}, "other.pt")
    torch.save({k: v for k, v in document().items() if k != "world_size"}, "rank0.pt")
    torch.save(document() | {"optimizer": adagrad()}, "adagrad.pt")
    torch.save(document() | {"layout": document()["layout"].replace("fc2", "fc9")}, "names.pt")
    pathlib.Path("bytes.bin").write_bytes(b"\xff\xfe")
    pathlib.Path("broken.py").write_text("def params():\n    raise KeyError('x')\n")
    got, _, err = call(*arguments, "--quiet")
    assert got == code
    assert message in err
    assert not pathlib.Path("x").exists()


def test_a_second_conversion_does_not_overwrite(call, torch_file, tmp_path):
    arguments = ("to-flax", torch_file, *PARAMS, "--out", tmp_path / "run", "--quiet")
    assert call(*arguments)[0] == OK
    code, _, err = call(*arguments)
    assert code == UNUSABLE
    assert "already holds step 20" in err


def test_what_out_may_be_is_said_before_the_work(call, torch_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "folder.msgpack"):
        pathlib.Path(name).mkdir()
    pathlib.Path("link.msgpack").symlink_to("nowhere")
    pathlib.Path("file").write_text("kept")
    monkeypatch.setattr("torch_bridge.__main__._load", lambda *_: pytest.fail("it was read"))
    to_torch = ("to-torch", torch_file, "--like", torch_file)
    for command, out, said in (
        (("to-flax", torch_file), "folder.msgpack", "is a folder"),
        (("to-flax", torch_file), "file", "is a file"),
        (to_torch, "folder", "is a folder"),
    ):
        code, _, err = call(*command, *PARAMS, "--out", out, "--force", "--quiet")
        assert (code, said in err) == (UNUSABLE, True)
    code, _, err = call("to-flax", torch_file, *PARAMS, "--out", "link.msgpack", "--quiet")
    assert (code, "--force" in err) == (UNUSABLE, True)
    assert pathlib.Path("file").read_text() == "kept"


def test_an_overwritten_file_keeps_its_mode_and_names_are_read(call, torch_file, tmp_path):
    path, names = tmp_path / "run.msgpack", tmp_path / "names.json"
    path.touch(0o600)
    names.write_text(json.dumps(list(Model().state_dict())))
    arguments = ("to-flax", torch_file, *PARAMS, "--out", path, "--force", "--quiet")
    assert call(*arguments, "--param-names", names)[0] == OK
    assert path.stat().st_mode & 0o777 == 0o600
    names.write_text('["fc1.weight", 2]')
    code, _, err = call(*arguments, "--param-names", names)
    assert (code, "--param-names must be" in err) == (UNUSABLE, True)


def test_json_has_null_for_a_norm_that_is_not_finite(call, tmp_path):
    value = document()
    value["comm_hook_state"].q_memory_dict[0][:] = torch.nan
    torch.save(value, tmp_path / "nan.pt")
    code, out, _ = call("inspect", tmp_path / "nan.pt", "--json", "--quiet")
    found = json.loads(out, parse_constant=pytest.fail)
    assert code == OK
    assert [row["q_norm"] for row in found["parameters"]] == [None] * 4
    assert any("never used, or the run diverged" in line for line in found["missing"])


def test_what_is_left_out_and_what_was_flattened(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = {"aux.weight": torch.zeros(3, 3), "aux.bias": torch.zeros(3)}
    value = document()
    value["state_dict"] = dict(value["state_dict"]) | more
    del value["optimizer"]
    torch.save(value, "aux.pt")
    arguments = ("aux.pt", *PARAMS, "--quiet", "--out", "run.msgpack")
    code, _, err = call("to-flax", *arguments)
    assert code == UNUSABLE
    assert "--ignore" in err
    options = ("--ignore", r"aux\..*", "--flatten", "fc1=8,2,2")
    assert call("to-flax", *arguments, *options)[0] == OK
    kernel = flax.serialization.msgpack_restore(pathlib.Path("run.msgpack").read_bytes())["params"][
        "fc1"
    ]["kernel"]
    channels_last = value["state_dict"]["fc1.weight"].reshape(24, 8, 2, 2).permute(2, 3, 1, 0)
    np.testing.assert_array_equal(kernel, channels_last.reshape(32, 24))
    back = ("to-torch", "run.msgpack", "--like", "aux.pt", *PARAMS, "--quiet", "--out", "back.pt")
    assert call(*back, *options)[0] == OK
    again = torch_bridge.load("back.pt")
    for name, tensor in value["state_dict"].items():
        np.testing.assert_array_equal(again.model[name], tensor)
    error = value["comm_hook_state"].error_dict[0]
    layout = again.layout.split(0, again.powersgd[0].error_dict[0])
    wanted = again.layout.split(0, error.numpy())
    np.testing.assert_array_equal(layout["fc1.weight"], wanted["fc1.weight"])


def test_before_compression_began_there_and_back(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = document()
    del value["layout"]
    state = value["comm_hook_state"]
    state.iter, state.error_dict, state.p_memory_dict, state.q_memory_dict = 3, {}, {}, {}
    torch.save(value, "early.pt")
    out = ("--quiet", "--out")
    assert call("to-flax", "early.pt", *PARAMS, *out, "run")[0] == OK
    assert call("to-torch", "run", "--like", "early.pt", *PARAMS, *out, "back.pt")[0] == OK
    record = torch_bridge.load("back.pt").powersgd[0]
    assert record.iter == 3
    assert not record.buckets
    state.iter = 2  # JAX has gone on since: now a layout is needed
    torch.save(value, "earlier.pt")
    code, _, err = call("to-torch", "run", "--like", "earlier.pt", *PARAMS, *out, "other.pt")
    assert code == UNUSABLE
    assert "--layout" in err


def test_a_flax_checkpoint_without_q_does_not_fit_a_run_with_one(call, torch_file, tmp_path):
    value = document()
    value["comm_hook_state"].warm_start = False
    value["comm_hook_state"].p_memory_dict = value["comm_hook_state"].q_memory_dict = {}
    torch.save(value, tmp_path / "cold.pt")
    run = tmp_path / "run"
    assert call("to-flax", tmp_path / "cold.pt", *PARAMS, "--quiet", "--out", run)[0] == OK
    code, _, err = call(
        "to-torch", run, "--like", torch_file, *PARAMS, "--quiet", "--out", tmp_path / "back.pt"
    )
    assert code == UNUSABLE
    assert "another structure" in err


def test_a_flipped_bit_in_an_orbax_directory_is_named(call, torch_file, tmp_path):
    run = tmp_path / "run"
    assert call("to-flax", torch_file, *PARAMS, "--quiet", "--out", run)[0] == OK
    files_of_it = [path for path in sorted((run / "20").rglob("*")) if path.is_file()]
    for index, path in enumerate(files_of_it):
        kept = path.read_bytes()
        changed = bytearray(kept or b"x")
        changed[len(changed) * 7 // 11] ^= 1 << index % 8
        path.write_bytes(changed)
        back = ("--like", torch_file, *PARAMS, "--quiet", "--out", tmp_path / "back.pt")
        code, _, err = call("to-torch", run, *back)
        assert (code, "is damaged" in err) == (UNUSABLE, True), path
        path.write_bytes(kept)
    assert call("to-torch", run, *back)[0] == OK
    # sha256sum -c reads it, too.
    lines = (run / "20" / "SHA256SUMS").read_text().splitlines()
    assert [line[64:66] for line in lines] == ["  "] * (len(files_of_it) - 1)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(call, torch_file, tmp_path, monkeypatch):
    def save(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: Failed [os_error_code='28']")

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    run = tmp_path / "run"
    code, _, err = call("to-flax", torch_file, *PARAMS, "--quiet", "--out", run)
    assert (code, err) == (UNUSABLE, f"error: {run}: No space left on device\n")
    assert not list(run.iterdir())


def test_a_table_has_fifty_rows_and_says_how_many_more(call, tmp_path):
    path = tmp_path / "many.pt"
    model = {f"w{index}": torch.ones(2, 2) for index in range(60)}
    extra = {f"entry{index}": index for index in range(30)}
    torch.save({"state_dict": model, **extra}, path)
    code, out, _ = call("inspect", path, "--quiet")
    assert code == OK
    assert "w49" in out
    assert "w50" not in out
    assert "10 more parameters" in out
    assert "and 22 more" in out
    _, out, _ = call("inspect", path, "--quiet", "--json")
    assert len(json.loads(out)["parameters"]) == 60


def test_full_rank_factors_of_a_small_file_are_not_multiplied(call, tmp_path):
    # 30 kB once took 375 MiB and 7 s.
    size, path = 2600, tmp_path / "full.pt"
    layout = torch_bridge.BucketLayout.from_manifest([[("w", (size, size))]])
    factors = {0: torch.zeros(size * size)}
    slots = {"matrix_approximation_rank": size, "iter": 9, "min_compression_rate": 0.4}
    slots |= {"error_dict": {}, "p_memory_dict": factors, "q_memory_dict": factors}
    whole = {"state_dict": {"w": torch.zeros(1).expand(1, 1)}, "comm_hook_state": slots}
    for more in ({"layout": layout.to_json()}, {}):
        torch.save(whole | more, path)
        with zipfile.ZipFile(path) as source:
            entries = {name: source.read(name) for name in source.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, raw in entries.items():
                packed.writestr(name, raw)
        assert path.stat().st_size < 40_000
        tracemalloc.start()
        try:
            assert call("inspect", path, "--quiet")[0] == OK
            assert tracemalloc.get_traced_memory()[1] < 100 << 20
        finally:
            tracemalloc.stop()


def test_an_optimizer_with_mixed_keys_is_one_sentence(call, tmp_path):
    value, path = document(), tmp_path / "mixed.pt"
    group = {"params": [0, 1, 2, 3], "lr": 0.1, "betas": (0.9, 0.9), 3: 4}
    value["optimizer"] = {"state": {0: {"exp_avg": 1, 2: 3}, "x": {}}, "param_groups": [group]}
    torch.save(value, path)
    assert call("inspect", path, "--quiet")[0] == OK
    code, _, err = call("to-flax", path, *PARAMS, "--quiet", "--out", tmp_path / "run")
    assert (code, err.startswith("error: Only torch.optim.SGD")) == (UNUSABLE, True)


def test_wrappers_of_hooks_take_time_in_proportion():
    name = "default_hooks.fp16_compress_wrapper(" * 100_000 + "powerSGD_hook" + ")" * 100_000
    start = time.process_time()
    assert hook_name(name).count("(") == 100_000
    assert time.process_time() - start < 2
    assert hook_name("no.wrapper(x)") == "wrapper(x)"


def test_help_has_examples(capsys):
    for command in ([], ["inspect"], ["to-flax"], ["to-torch"]):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == OK
        out = capsys.readouterr().out
        assert "python -m torch_bridge" in out
        assert ("batch_stats" in out) == (command == ["to-flax"])
    with pytest.raises(SystemExit) as stop:
        main(["explode"])
    assert stop.value.code == USAGE


def test_as_a_module(torch_file):
    done = subprocess.run(
        [sys.executable, "-m", "torch_bridge", "inspect", str(torch_file)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == OK, done.stderr
    assert "fc2.weight" in done.stdout


MEMORY = """
import resource, sys
import torch_bridge
from torch_bridge._hook.registered import hook_name
from torch_bridge.__main__ import main
import jax, orbax.checkpoint  # not part of what a conversion costs
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
said = ["--params", "big_model:params", "--conv1d", ""]
assert main(["to-flax", sys.argv[1], *said, "--out", sys.argv[2]]) == 0
print("used", peak() - before)
"""


def test_a_conversion_stays_below_three_times_the_size(tmp_path):
    # 64 MB; benchmarks.bridge_memory does the same with 1 GB.
    layers, width = 8, 1024
    model = {f"fc{i}.weight": torch.randn(width, width) for i in range(layers)}
    layout = torch_bridge.BucketLayout.from_order([list(model)[::-1]], model)
    state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=5)
    state.iter, size = 20, layers * width * 4
    state.error_dict = {0: torch.randn(layout.sizes[0])}
    state.p_memory_dict, state.q_memory_dict = {0: torch.randn(size)}, {0: torch.randn(size)}
    path = tmp_path / "big.pt"
    torch.save(
        {
            "state_dict": model,
            "comm_hook_state": state,
            "layout": layout.to_json(),
            "world_size": 1,
        },
        path,
    )
    (tmp_path / "big_model.py").write_text(
        "import jax, jax.numpy as jnp\n"
        f"leaf = jax.ShapeDtypeStruct(({width}, {width}), jnp.float32)\n"
        f"params = {{f'fc{{i}}': {{'kernel': leaf}} for i in range({layers})}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "run.msgpack")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "reading" in done.stderr
    assert "writing" in done.stderr
    used = int(done.stdout.split("used")[1])
    assert used < 3 * path.stat().st_size, used / path.stat().st_size
