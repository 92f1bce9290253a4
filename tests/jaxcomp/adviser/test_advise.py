"""The adviser: its verdicts, the shapes that it reads, its command line, and what it measures."""

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from paths import DOCS

import jaxcomp
from jaxcomp.__main__ import main
from jaxcomp._adviser.calibration import ASSUMED
from jaxcomp._adviser.model import Software
from jaxcomp._adviser.shapes import assumed_params, count_values, read_params, typical_width

SHAPES = {
    "embedding": [1000, 256],
    "layer": {"kernel": [256, 1024], "bias": [1024], "stack": {"shape": [3, 256, 256]}},
    "head": {"shape": [256, 1000], "dtype": "bfloat16"},
    "steps": {"shape": [], "dtype": "int32"},
}
PARAMS = {
    "embedding": jax.ShapeDtypeStruct((1000, 256), jnp.float32),
    "layer": {
        "kernel": jax.ShapeDtypeStruct((256, 1024), jnp.float32),
        "bias": jax.ShapeDtypeStruct((1024,), jnp.float32),
        "stack": jax.ShapeDtypeStruct((3, 256, 256), jnp.float32),
    },
    "head": jax.ShapeDtypeStruct((256, 1000), jnp.bfloat16),
    "steps": jax.ShapeDtypeStruct((), jnp.int32),
}
SLOW = {"workers": 8, "bandwidth": "100Mbit", "latency": "50us", "step_time": "20ms"}
FAST = {"workers": 8, "bandwidth": "100Gbit", "latency": "5us", "step_time": "20ms"}


def by_name(advice):
    return {prediction.name: prediction for prediction in advice.predictions}


def powersgd(advice):
    return [prediction for prediction in advice.predictions if prediction.rank]


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    return path


def test_a_slow_network_wants_compression():
    advice = jaxcomp.advise(PARAMS, **SLOW)
    chosen = advice.recommended
    assert advice.compress
    assert chosen in advice.predictions
    assert chosen.rank
    assert chosen.gap <= advice.loss_budget
    assert chosen.speedup > 1.1
    assert chosen.break_even > advice.bandwidth
    assert f"Use {chosen.name}." in str(advice)


def test_a_fast_network_and_a_small_model_do_not():
    advice = jaxcomp.advise(PARAMS, **FAST)
    assert not advice.compress
    assert advice.recommended is advice.baseline
    assert "Do not compress." in str(advice)
    apart = jaxcomp.advise(PARAMS, backward_overlap=0, **FAST)
    assert not apart.compress
    assert re.search(r"nothing can win more than \d\.\d%", apart.reason)


def test_compression_that_takes_longer_than_the_average_does_not_pay():
    slow_device = dataclasses.replace(ASSUMED["cpu"], memory_bandwidth=1e7)
    advice = jaxcomp.advise(10_000_000, calibration=slow_device, **{**SLOW, "bandwidth": "10Gbit"})
    assert not advice.compress
    assert "too little to win" in advice.reason


def test_one_worker():
    advice = jaxcomp.advise(PARAMS, workers=1, bandwidth="1Gbit", step_time="20ms")
    assert not advice.compress
    assert {p.communication for p in advice.predictions} == {0.0}


def test_every_reducer_that_is_named_can_be_made_and_sends_what_was_said():
    advice = jaxcomp.advise(PARAMS, **SLOW)
    for prediction in advice.predictions:
        reducer = prediction.reducer("data")
        assert reducer.bytes(PARAMS, replicas=8).bytes_after == prediction.bytes_per_step
        assert reducer.init({"w": jnp.zeros((256, 256))}) is not None
    assert repr(advice.reducer("data")) == repr(advice.recommended.reducer("data"))


def test_times_follow_the_formula():
    advice = jaxcomp.advise(PARAMS, backward_overlap=0.5, **SLOW)
    plain = by_name(advice)["all-reduce float32"]
    sent = 2 * 7 / 8 * plain.bytes_per_step
    exact = 20e-3 + 20e-6 + 14 * 50e-6 + sent / 12.5e6 - 0.5 * 2 / 3 * 20e-3
    assert plain.step_time == pytest.approx(exact)
    first = powersgd(advice)[0]
    # Two pairs of an all-to-all and an all-gather.
    assert first.communication == pytest.approx(
        2 * (40e-6 + 14 * 50e-6) + 2 * 7 / 8 * first.bytes_per_step / 12.5e6
    )
    assert first.step_time == pytest.approx(20e-3 + first.compression + first.communication)


def test_compression_by_hand():
    device = dataclasses.replace(
        ASSUMED["cpu"], memory_bandwidth=1e9, flops=1e8, powersgd=2.0, int8=3.0
    )
    params = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32), "b": jnp.zeros(50)}
    advice = jaxcomp.advise(params, calibration=device, **SLOW)
    first = powersgd(advice)[0]
    values = 512 * 1024
    memory, operations = 7 * 4 * values / 1e9, 2 * 4 * values * first.rank / 1e8
    assert first.compression == pytest.approx(2 * (memory + operations))
    whole = by_name(advice)["int8 all-reduce"]
    assert whole.compression == pytest.approx(3 * 9 * 4 * (values + 50) / 1e9)


def test_a_smaller_budget_asks_for_a_higher_rank():
    ranks = [
        powersgd(jaxcomp.advise(124_000_000, loss_budget=budget, **SLOW))[0].rank
        for budget in ("2%", "0.5%", 0)
    ]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 3
    muon = jaxcomp.advise(124_000_000, optimizer="muon", **SLOW)
    assert powersgd(muon)[0].rank > ranks[1]


def test_a_width_that_no_run_had_is_said_and_widens_the_interval():
    inside, outside = (
        jaxcomp.advise({"w": jax.ShapeDtypeStruct((n, 4 * n), jnp.float32)}, **SLOW)
        for n in (512, 4096)
    )
    assert outside.recommended.half_width > inside.recommended.half_width > 0
    assert "which no run had" in " ".join(outside.notes)
    assert "which no run had" not in " ".join(inside.notes)


def test_a_stack_is_as_wide_as_one_of_its_matrices():
    params = {"blocks": jax.ShapeDtypeStruct((12, 256, 1024), jnp.float32)}

    def stacked(path, leaf):
        return jaxcomp.MatrixDims(batch=(0,), rows=(2,), cols=(1,))

    assert typical_width(params, stacked) == 256
    assert typical_width(params) > 256
    advice = jaxcomp.advise(params, matrix_dims=stacked, **SLOW)
    assert "count as one matrix" not in str(advice)
    assert "1 leaves have three axes" in str(jaxcomp.advise(params, **SLOW))
    state = advice.reducer("data").init({"blocks": jnp.zeros((2, 256, 1024))})
    assert state.q["blocks"].shape[0] == 2
    assert typical_width({"b": jnp.zeros(7)}) == 1


def test_what_cannot_be_compressed_gets_no_rank():
    vectors = jaxcomp.advise({"b": jnp.zeros(1_000_000)}, **SLOW)
    assert not powersgd(vectors)
    assert vectors.recommended.name == "int8 all-reduce"


def test_the_break_even_is_where_the_advice_turns():
    first = powersgd(jaxcomp.advise(PARAMS, **SLOW))[0]
    for factor, wins in ((0.9, True), (1.1, False)):
        again = jaxcomp.advise(PARAMS, **{**SLOW, "bandwidth": first.break_even * factor})
        assert (by_name(again)[first.name].speedup > 1) is wins


def test_a_cpu_sends_float16_where_a_gpu_sends_bfloat16():
    assert "all-reduce float16" in by_name(jaxcomp.advise(PARAMS, device="cpu", **SLOW))


def test_what_is_predicted_for_cores_is_near_what_was_measured_on_some():
    # docs/time_to_loss.md: 12.9 million parameters at width 512, 160 ms of computation, two
    # processes. Milliseconds at 1 Gbit/s and at 100 Mbit/s.
    sizes = {"qkv": 3, "out": 1, "up": 4, "down": 4}
    params = {
        f"block_{i}": {
            k: jax.ShapeDtypeStruct((512, 512 * n), jnp.float32) for k, n in sizes.items()
        }
        for i in range(4)
    }
    given = {"workers": 2, "latency": "100us", "step_time": "160ms", "device": "cpu"}
    for bandwidth, exact, compressed in (("1Gbit", 592, 207), ("100Mbit", 4606, 347)):
        advice = jaxcomp.advise(params, bandwidth=bandwidth, **given)
        assert advice.recommended.name == "powersgd rank 32 int6"
        found = by_name(advice)
        assert 1e3 * found["all-reduce float32"].step_time == pytest.approx(exact, rel=0.25)
        assert 1e3 * advice.recommended.step_time == pytest.approx(compressed, rel=0.25)


def test_a_measured_link_is_used_when_none_is_given():
    calibration = dataclasses.replace(
        ASSUMED["cpu"], devices=3, allreduce=Software(8e-3, 1e7), device="measured"
    )
    given = {"workers": 5, "step_time": 0.02, "calibration": calibration}
    advice = jaxcomp.advise(PARAMS, **given)
    assert "5 workers, the measured link, " in str(advice)
    exact = by_name(advice)["all-reduce float32"]
    # 8 ms were those of the four hops of three devices; five workers have eight hops.
    expected = 16e-3 + 2 * 4 / 5 * exact.bytes_per_step / 1e7
    assert exact.communication == pytest.approx(expected)
    # With a link, the slower of it and what was measured counts, and its latency.
    for bandwidth, counts in ((1e6, 1e6), (1e8, 1e7)):
        again = jaxcomp.advise(PARAMS, bandwidth=bandwidth, **given)
        communication = by_name(again)["all-reduce float32"].communication
        assert communication == pytest.approx(
            8e-3 + 8 * 50e-6 + 2 * 4 / 5 * exact.bytes_per_step / counts
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 0}, "`workers` must be a positive integer"),
        ({"bandwidth": "slow"}, "`bandwidth` is no bandwidth: 'slow'. Write"),
        ({"bandwidth": None}, "`bandwidth` is missing"),
        ({"latency": "50"}, "`latency` is no time"),
        ({"step_time": "0ms"}, "`step_time` must be positive"),
        ({"backward_overlap": 1.5}, "`backward_overlap` must be"),
        ({"loss_budget": "little"}, "`loss_budget` is no share"),
        ({"loss_budget": 1}, "`loss_budget` must be"),
        ({"optimizer": "lion"}, "`optimizer` must be one of adamw, muon"),
        ({"device": "abacus"}, "`device` must be one of gpu, cpu"),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jaxcomp.advise(PARAMS, **{**SLOW, **changed})


@pytest.mark.parametrize("count", [10_000, 123_456, 10_000_000, 124_000_000, 1_500_000_000, 10**12])
def test_assumed_shapes_have_about_as_many_parameters(count):
    params, sentence = assumed_params(count)
    assert count_values(params) == pytest.approx(count, rel=0.1)
    assert f"{count_values(params):,} parameters" in sentence


def test_gpt2_small_is_recognised():
    params, _ = assumed_params(124_000_000)
    assert params["embedding"].shape == (50_257, 768)
    assert len([name for name in params if name.startswith("layer")]) == 12
    assert typical_width(params) == 768


def test_json_shapes(shapes):
    assert read_params(shapes) == PARAMS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "holds no names"),
        (b"{", "is no JSON file"),
        (b"\xff\xfe\xff", "is no JSON file"),
        (b"{}", "holds no parameters"),
        (b'{"a": [1, "2"]}', "the shape of a must be a list of sizes"),
        (b'{"a": {"b": [1, -2]}}', "the shape of a/b must be"),
        (b'{"a": {"shape": [1], "dtype": "float7"}}', "unknown dtype 'float7'"),
        (b'{"a": {"shape": [1], "dtype": 7}}', "unknown dtype 7"),
    ],
)
def test_files_that_hold_something_else(tmp_path, capsys, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert main(["measure", "--params", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not printed.out


def test_the_command_line_prints_the_advice(shapes, capsys):
    command = ["advise", f"--params={shapes}"]
    command += [f"--{k.replace('_', '-')}={v}" for k, v in SLOW.items()]
    assert main(command) == 0
    advice = jaxcomp.advise(PARAMS, **SLOW)
    assert capsys.readouterr().out == f"{advice}\n"
    assert main([*command, "--loss-budget=1%", "--optimizer=muon", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compress"] is True
    assert found["loss_budget"] == 0.01
    assert main([*command, "--device=abacus"]) == 2
    assert capsys.readouterr().err.startswith("error: --device must be one of")


def test_as_a_user_runs_it():
    def run(*arguments):
        command = [sys.executable, "-m", "jaxcomp", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    wrong = run("advise", "--params", "1M", "--workers", "2", "--step-time", "soon")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: --step-time is no time")
    missing = run("advise", "--params", "1M")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: the following arguments are required")


def test_the_examples_in_the_documentation_are_what_it_prints(capsys):
    page = DOCS / "choosing.md"
    blocks = re.findall(r"```console\n\$ jaxcomp (.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        command, _, expected = block.replace(" \\\n", " ").partition("\n")
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == expected


def test_the_programs_in_the_documentation_run():
    page = DOCS / "choosing.md"
    programs = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert programs
    with jax.numpy_dtype_promotion("standard"):  # what a user has
        exec(compile("\n".join(programs), str(page), "exec"), {})


@pytest.fixture(scope="module")
def calibration():
    # Whether it works, not how well: little time for each figure.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxcomp._adviser.measure._BUDGET", 0.01)
        patch.setattr("jaxcomp._adviser.measure._PAYLOADS", (1 << 12, 1 << 16))
        yield jaxcomp.measure(PARAMS, rank=2, devices=jax.devices()[:2])


def test_measured_constants_are_positive_and_finite(calibration):
    assert calibration.platform == jax.devices()[0].platform
    assert calibration.devices == 2
    figures = [calibration.memory_bandwidth, calibration.flops]
    figures += [calibration.int8, calibration.powersgd]
    figures += [*calibration.allreduce, *calibration.allreduce_16, *calibration.exchange]
    assert all(0 < figure < math.inf for figure in figures)
    assert jaxcomp.types.Calibration.from_json(calibration.to_json()) == calibration


def test_advice_from_measured_constants_says_so(calibration):
    advice = jaxcomp.advise(PARAMS, workers=2, step_time="20ms", calibration=calibration)
    assert "measured: 2 x" in str(advice)
    assert all(p.compression > 0 for p in powersgd(advice))


def test_measuring_one_device_assumes_the_collective():
    calibration = jaxcomp.measure({"w": jnp.zeros((64, 32))}, rank=1, devices=jax.devices()[:1])
    assert calibration.devices == 1
    assumed = ASSUMED["cpu" if calibration.platform == "cpu" else "gpu"]
    assert calibration.allreduce == assumed.allreduce
    with pytest.raises(ValueError, match="no all-reduce was measured"):
        jaxcomp.advise(PARAMS, workers=2, step_time="20ms", calibration=calibration)


def test_nothing_to_measure():
    with pytest.raises(ValueError, match="nothing that is floating"):
        jaxcomp.measure({"n": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="`rank` must be"):
        jaxcomp.measure(PARAMS, rank=0)
    with pytest.raises(ValueError, match="no leaf is compressed"):
        jaxcomp.measure({"w": jnp.zeros((64, 32))}, rank=500, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": -1}, "-1 is out of range"),
        ({"devices": 1.5}, "devices must be a positive integer"),
        ({"exchange": [1.0]}, "not enough values"),
        ({"more": 1}, "its entries must be"),
    ],
)
def test_what_is_no_calibration_is_refused(change, message):
    fields = json.loads(ASSUMED["gpu"].to_json()) | change
    with pytest.raises(ValueError, match=message):
        jaxcomp.types.Calibration.from_json(json.dumps(fields))
    with pytest.raises(ValueError, match="This is no calibration"):
        jaxcomp.types.Calibration.from_json("[]")
