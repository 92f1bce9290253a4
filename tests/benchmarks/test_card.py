"""benchmarks.card: what counts as right, how kernels are sorted, and what a part leaves."""

import jax
import pytest

from benchmarks.card import __main__ as card
from benchmarks.card import forms, updates
from benchmarks.common.worker import run_worker
from tests.helpers.tables import rows


def test_a_form_is_compared_with_every_kind_of_gradient():
    """On two devices of one kind nothing differs."""
    with jax.numpy_dtype_promotion("standard"):
        row = forms.compare("rank 4", forms.forms()["rank 4"], small=True)
    assert row["right"], row
    assert set(row["apart"]) == set(forms.KINDS)
    assert max(row["apart"].values()) < 1e-6


KERNELS = rows("""
sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_ffma | products on plain cores
gemm_fusion_dot_general_8 | products by Triton
void potrf_cta_lower_batch<float, float, 16> | Cholesky and solves
input_reduce_fusion_10 | reductions
memcpy128 | copies
loop_add_select_fusion_48 | elementwise
Memset 3 | other
""")


@pytest.mark.parametrize(("name", "kind"), KERNELS)
def test_kernels_are_sorted_by_their_names(name, kind):
    assert updates.class_of(name) == kind


def test_a_part_leaves_the_rows_that_it_printed_before_its_time_was_over(tmp_path):
    program = "import time; print('{\"kind\": 1}', flush=True); print('x'); time.sleep(60)"
    (tmp_path / "slow.py").write_text(program)
    result = run_worker(["slow"], {}, {"PYTHONPATH": str(tmp_path)}, 5.0)
    assert result["rows"] == [{"kind": 1}]
    assert result["code"] == -9


def test_the_summary_names_what_is_wrong():
    measured = [
        {"kind": "copies", "seven_words_ms": 1.0},
        {"kind": "update", "rank": 4, "options": {}, "queued_ms": 2.0, "waited_ms": 3.0,
         "launches": 400, "temporary": 0.3, "compile_s": 9},
        {"kind": "update", "rank": 4, "seconds": [0.017, 0.018, 0.016]},
        {"kind": "form", "form": "rank 4", "right": False, "apart": {"nan": 1.0}},
    ]  # fmt: skip
    text = card.summary({"updates": {"rows": measured, "code": -9, "seconds": 200}})
    assert "| 4 | 2.00 | 3.00 | 17.0 | 2.0 | 400 | 0.30 | 9 |" in text
    assert "0 of 1" in text
    assert '"form": "rank 4"' in text
    assert "updates ended with -9 after 200 s." in text
