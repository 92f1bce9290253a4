"""What documents show of the command line, printed anew."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

from benchmarks.common.paths import ROOT

_PRINTED = re.compile(r"(?<=```console\n)\$ (python -m jaxcomp .*?)(?=```)", re.DOTALL)


def with_printed(page: str) -> str:
    """The page with what its ``$ python -m jaxcomp`` commands print now."""

    def again(place: re.Match[str]) -> str:
        lines = place[1].splitlines()
        length = next(i for i, line in enumerate(lines) if not line.endswith("\\")) + 1
        _, *arguments = shlex.split(" ".join(line.rstrip("\\") for line in lines[:length]))
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return "\n".join(["$ " + lines[0], *lines[1:length], done.stdout])

    return _PRINTED.sub(again, page)
