"""Runs one process of `benchmarks.cluster` or `benchmarks.time_to_loss`, which answers requests.

    python -m benchmarks.cluster.process FRAMEWORK FOLDER INDEX PROCESSES ADDRESS

It reads requests from its standard input until the input ends. It answers each with a line of JSON:

- ``{"do": "start", "strategy": "powersgd-4", "seed": 0}``: makes new parameters and state. The
  answer is the bytes per step that jaxcomp predicts, or null.
- ``{"do": "train", "first": 0, "count": 24}``: takes steps with the batches from that number on.
  The answer is the seconds of each call, which is a step or a round of local SGD.
- ``{"do": "evaluate"}``: the loss; with local SGD at the end of a round.
- ``{"do": "bytes"}``: the bytes that the interface has sent and received so far.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.cluster.net import INTERFACE
from benchmarks.cluster.plan import parse_strategy

_COUNTERS = Path("/sys/class/net") / INTERFACE / "statistics"


def answer(trainer: Any, request: dict[str, Any]) -> Any:
    """Carries out a request with a trainer of either framework."""
    if request["do"] == "start":
        return trainer.start(parse_strategy(request["strategy"]), request["seed"])
    if request["do"] == "evaluate":
        return trainer.loss()
    if request["do"] == "bytes":
        return [int((_COUNTERS / f"{way}_bytes").read_text()) for way in ("tx", "rx")]
    first = request["first"]
    return trainer.train(range(first, first + request["count"]))


def main() -> None:
    """Joins the other processes and answers requests until the input ends."""
    framework, folder, index, processes, address = sys.argv[1:]
    # Whatever a library prints must not end up between the answers.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        # Only one of the frameworks is ever loaded: their thread pools would share the core.
        engine = importlib.import_module(f"benchmarks.cluster.{framework}_trainer")
        trainer = engine.Trainer(Path(folder), int(index), int(processes), address)
        print(json.dumps({"answer": trainer.parameters}), file=replies)
        for line in sys.stdin:
            print(json.dumps({"answer": answer(trainer, json.loads(line))}), file=replies)
    except Exception as error:
        traceback.print_exc()
        first = str(error).partition("\n")[0]
        print(json.dumps({"error": f"{type(error).__name__}: {first}"}), file=replies)
    # The other processes may be gone: leave without the libraries' farewells, which would wait.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
