"""The counts of `benchmarks.gpu_program`, by hand for a stored program; needs no GPU compiler.

The program, compiled for eight H200s, from 64 x 64 x (donated) and y and 8 x 8 matrices q::

    b = fori_loop(0, 5, lambda i, z: dynamic_update_slice(z, 2 * y[:1] + i, (i, 0)), x)
    z = cond(c > 0, lambda: 2 * b, lambda: b @ y)
    psum(z), cholesky(q @ q.mT), y[3:5] + 1, concatenate([y[:2], y[5:9]])
"""

import pathlib

from jaxlib import _hlo

from benchmarks.gpu_program import __main__ as gpu_program
from jaxcomp._wire.program import read_message

PROGRAM = pathlib.Path(__file__).parent / "data" / "gpu_program.hlo"


def test_kernels_are_those_of_the_entry_its_loops_and_its_largest_branch():
    # Nine in the entry computation, three in each of five turns, one in either branch.
    module = _hlo.hlo_module_from_text(PROGRAM.read_text())
    program = read_message(module.as_serialized_hlo_module_proto())
    assert gpu_program.count(program) == (9 + 5 * 3 + 1, 1)
