"""Finished runs: a file of JSON lines to which each is appended, and where they were made.

What a line has in common with the line before it, setting and machine, is not written again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COMMON = ("config", "about")


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The finished runs in a file of JSON lines; none if there is no file.

    A line that was cut off by a kill is left out.
    """
    if not path.exists():
        return []
    runs = list[dict[str, Any]]()
    common: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            run = common | json.loads(line)
            common = {name: run[name] for name in _COMMON if name in run}
            runs.append(run)
    return runs


def append_run(path: Path, run: dict[str, Any]) -> None:
    """Adds a finished run, on a line of its own also after one that was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    last = (read_runs(path) or [{}])[-1]
    run = {k: v for k, v in run.items() if k not in _COMMON or last.get(k) != v}
    with path.open("a+b") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 1))
        cut_off = end and file.read(1) != b"\n"
        file.write(
            (b"\n" if cut_off else b"") + json.dumps(run, separators=(",", ":")).encode() + b"\n"
        )


def provenance(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where, when and with what runs were made, as `machine.describe` told beside each."""
    abouts = [run["about"] for run in runs]
    dates = sorted(about["date"][:10] for about in abouts)
    found: dict[str, dict[str, None]] = {}
    for about in abouts:
        machine = about["machine"]
        for name, said in {"cpu": machine["cpu"], **machine["versions"]}.items():
            found.setdefault(name, {})[said] = None
    several = {name: " or ".join(said) for name, said in found.items()}
    return {
        "runs": len(abouts),
        "dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))),
        "cpu": several.pop("cpu"),
        "versions": several,
    }


def made_on(about: dict[str, Any]) -> str:
    """What `provenance` found, for the text below a table."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    cpu = re.sub(r"cpu (family \d+, model \d+), stepping \d+", r"\1", about["cpu"])
    return f"{about['runs']} runs, {about['dates']}, {cpu}; {versions}."
