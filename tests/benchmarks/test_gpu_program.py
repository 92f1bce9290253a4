"""What `benchmarks.gpu_program` reads, by hand for a stored program; needs no GPU compiler.

The program, compiled for eight H200s, from 64 x 64 x (donated) and y and 8 x 8 matrices q::

    b = fori_loop(0, 5, lambda i, z: dynamic_update_slice(z, 2 * y[:1] + i, (i, 0)), x)
    z = cond(c > 0, lambda: 2 * b, lambda: b @ y)
    psum(z), cholesky(q @ q.mT), y[3:5] + 1, concatenate([y[:2], y[5:9]])
"""

import pathlib
from collections import Counter

import pytest

from benchmarks.gpu_program import __main__ as gpu_program
from benchmarks.gpu_program import model
from benchmarks.gpu_program.kernels import Kernel, kernels
from tests.helpers.tables import rows

PROGRAM = (pathlib.Path(__file__).parent / "data" / "gpu_program.hlo").read_text()


def test_kernels_are_those_of_the_entry_its_loops_and_its_branches():
    """Nine in the entry computation, three in each of five turns, one in either branch."""
    listed = kernels(PROGRAM)
    kinds = Counter(kernel.kind for kernel in listed)
    assert len(listed) == 9 + 5 * 3 + 2 + 1
    assert kinds["collective"] == 1
    assert kinds["cholesky"] == 1
    assert [kernel.in_branch for kernel in listed].count(True) == 1
    counted = gpu_program.counted(PROGRAM, 64 * 64)
    assert counted["launches"] == 9 + 5 * 3 + 1
    assert counted["collectives"] == 1


def test_bytes_and_operations_are_those_of_the_shapes():
    products = [kernel for kernel in kernels(PROGRAM) if kernel.kind == "product"]
    flops = sorted(kernel.plain_flops for kernel in products)
    assert flops[-1] == 2 * 64**3
    largest = max(products, key=lambda kernel: kernel.plain_flops)
    assert largest.bytes >= 3 * 64 * 64 * 4


# Kernels of one update: the kind, bytes, operations, strided bytes, the rank, and the microseconds
# that an H200 took.
TIMED = rows("""
loop_add_fusion | elementwise | 463_170_000 | 0 | 0 | 0 | 104.7
loop_select_fusion_54 | elementwise | 37_750_000 | 0 | 0 | 0 | 9.8
loop_select_fusion_237 | elementwise | 10_000 | 0 | 0 | 0 | 1.3
loop_add_select_fusion | elementwise | 618_390_000 | 0 | 154_389_504 | 0 | 189
loop_add_select_fusion | elementwise | 618_390_000 | 0 | 308_779_008 | 0 | 382
gemm_fusion_dot_67 | product | 11_400_000 | 151_000_000 | 0 | 0 | 8.4
gemm_fusion_dot_25 | product | 156_520_000 | 309_900_000 | 0 | 0 | 46.7
potrf | cholesky | 0 | 0 | 0 | 128 | 89
trsm | triangular solve | 0 | 0 | 0 | 32 | 12.4
""")


@pytest.mark.parametrize(("name", "kind", "size", "flops", "strided", "rank", "measured"), TIMED)
def test_the_time_of_a_kernel_is_near_what_a_card_took(
    name, kind, size, flops, strided, rank, measured
):
    kernel = Kernel(name, kind, int(size), int(flops), rank=int(rank), strided=int(strided))
    assert model.microseconds(kernel) == pytest.approx(float(measured), rel=0.2)
