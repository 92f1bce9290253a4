"""The table of a run of `benchmarks.faults`, and its place in docs/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.common.machine import sentence
from benchmarks.common.paths import ROOT
from benchmarks.common.tables import in_page, markdown

PAGE = ROOT / "docs" / "faults.md"
NAMES = {
    "kills": "SIGKILL to one process",
    "terms": "SIGTERM to one process",
    "ints": "SIGINT to one process",
    "disks": "full disk",
    "hangs": "one process hangs (SIGSTOP)",
    "flips": "restart after a flipped bit",
}
_HEADER = ["fault", "times", "while starting / saving", "saved steps lost",
           "slowest end, s", "exit codes", "said or ended wrongly",
           "losses compared", "of these different",
           "last held-out loss, undisturbed", "and here"]  # fmt: skip


def paged(page: str, results: Mapping[str, Any]) -> str:
    """A page with the table of the results in it."""
    text = f"{table(results)}\n" if results else ""
    return in_page(page, "python -m benchmarks.faults --report", text)


def table(results: Mapping[str, Any]) -> str:
    """Markdown, with where and how each kind was measured."""
    kinds = [kind for kind in NAMES if kind in results]
    lines = [markdown(_HEADER, [_row(NAMES[kind], results[kind]) for kind in kinds]), ""]
    if "flips" in results:
        lines += ["What became of each flipped bit, by the file that it was in:", ""]
        lines += [flips_table(results["flips"]["flips"]), ""]
    made: dict[str, list[str]] = {}
    for kind in kinds:
        run = results[kind]
        where = f"{run['processes']} processes, {run['steps']} steps. {sentence(run['machine'])}"
        made.setdefault(f"`{run['command']}`, DATE, {where}", []).append(run["date"])
    lines += [where.replace("DATE", min(dates)) + "\n" for where, dates in made.items()]
    return "\n".join(lines)


def _row(name: str, run: Mapping[str, Any]) -> list[str]:
    faults = run["faults"]
    moments = Counter(fault["moment"] for fault in faults)
    codes = Counter(code for fault in faults for code in fault["codes"])
    return [
        name,
        str(len(faults)),
        f"{moments['starting']} / {moments['saving']}",
        str(sum(lost(fault) for fault in faults)),
        f"{max(seconds):.1f}"
        if (seconds := [f["seconds"] for f in faults if f["seconds"]])
        else "",
        ", ".join(f"{code}: {count}" for code, count in sorted(codes.items())),
        str(sum(bool(fault["wrong"]) for fault in faults)),
        str(run["compared"]),
        str(run["different"]),
        *map(repr, run["held_out"]),
    ]


def lost(fault: Mapping[str, Any]) -> bool:
    """Whether a checkpoint that was complete is no longer there, or was not used."""
    resumed = fault["resumed"]
    return fault["left"] < fault["saved"] or (resumed is not None and resumed < fault["left"])


def flips_table(flips: list[Mapping[str, Any]]) -> str:
    """A row for each kind of file, a column for each outcome."""
    outcomes = ["passed over", "passed over, file unnamed", "harmless", "silent", "lost"]
    counts = Counter((flip["file"], flip["outcome"]) for flip in flips)
    files = sorted({flip["file"] for flip in flips})
    rows = [
        [f"`{f}`" if " " not in f else f, *(str(counts[f, o]) for o in outcomes)] for f in files
    ]
    total = [str(sum(counts[f, o] for f in files)) for o in outcomes]
    return markdown(["flipped in", *outcomes], [*rows, ["all", *total]])


def good(run: Mapping[str, Any]) -> bool:
    """Whether nothing was lost, everybody ended as documented, and all losses are equal."""
    silent = {flip["outcome"] for flip in run.get("flips", ())} & {"silent", "lost"}
    wrong = any(lost(fault) or fault["wrong"] for fault in run["faults"])
    ended = run["compared"] and run["held_out"][1] is not None
    return bool(ended) and not (silent or wrong or run["different"] or run.get("stderr"))
