"""The counts of `benchmarks.gpu_program`, by hand for a stored program; no GPU compiler is needed.

The program, compiled for eight H200s, from 64 x 64 x (donated) and y and 8 x 8 matrices q::

    b = fori_loop(0, 5, lambda i, z: dynamic_update_slice(z, 2 * y[:1] + i, (i, 0)), x)
    z = cond(c > 0, lambda: 2 * b, lambda: b @ y)
    psum(z), cholesky(q @ q.mT), y[3:5] + 1, concatenate([y[:2], y[5:9]])
"""

import json
import pathlib
import sys

import pytest

from benchmarks.common.paths import RESULTS
from benchmarks.gpu_program import __main__ as gpu_program
from benchmarks.gpu_program import scanned, schedule
from benchmarks.gpu_program.count import beside_collectives, count, kernel_bytes
from benchmarks.gpu_program.hlo import arrays, parse
from benchmarks.gpu_program.profile import profile
from benchmarks.gpu_program.report import paged, results, table
from benchmarks.overhead import __main__ as overhead

MODULE = parse((pathlib.Path(__file__).parent / "data" / "gpu_program.hlo").read_text())
ROW, MATRIX, SMALL = 4 * 64, 4 * 64 * 64, 4 * 3 * 8 * 8

# Bytes read and written by each kernel of the entry computation.
BY_HAND = {
    "copy.25": 4 + 4,
    "loop_compare_fusion.1": 4 + 1,
    "gemm_fusion_dot_general.6": SMALL + SMALL,  # one operand twice is read once
    "loop_multiply_fusion.1": SMALL + SMALL,
    "cholesky.32": SMALL + SMALL + 12,  # and an int32 for each matrix that says how it went
    "loop_add_fusion.1": 2 * ROW + 2 * ROW,  # two of y's rows
    "input_concatenate_fusion": 6 * ROW + 6 * ROW,
    "loop_transpose_fusion": SMALL + 12 + SMALL,
    "copy.23": MATRIX + MATRIX,
}
# A row of y and a counter read, a row written in place; the counter; its comparison.
LOOP = 5 * ((ROW + 4 + ROW) + (4 + 4) + (4 + 1))
CONDITIONAL = 3 * MATRIX  # the product, which moves more than the other branch


@pytest.mark.parametrize("name", BY_HAND)
def test_what_a_kernel_moves(name):
    kernels = {x.name: x for x in MODULE.entry.instructions}
    sizes = {x.name: x.bytes for x in MODULE.entry.instructions}
    assert kernel_bytes(MODULE, kernels[name], sizes) == BY_HAND[name]


def test_a_program_is_its_kernels_loops_and_dearest_branches():
    counts = count(MODULE)
    assert counts.bytes_moved == sum(BY_HAND.values()) + LOOP + CONDITIONAL
    assert counts.kernels == len(BY_HAND) + 5 * 3 + 1
    assert counts.library_calls == {"cusolver_potrf_ffi": 1}
    assert counts.collectives == [{"kind": "all-reduce", "dtype": "f32", "bytes": MATRIX}]


def test_kernels_beside_a_collective():
    # The product, its double, the factorisation, two sums, and what reads the factors.
    assert beside_collectives(MODULE) == [("all-reduce", 6)]


def test_a_pallas_kernel_that_leaves_operands_unread_says_so_in_its_name():
    text = """ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  ROOT %call = f32[8]{0} custom-call(%a, %b), custom_call_target="__gpu$xla.gpu.triton", NAME
}
"""
    for name, moved in [('backend_config={name = "x_unread_1_2"}', 64), ("x", 96)]:
        counts = count(parse(text.replace("NAME", name)))
        assert (counts.kernels, counts.bytes_moved, dict(counts.library_calls)) == (1, moved, {})


def test_shapes_have_dtypes_and_bytes():
    found = list(arrays("(bf16[2,3]{1,0}, pred[], s8[5], f8e4m3fn[4])"))
    assert found == [("bf16", 6, 12), ("pred", 1, 1), ("s8", 5, 5), ("f8e4m3fn", 4, 4)]


def test_what_runs_beside_the_all_reduces_of_a_backward_scan():
    text = """%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %a = f32[8]{0} fusion(%x), calls=%f, metadata={op_name="jit(step)/layer_backward/dot"}
  %s = f32[8]{0} all-reduce-start(%x), to_apply=%f
  %b = f32[8]{0} fusion(%a), calls=%f, metadata={op_name="jit(step)/layer_backward/add"}
  %c = f32[8]{0} fusion(%a), calls=%f, metadata={op_name="jit(step)/layer_reduce/dot"}
  %d = f32[8]{0} all-reduce-done(%s)
  ROOT %t = (f32[8]{0}) tuple(%d)
}

ENTRY %main (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0}) parameter(0)
  ROOT %loop = (f32[8]{0}) while(%p), condition=%f, body=%body
}
"""
    assert scanned.read(parse(text)) == [schedule.Schedule(2, [schedule.Transfer(32, 1, 2)])]
    with pytest.raises(ValueError, match="No loop"):
        scanned.read(MODULE)


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no HLO module"):
        parse("HloModule empty")


def test_a_run_that_cannot_compile_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(gpu_program, "compiler_found", lambda: False)
    assert gpu_program.main([]) == 1
    assert 'pip install "jax[cuda12]"' in capsys.readouterr().err


def test_a_table_of_programs_and_failures(monkeypatch, tmp_path, capsys):
    result = {
        "kernels": 120.0,
        "words": 7.27,
        "floor": 6.99,
        "temporary": 0.02,
        "library_calls": {},
        "collectives": 2 * [{"kind": "all-reduce", "dtype": "f32", "bytes": 1000}],
        "compile_seconds": 40.0,
        "processor_seconds": 28.0,
    }
    found = iter([result, {"error": "XlaRuntimeError: 'scf.if'"}])
    monkeypatch.setattr(gpu_program, "compiler_found", lambda: True)
    monkeypatch.setattr(gpu_program, "compiled", lambda job, limit: next(found))
    monkeypatch.setattr(gpu_program, "gpu_found", lambda: False)
    arguments = ["--trees", "mlp", "--reducers", "powersgd;allreduce", "--ranks", "4"]
    assert gpu_program.main([*arguments, "--out", str(tmp_path)]) == 1
    run = json.loads((tmp_path / "gpu_program-h200.json").read_text())
    lines = table(run).splitlines()
    row = "| mlp | powersgd | 4 | 120 | 7.27 | 6.99 | 0.02 | none | 2 all-reduce f32, 2,000 |"
    assert lines[-2] == f"{row} 40 (28) |"
    assert "scf.if" in lines[-1]
    assert (tmp_path / "gpu_program-h200.md").read_text() in capsys.readouterr().out


def test_what_is_compiled_again_takes_the_place_of_what_was(monkeypatch, tmp_path):
    found = iter([{"error": f"fault {number}"} for number in range(5)])
    monkeypatch.setattr(gpu_program, "compiler_found", lambda: True)
    monkeypatch.setattr(gpu_program, "compiled", lambda job, limit: next(found))
    monkeypatch.setattr(gpu_program, "gpu_found", lambda: False)

    def run(*arguments):
        gpu_program.main(["--trees", "mlp", "--out", str(tmp_path), *arguments])
        made = json.loads((tmp_path / "gpu_program-h200.json").read_text())
        return made, [(case["reducer"], case["rank"], case["error"]) for case in made["cases"]]

    _, before = run("--reducers", "powersgd;allreduce", "--ranks", "4")
    assert before == [("powersgd", 4, "fault 0"), ("allreduce", 4, "fault 1")]
    made, after = run("--reducers", "powersgd", "--ranks", "1,4", "--keep")
    kept = [("powersgd", 1, "fault 2"), ("powersgd", 4, "fault 3")]
    assert after == [*kept, ("allreduce", 4, "fault 1")]
    ((earlier, _),) = [made["earlier"][0].values()]
    assert f"did not compile again are of `{earlier}`" in table(made)
    # An all-reduce has no rank, whatever was asked for.
    assert run("--reducers", "allreduce", "--ranks", "1", "--keep")[1] == [
        *kept,
        ("allreduce", 1, "fault 4"),
    ]


def test_the_page_shows_the_tables_of_the_results():
    page = gpu_program.PAGE.read_text()
    runs = results(RESULTS)
    assert next(iter(runs)) == "gpu_program-h200"
    assert paged(page, runs) == page
    with pytest.raises(ValueError, match="no results to report"):
        paged(page, {})


def test_what_a_gpu_is_timed_with_stands_in_the_same_table(monkeypatch, tmp_path):
    """A measured case of `benchmarks.overhead`, once with torch and once without."""
    asked = []

    def cases_of(given, tree):
        asked.append((given.device, given.gpu_kernels, given.ranks, given.frameworks))
        if "torch" in given.frameworks and given.gpu_kernels:
            raise overhead.WorkerFailed("no torch.")
        both = {"jax": {"median": 1e-3}, "torch": {"median": 4e-3}}
        return [{"rank": 4, "floor": 5e-4} | {name: both[name] for name in given.frameworks}], {
            "device": "NVIDIA H200"
        }

    monkeypatch.setattr(overhead, "cases_of", cases_of)
    monkeypatch.setattr(gpu_program, "compiler_found", lambda: True)
    monkeypatch.setattr(gpu_program, "gpu_found", lambda: True)
    monkeypatch.setattr(gpu_program, "compiled", lambda job, limit: {"error": "none"})
    names = "powersgd;powersgd, gpu_kernels;allreduce"
    arguments = ["--trees", "mlp", "--reducers", names, "--ranks", "4", "--out", str(tmp_path)]
    assert gpu_program.main(arguments) == 1
    text = (tmp_path / "gpu_program-h200.md").read_text()
    assert "Timed on NVIDIA H200" in text
    rows = text.splitlines()[-3:]
    assert [[x.strip() for x in row.split("|")[-4:-1]] for row in rows] == [
        ["1.00", "4.00", "0.50"],
        ["1.00", "", "0.50"],
        ["", "", ""],
    ]
    assert asked == [
        ("gpu", False, (4,), ("jax", "torch")),
        ("gpu", True, (4,), ("jax", "torch")),
        ("gpu", True, (4,), ("jax",)),
    ]


def test_a_child_that_fails_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert gpu_program.compiled({}, 10) == {"error": "ended with 1"}


SCHEDULED = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} multiply(%p), metadata={op_name="jit(f)/jvp()/mul"}
  %b = f32[8]{0} multiply(%a), metadata={op_name="jit(f)/transpose(jvp())/mul"}
  %start = f32[8]{0} all-reduce-start(%b), to_apply=%add
  %c = f32[8]{0} multiply(%b), metadata={op_name="jit(f)/transpose(jvp())/add"}
  %view = f32[8]{0} bitcast(%c), metadata={op_name="jit(f)/transpose(jvp())/reshape"}
  %d = f32[8]{0} multiply(%view), metadata={op_name="jit(f)/transpose(jvp())/exp"}
  %done = f32[8]{0} all-reduce-done(%start)
  ROOT %e = f32[8]{0} multiply(%done, %d), metadata={op_name="jit(f)/add"}
}
"""


def test_a_schedule_says_what_an_all_reduce_hides_behind():
    found = schedule.read(parse(SCHEDULED))
    assert found.backward == 3
    assert found.transfers == [schedule.Transfer(bytes=32, begins_after=1, ends_after=3)]
    assert "33%  100%  2 kernels" in str(found)


def test_a_profile_has_what_a_link_takes_and_what_memory_takes():
    lines = profile(parse(SCHEDULED), "a100", 4, bits_per_second=1e6, latency=1e-3).splitlines()
    # 2 (W - 1) steps of 1 ms and a quarter of 32 bytes, at a megabit a second.
    assert 'costs { name: "start" cost_us: 6384.00 }' in lines
    assert 'costs { name: "a" cost_us: 4.00 }' in lines
    assert len(lines) == 6  # neither the parameter nor the view nor the done


@pytest.mark.parametrize("wrong", ["unlimited", "fast"])
def test_a_link_that_is_no_rate_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        schedule.main(["--link", wrong])
    assert "`--link`" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--buckets", "0"], ["--blocks", "0"], ["--latency", "nan"]])
def test_a_schedule_of_nothing_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        schedule.main(wrong)
    assert f"`{wrong[0]}` must be" in capsys.readouterr().err
