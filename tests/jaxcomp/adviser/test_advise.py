"""The adviser: its verdicts, the shapes that it reads, its command line, and what it measures."""

import dataclasses
import json
import math
import re
import shlex
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import DOCS

import jaxcomp
from jaxcomp.__main__ import main
from jaxcomp._adviser.advise import advise
from jaxcomp._adviser.calibration import ASSUMED, Calibration
from jaxcomp._adviser.measure import measure
from jaxcomp._adviser.model import Software
from jaxcomp._adviser.programs import gpu_program
from jaxcomp._adviser.shapes import assumed_params, count_values, read_params
from jaxcomp._lowrank.matricize import plan_leaves

SHAPES = {
    "embedding": [1000, 64],
    "layer": {"kernel": [64, 256], "bias": [256], "stack": {"shape": [3, 64, 64]}},
    "head": {"shape": [64, 1000], "dtype": "bfloat16"},
    "steps": {"shape": [], "dtype": "int32"},
}
PARAMS = {
    "embedding": jax.ShapeDtypeStruct((1000, 64), jnp.float32),
    "layer": {
        "kernel": jax.ShapeDtypeStruct((64, 256), jnp.float32),
        "bias": jax.ShapeDtypeStruct((256,), jnp.float32),
        "stack": jax.ShapeDtypeStruct((3, 64, 64), jnp.float32),
    },
    "head": jax.ShapeDtypeStruct((64, 1000), jnp.bfloat16),
    "steps": jax.ShapeDtypeStruct((), jnp.int32),
}
SLOW = {"workers": 8, "bandwidth": "100Mbit", "latency": "50us", "step_time": "20ms"}


def by_name(advice):
    return {prediction.name: prediction for prediction in advice.predictions}


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(SHAPES))
    return path


def test_a_slow_network_wants_compression():
    advice = advise(PARAMS, **SLOW)
    assert advice.compress
    assert advice.recommended.name.startswith(("powersgd", "one-sided", "int8"))
    assert advice.recommended.speedup > 1.1
    assert advice.recommended.break_even > advice.bandwidth
    assert str(advice).count("\n") > len(advice.predictions)


def test_a_fast_network_and_a_small_model_do_not():
    advice = advise(PARAMS, workers=8, bandwidth="100Gbit", latency="5us", step_time="20ms")
    assert not advice.compress
    assert advice.recommended is advice.baseline
    assert "hides behind the backward pass" in advice.reason
    assert "Do not compress." in str(advice)


def test_without_overlap_the_reason_is_what_could_be_won():
    advice = advise(
        PARAMS, workers=8, bandwidth="100Gbit", latency="5us", step_time="20ms", backward_overlap=0
    )
    assert not advice.compress
    assert re.search(r"nothing can win more than \d\.\d%", advice.reason)


def test_compression_that_takes_longer_than_the_average_does_not_pay():
    slow_device = dataclasses.replace(ASSUMED["cpu"], memory_bandwidth=1e7)
    advice = advise(10_000_000, calibration=slow_device, **{**SLOW, "bandwidth": "10Gbit"})
    paying = [p.name for p in advice.predictions if p.compressed and p.speedup > 1.1]
    assert paying == ["local SGD H=8"]
    assert advice.recommended.name == "local SGD H=8"
    never = advise(
        10_000_000, calibration=slow_device, sync_every=1, **{**SLOW, "bandwidth": "10Gbit"}
    )
    assert not never.compress
    assert "too little to win" in never.reason


def test_one_sided_steps_are_for_latency():
    # At equal bytes they lose more: only where the second all-reduce itself is the time.
    bandwidth_bound = advise(124_000_000, workers=16, bandwidth="10Gbit", step_time="120ms")
    assert bandwidth_bound.recommended.name.startswith("powersgd")
    latency_bound = advise(
        124_000_000, workers=16, bandwidth="1Gbit", latency="5ms", step_time="120ms"
    )
    assert latency_bound.recommended.name.startswith("one-sided")


def test_one_worker():
    advice = advise(PARAMS, workers=1, bandwidth="1Gbit", step_time="20ms")
    assert not advice.compress
    assert advice.reason == "There is one worker, so nothing is sent."
    assert {p.bytes_sent for p in advice.predictions} == {0.0}


def test_times_follow_the_formula():
    found = by_name(advise(PARAMS, backward_overlap=0.5, **SLOW))
    values = count_values(PARAMS)
    sent = 2 * 7 / 8 * 4 * values
    exact = 20e-3 + 20e-6 + 14 * 50e-6 + sent / 12.5e6 - 0.5 * 2 / 3 * 20e-3
    assert found["all-reduce float32"].step_time == pytest.approx(exact)
    stats = jaxcomp.compression_stats(PARAMS, rank=4)
    rank_4 = found["powersgd rank 4"]
    assert rank_4.bytes_per_step == stats.bytes_after
    assert rank_4.communication == pytest.approx(
        2 * (20e-6 + 14 * 50e-6) + 2 * 7 / 8 * stats.bytes_after / 12.5e6
    )
    assert rank_4.step_time == pytest.approx(20e-3 + rank_4.compression + rank_4.communication)


def test_bytes_are_those_of_the_stats():
    found = by_name(advise(PARAMS, ranks=[2, 4], sync_every=4, **SLOW))
    stats = jaxcomp.compression_stats(PARAMS, rank=2)
    one_sided = jaxcomp.compression_stats(PARAMS, rank=2, alternating=True)
    assert found["powersgd rank 2"].bytes_per_step == stats.bytes_after
    assert found["one-sided rank 2"].bytes_per_step == one_sided.bytes_after < stats.bytes_after
    quantized = jaxcomp.quantized_stats(PARAMS, replicas=8)
    assert found["int8"].bytes_per_step == quantized.bytes_after
    local = jaxcomp.local_sgd_stats(PARAMS, sync_every=4)
    assert found["local SGD H=4"].bytes_per_step == local.bytes_per_step
    values = count_values(PARAMS)
    assert found["all-reduce float32"].bytes_per_step == 4 * values
    assert found["all-reduce bfloat16"].bytes_per_step == 2 * values


def test_int8_factors_by_hand():
    found = by_name(advise(PARAMS, ranks=[4], comm_dtype=jnp.int8, device="cpu", **SLOW))
    plain = by_name(advise(PARAMS, ranks=[4], device="cpu", **SLOW))
    for name, alternating, stages in (("powersgd", False, 2), ("one-sided", True, 1)):
        stats = jaxcomp.compression_stats(
            PARAMS, rank=4, comm_dtype="int8", replicas=8, alternating=alternating
        )
        int8, wide = found[f"{name} rank 4 int8"], plain[f"{name} rank 4"]
        assert int8.bytes_per_step == stats.bytes_after
        # An all-to-all and an all-gather: two collectives of 500 us, as many hops as a ring has.
        assert int8.communication == pytest.approx(
            stages * (1e-3 + 14 * 50e-6) + 2 * 7 / 8 * stats.bytes_after / 12.5e6
        )
        # Five passes at 10 GB/s over the factors, of all leaves but the bias, at half the speed.
        values = 4 * (1064 + 64 + 256 + (3 * 64 + 64) + 1064)
        rounding = 2 * 5 * 4 * values * stages / 2 / 10e9
        assert int8.compression == pytest.approx(wide.compression + rounding)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("powersgd", {}),
        ("powersgd, gpu_kernels", {"gpu_kernels": True}),
        ("powersgd, gpu_kernels, int8", {"gpu_kernels": True, "comm_dtype": "int6"}),
    ],
)
def test_compression_on_a_gpu_is_words_products_and_launches(form, options):
    advice = advise(PARAMS, ranks=[4], **options, **SLOW)
    found = next(p for p in advice.predictions if p.name.startswith("powersgd rank 4"))
    floating = {name: leaf for name, leaf in PARAMS.items() if name != "steps"}
    plans = plan_leaves(floating, 4, 2.0)
    kernels, words = gpu_program(form, plans)
    products = sum(4 * 2 * p.size * 4 + 4 * p.wire_size * 4 for p in plans if p.view)
    # Four fifths of the data sheet's speeds are reached.
    expected = 1.25 * (4 * words / 4.8e12 + products / 67e12) + 4e-6 * kernels
    assert found.compression == pytest.approx(expected)
    kind = "gpu_kernels=True" if "gpu_kernels" in options else "without gpu_kernels"
    said = " ".join(advice.assumptions)
    assert f"of powersgd {kind}, as compiled for H200s; none was run" in said
    assert "assumed, not measured: memory at 4.8 TB/s" in said


LAYERS = {f"layer_{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(6)}
LAYERS["embedding"] = jax.ShapeDtypeStruct((4096, 512), jnp.float32)


def test_buckets_by_hand():
    # 1 MB/s: what a bucket sends takes 3/2 s for each of its megabytes, and four latencies.
    network = {"workers": 4, "bandwidth": 1e6, "latency": "1ms", "backward_overlap": 0.5}
    advice = advise(LAYERS, ranks=[8], step_time=0.3, buckets=(2,), **network)
    one, two = (by_name(advice)[f"powersgd rank 8{cut}"] for cut in ("", ", buckets=2"))
    assert two.bytes_per_step == one.bytes_per_step
    assert two.communication == pytest.approx(one.communication + 2 * (20e-6 + 6e-3))
    # Two of the six layers, then four and the embedding, behind whose layers the first hide.
    first, last = 2 * 2 * 512 * 8 * 4, (4 * 2 * 512 + 4096 + 512) * 8 * 4
    times = [1.5e-6 * b + 2 * (20e-6 + 6e-3) for b in (first, last)]
    hiding = 0.5 * 2 / 3 * 0.3 * 4 / 6
    assert 0 < hiding < times[0]
    expected = 0.3 + two.compression + times[0] - hiding + times[1]
    assert two.step_time == pytest.approx(expected)
    assert two.compression > one.compression
    assert two.step_time < 0.98 * one.step_time
    assert "JAX_ENABLE_PGLE=true" in str(advice)


def test_buckets_are_for_gpus_and_where_they_save_enough():
    def cuts(**changed):
        given = {"workers": 4, "bandwidth": 1e6, "latency": 0, "step_time": 0.3, "ranks": [8]}
        names = by_name(advise(LAYERS, **{**given, **changed}))
        return [name.partition("buckets=")[2] for name in names if "buckets" in name]

    assert len(cuts()) == 1
    assert cuts(device="cpu") == []
    assert cuts(buckets=()) == cuts(buckets=[1]) == cuts(buckets=[64]) == []
    assert cuts(bandwidth="100Gbit") == []  # nothing to hide
    assert cuts(backward_overlap=0) == []  # nothing to hide behind
    assert cuts(latency="1s") == []  # and each bucket has two more
    assert cuts(buckets=(2, 4), bandwidth=3e6) == ["4"]  # the faster of both


def test_the_recommendation_names_the_buckets():
    given = {"workers": 16, "bandwidth": "10Gbit", "latency": "50us", "step_time": "120ms"}
    advice = advise(124_000_000, **given)
    assert re.fullmatch(r"powersgd rank \d+, buckets=\d", advice.recommended.name)
    assert f"Use {advice.recommended.name}." in str(advice)
    apart = advise(124_000_000, buckets=(), **given)
    assert "buckets" not in str(apart)
    assert advice.recommended.bytes_per_step >= apart.recommended.bytes_per_step


def test_16_bit_factors_by_hand():
    found = by_name(advise(PARAMS, ranks=[4], comm_dtype="bfloat16", **SLOW))
    calibration = dataclasses.replace(ASSUMED["gpu"], allreduce_16=Software(1e-3))
    slower = by_name(
        advise(PARAMS, ranks=[4], comm_dtype="bfloat16", calibration=calibration, **SLOW)
    )
    name = "powersgd rank 4 bfloat16"
    stats = jaxcomp.compression_stats(PARAMS, rank=4, comm_dtype="bfloat16")
    assert found[name].bytes_per_step == stats.bytes_after
    more = slower[name].communication - found[name].communication
    assert more == pytest.approx(2 * (1e-3 - 20e-6))


def test_ranks_are_those_that_the_shapes_allow():
    names = by_name(advise(PARAMS, buckets=(), **SLOW))
    ranks = [int(name.split()[-1]) for name in names if name.startswith("powersgd")]
    assert ranks[:4] == [1, 2, 4, 8]
    largest = jaxcomp.compression_stats(PARAMS, rank=ranks[-1])
    assert max(leaf.rank for leaf in largest.leaves) == ranks[-1]
    assert largest.bytes_after < 2 * count_values(PARAMS)
    vectors = advise({"b": jnp.zeros(1000)}, **SLOW)
    assert not [p for p in vectors.predictions if p.name.startswith("powersgd")]


def test_the_break_even_is_where_the_advice_turns():
    limit = by_name(advise(PARAMS, **SLOW))["powersgd rank 4"].break_even
    for factor, wins in ((0.9, True), (1.1, False)):
        again = by_name(advise(PARAMS, **{**SLOW, "bandwidth": limit * factor}))
        assert (again["powersgd rank 4"].speedup > 1) is wins


def test_a_cpu_sends_float16_where_a_gpu_sends_bfloat16():
    assert "all-reduce float16" in by_name(advise(PARAMS, device="cpu", **SLOW))


def test_a_measured_link_is_used_when_none_is_given():
    calibration = dataclasses.replace(
        ASSUMED["cpu"], devices=3, allreduce=Software(8e-3, 1e7), device="measured"
    )
    advice = advise(PARAMS, workers=5, step_time=0.02, calibration=calibration)
    assert "5 workers, the measured link, " in str(advice)
    exact = by_name(advice)["all-reduce float32"]
    # 8 ms were those of the four hops of three devices; five workers have eight hops.
    expected = 16e-3 + 2 * 4 / 5 * exact.bytes_per_step / 1e7
    assert exact.communication == pytest.approx(expected)
    # With a link, the slower of it and what was measured counts, and its latency.
    for bandwidth, counts in ((1e6, 1e6), (1e8, 1e7)):
        again = advise(
            PARAMS, workers=5, step_time=0.02, calibration=calibration, bandwidth=bandwidth
        )
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
        ({"ranks": [0]}, "`ranks` must be a positive integer"),
        (
            {"comm_dtype": "int4"},
            "`comm_dtype` must be one of float32, bfloat16, float16, int8, int6",
        ),
        ({"sync_every": 0}, "`sync_every` must be"),
        ({"buckets": [0]}, "`buckets` must be a positive integer"),
        ({"gpu_kernels": 1}, "`gpu_kernels` must be"),
        ({"device": "abacus"}, "`device` must be one of gpu, cpu"),
        ({"min_compression_rate": -1}, "`min_compression_rate` must be"),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        advise(PARAMS, **{**SLOW, **changed})


@pytest.mark.parametrize("count", [10_000, 123_456, 10_000_000, 124_000_000, 1_500_000_000, 10**12])
def test_assumed_shapes_have_about_as_many_parameters(count):
    params, sentence = assumed_params(count)
    assert count_values(params) == pytest.approx(count, rel=0.1)
    assert f"{count_values(params):,} parameters" in sentence


def test_gpt2_small_is_recognised():
    params, _ = assumed_params(124_000_000)
    assert params["embedding"].shape == (50_257, 768)
    assert len([name for name in params if name.startswith("layer")]) == 12


def test_json_shapes(shapes):
    assert read_params(shapes) == PARAMS


def test_headers_of_safetensors_and_npz(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "layer.kernel": {"dtype": "BF16", "shape": [64, 256], "data_offsets": [0, 32768]},
        "layer.embedding": {"dtype": "F32", "shape": [10, 4], "data_offsets": [32768, 32928]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)  # no data: only the header is read
    assert read_params(path) == {
        "layer": {
            "kernel": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
            "embedding": jax.ShapeDtypeStruct((10, 4), jnp.float32),
        }
    }
    path = tmp_path / "model.npz"
    half = np.zeros((2, 2), jnp.bfloat16)
    np.savez(path, **{"layer/kernel": np.zeros((3, 4), np.float32), "half": half})
    assert read_params(path) == {
        "layer": {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32)},
        "half": jax.ShapeDtypeStruct((2, 2), jnp.bfloat16),
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"[1, 2]", "holds no names"),
        ("x.json", b"{", "is no .json file"),
        ("x.json", b"\xff\xfe\xff", "is no .json file"),
        ("x.json", b"{}", "holds no parameters"),
        ("x.json", b'{"a": [1, "2"]}', "the shape of a must be a list of sizes"),
        ("x.json", b'{"a": {"b": [1, -2]}}', "the shape of a/b must be"),
        ("x.json", b'{"a": {"shape": [1], "dtype": "float7"}}', "unknown dtype 'float7'"),
        ("x.json", b'{"a": {"shape": [1], "dtype": 7}}', "unknown dtype 7"),
        ("x.json", b'{"a": [1], "a/b": [1]}', "a/b lies below a"),
        ("x.json", b'{"a/b": [1], "a": [1]}', "a is there twice"),
        ("x.npz", b"no archive", "is no .npz file"),
        ("x.safetensors", b"short", "is no .safetensors file"),
        ("x.safetensors", struct.pack("<Q", 1 << 60), "its header has"),
        ("x.pt", b"", "is none of .json, .npz and .safetensors"),
    ],
)
def test_files_that_hold_something_else(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["stats", "--params", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not printed.out


def test_stats_are_compression_stats(shapes, capsys):
    assert main(["stats", "--params", str(shapes), "--rank", "4"]) == 0
    assert capsys.readouterr().out == f"{jaxcomp.compression_stats(PARAMS, rank=4)}\n"
    command = f"stats --params {shapes} --rank 2 --comm-dtype bfloat16 --alternating"
    assert main([*shlex.split(command), "--json"]) == 0
    stats = jaxcomp.compression_stats(PARAMS, rank=2, comm_dtype="bfloat16", alternating=True)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dataclasses.asdict(stats)))


def test_int8_on_the_command_line(shapes, capsys):
    command = ["stats", f"--params={shapes}", "--rank=4", "--comm-dtype=int8"]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(
        "error: --replicas is missing: with integers on the wire"
    )
    assert main([*command, "--replicas=8"]) == 0
    stats = jaxcomp.compression_stats(PARAMS, rank=4, comm_dtype="int8", replicas=8)
    assert capsys.readouterr().out == f"{stats}\n"
    options = [f"--{k.replace('_', '-')}={v}" for k, v in SLOW.items()]
    assert main(["advise", f"--params={shapes}", *options, "--comm-dtype=int8"]) == 0
    assert capsys.readouterr().out == f"{advise(PARAMS, comm_dtype=jnp.int8, **SLOW)}\n"
    assert main(["advise", f"--params={shapes}", *options, "--gpu-kernels", "--buckets=3"]) == 0
    expected = advise(PARAMS, gpu_kernels=True, buckets=(3,), **SLOW)
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_command_line_prints_the_advice(shapes, capsys):
    command = f"advise --params {shapes} --workers 8 --bandwidth 100Mbit --latency 50us"
    assert main([*shlex.split(command), "--step-time", "20ms"]) == 0
    advice = advise(PARAMS, **SLOW)
    assert capsys.readouterr().out == f"{advice}\n"
    assert main([*shlex.split(command), "--step-time", "20ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compress"] is True
    assert found["recommended"] == advice.recommended.name
    assert found["predictions"][0]["step_time"] == advice.predictions[0].step_time


def test_a_calibration_is_read_back(shapes, tmp_path, capsys):
    for calibration in ASSUMED.values():
        assert Calibration.from_json(calibration.to_json()) == calibration
    older = {k: v for k, v in json.loads(ASSUMED["cpu"].to_json()).items() if k != "launch"}
    assert Calibration.from_json(json.dumps(older)) == ASSUMED["cpu"]
    path = tmp_path / "here.json"
    path.write_text(ASSUMED["cpu"].to_json())
    options = [f"--{k.replace('_', '-')}={v}" for k, v in SLOW.items()]
    given = ["advise", f"--params={shapes}", *options, f"--calibration={path}"]
    assert main([*given, "--device-bandwidth=40GB/s"]) == 0
    memory = dataclasses.replace(ASSUMED["cpu"], memory_bandwidth=4e10)
    rank_4 = by_name(advise(PARAMS, calibration=memory, **SLOW))["powersgd rank 4"]
    printed = capsys.readouterr().out
    assert "memory at 40 GB/s as given" in printed
    assert f"{rank_4.step_time * 1e3:.1f} ms" in printed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        ASSUMED["gpu"].to_json().replace("1.25", "-1.25"),
        ASSUMED["gpu"].to_json().replace("1.25", '"many"'),
        ASSUMED["gpu"].to_json().replace("int8", "x"),
    ],
)
def test_a_file_that_is_no_calibration(text, tmp_path, capsys):
    path = tmp_path / "here.json"
    path.write_text(text)
    options = [f"--{k.replace('_', '-')}={v}" for k, v in SLOW.items()]
    assert main(["advise", "--params=1M", *options, f"--calibration={path}"]) == 2
    assert capsys.readouterr().err.startswith("error: This is no calibration: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("advise --params 1M --workers 8 --step-time 1ms --bandwidth x", "--bandwidth is no"),
        ("advise --params 1M --workers 8 --step-time 1ms", "--bandwidth is missing"),
        ("advise --params 1M --workers 8 --bandwidth 1Gbit", "required: --step-time"),
        ("advise --params 1M --workers no --bandwidth 1Gbit --step-time 1s", "invalid int"),
        ("advise --params 5 --workers 8 --bandwidth 1Gbit --step-time 1s", "too few to guess"),
        ("advise --params 1e300 --workers 8 --bandwidth 1Gbit --step-time 1s", "1e+300 param"),
        (
            "advise --params no.json --workers 8 --bandwidth 1Gbit --step-time 1s",
            "no.json: No such",
        ),
        ("advise --params 1M --workers 8 --bandwidth 1Gbit --step-time 1s --ranks 1,b", "no list"),
        ("stats --params 1M --rank 0", "--rank must be a positive integer"),
        ("stats --params 1M --comm-dtype int3", "--comm-dtype"),
        ("", "required: COMMAND"),
        ("fly", "invalid choice"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, message, capsys):
    try:
        code = main(shlex.split(arguments))
    except SystemExit as stop:  # argparse's own way
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize("command", [[], ["advise"], ["recommend"], ["stats"], ["measure"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert "python -m jaxcomp" in capsys.readouterr().out


def test_as_a_user_runs_it():
    def run(*arguments):
        command = [sys.executable, "-m", "jaxcomp", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = run("stats", "--params", "100k", "--rank", "2")
    assert done.returncode == 0
    assert "total" in done.stdout
    wrong = run("advise", "--params", "1M", "--workers", "2", "--step-time", "soon")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: --step-time is no time")


def test_the_examples_in_the_documentation_are_what_it_prints(capsys):
    page = DOCS / "choosing.md"
    blocks = re.findall(r"```console\n\$ python -m jaxcomp (.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    assert "Do not compress." in page.read_text()
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
        yield measure(PARAMS, ranks=[2, 500], devices=jax.devices()[:2])


def test_measured_constants_are_positive_and_finite(calibration):
    assert calibration.platform == jax.devices()[0].platform
    assert calibration.devices == 2
    assert "2 x" in calibration.device
    figures = [calibration.memory_bandwidth, calibration.flops, calibration.int8]
    figures += [*calibration.allreduce, *calibration.allreduce_16, *calibration.exchange]
    figures += [factor for _, factor in (*calibration.powersgd, *calibration.one_sided)]
    assert all(0 < figure < math.inf for figure in figures)
    for table in (calibration.powersgd, calibration.one_sided):
        assert [rank for rank, _ in table] == [2]  # 500 compresses nothing
    assert Calibration.from_json(calibration.to_json()) == calibration


def test_advice_from_measured_constants_says_so(calibration):
    advice = advise(PARAMS, workers=2, step_time="20ms", calibration=calibration)
    assert "measured: 2 x" in str(advice)
    assert by_name(advice)["powersgd rank 2"].compression > 0


def test_measuring_one_device_assumes_the_collective():
    calibration = measure({"w": jnp.zeros((64, 32))}, ranks=[1], devices=jax.devices()[:1])
    assert calibration.devices == 1
    assumed = ASSUMED["cpu" if calibration.platform == "cpu" else "gpu"]
    assert calibration.allreduce == assumed.allreduce
    with pytest.raises(ValueError, match="no all-reduce was measured"):
        advise(PARAMS, workers=2, step_time="20ms", calibration=calibration)


def test_nothing_to_measure():
    with pytest.raises(ValueError, match="nothing that is floating"):
        measure({"n": jnp.zeros(3, jnp.int32)})
    with pytest.raises(ValueError, match="`ranks` must be"):
        measure(PARAMS, ranks=[0])
