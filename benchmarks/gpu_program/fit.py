"""How kernels and words of the counted programs grow with the parameters: for the adviser.

    python -m benchmarks.gpu_program.fit
    python -m benchmarks.gpu_program.fit --results benchmarks/results/gpu_program-h200.json

Fits non-negative factors, of the least relative errors, to the programs that
`python -m benchmarks.gpu_program` counted; writes them into the adviser, writes what it then says
into docs/choosing.md, and prints how far each program is from them. Needs no GPU and no compiler.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from benchmarks.common.arguments import command_line
from benchmarks.common.paths import RESULTS, ROOT
from benchmarks.common.printed import with_printed
from benchmarks.common.tables import markdown, write_page
from benchmarks.overhead.trees import TREES
from jaxcomp import extend

MODULE = ROOT / "jaxcomp" / "_adviser" / "programs.py"
PAGE = ROOT / "docs" / "choosing.md"
COMMAND = "python -m benchmarks.gpu_program.fit"
_PLACE = re.compile(rf"(?<=^# {re.escape(COMMAND)}\n).*?(?=^# end$)", re.DOTALL | re.MULTILINE)

# What the adviser has a use for, and words for a compressed value below which none of them goes.
FLOORS = {
    "powersgd": 7,
    "powersgd, int8": 7,
    "powersgd, gpu_kernels": 7,
    "powersgd, gpu_kernels, int8": 7,
    "powersgd, alternating": 6,
    "quantized_allreduce": 0,
}


def terms(tree: str, reducer: str, rank: int) -> extend.ProgramTerms:
    """Of one program."""
    leaves = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in TREES[tree]().items()}
    low = None if reducer == "quantized_allreduce" else rank
    plans = extend.plan_leaves(leaves, lambda path, leaf: low, min_compression_rate=2.0)
    return extend.program_terms(plans)


class Fitted(NamedTuple):
    """One form's factors, and each of its programs beside them."""

    kernels: list[float]
    words: list[float]
    rows: list[tuple[str, str, int, float, float, float, float]]


def fitted(cases: Sequence[Mapping[str, Any]], reducer: str) -> Fitted:
    """Factors for one form of the update.

    Args:
      cases: Of a run of `benchmarks.gpu_program`; those with an error are left out.
      reducer: One of `FLOORS`.

    Raises:
      ValueError: There are no cases of it.
    """
    own = [case for case in cases if case["reducer"] == reducer and "error" not in case]
    if not own:
        raise ValueError(f"no programs of {reducer}; run python -m benchmarks.gpu_program.")
    found = [terms(case["tree"], reducer, case["rank"]) for case in own]
    counted = np.array([case["kernels"] for case in own], float)
    moved = np.array([case["words"] * case["values"] for case in own], float)
    floor = np.array([x.floor(FLOORS[reducer]) for x in found])
    kernels = _factors([x.kernels for x in found], counted, counted)
    words = _factors([x.words for x in found], np.maximum(moved - floor, 0), moved)
    launched = np.array([x.kernels for x in found]) @ kernels
    passed = (floor + np.array([x.words for x in found]) @ words) / (moved / _words(own))
    rows = [
        (case["tree"], reducer, case["rank"], case["kernels"], k, case["words"], w)
        for case, k, w in zip(own, launched, passed, strict=True)
    ]
    return Fitted(kernels, words, rows)


def _words(cases: Sequence[Mapping[str, Any]]) -> Any:
    return np.array([case["words"] for case in cases])


def _factors(terms: Sequence[Sequence[float]], wanted: Any, scale: Any) -> list[float]:
    weighted = np.array(terms, float) / scale[:, None]
    # Columns of one length: those of words are millions of times as long as each other.
    length = np.linalg.norm(weighted, axis=0)
    length[length == 0] = 1
    solution, _ = nnls(weighted / length, wanted / scale)
    return [float(f"{x:.3g}") for x in solution / length]


def with_forms(module: str, cases: Sequence[Mapping[str, Any]]) -> str:
    """The adviser's module with the factors of these programs.

    Raises:
      ValueError: A form has no programs, or the module has no place for the factors.
    """
    if len(_PLACE.findall(module)) != 1:
        raise ValueError(f"{MODULE.name} has no single place for the factors.")
    entries = [_entry(reducer, fitted(cases, reducer)) for reducer in FLOORS]
    text = "FORMS: dict[str, Form] = {\n" + "".join(entries) + "}\n"
    return _PLACE.sub(lambda _: text, module)


def _entry(reducer: str, found: Fitted) -> str:
    lines = [f"{FLOORS[reducer]}", _tuple(found.kernels), _tuple(found.words)]
    return f'    "{reducer}": Form(\n' + "".join(f"        {x},\n" for x in lines) + "    ),\n"


def _tuple(numbers: Sequence[float]) -> str:
    return f"({', '.join(f'{x:g}' for x in numbers)})"


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command_line("benchmarks.gpu_program.fit", __doc__)
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "gpu_program-h200.json", metavar="FILE",
        help="what was counted (default: %(default)s)",
    )  # fmt: skip
    given = parser.parse_args(argv)
    try:
        cases = json.loads(given.results.read_text())["cases"]
    except OSError as error:
        print(f"gpu_program.fit: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    program = "gpu_program.fit"
    code = write_page(program, MODULE, lambda module: with_forms(module, cases)) or write_page(
        program, PAGE, with_printed
    )
    if code == 0:
        print(table(cases))
    return code


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: counted beside fitted."""
    rows = [row for reducer in FLOORS for row in fitted(cases, reducer).rows]
    cells = [
        (tree, reducer, str(rank), f"{k:.0f}", f"{fit_k:.0f}", f"{w:.2f}", f"{fit_w:.2f}")
        for tree, reducer, rank, k, fit_k, w, fit_w in rows
    ]
    header = ("tree", "reducer", "rank", "kernels", "fitted", "words per value", "fitted")
    return markdown(header, cells, left=2)


if __name__ == "__main__":
    sys.exit(main())
