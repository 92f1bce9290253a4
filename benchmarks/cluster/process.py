"""One process of a run of `benchmarks.cluster`: answers requests, a JSON line each.

    python -m benchmarks.cluster.process INDEX FRAMEWORK MODEL PROCESSES ADDRESS [tiny]

It reads requests from its standard input until that ends:

- ``{"do": "prepare", "strategy": "powersgd-4"}``: new parameters and state, some steps to warm up.
  The answer has the bytes that jaxcomp says it sends (`payload`, None where it says nothing).
- ``{"do": "run", "samples": 10}``: the answer has the seconds of each, and the last loss.
- ``{"do": "bytes"}``: what the interface has sent and received so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.cluster.net import INTERFACE
from benchmarks.cluster.plan import Strategy, parse_strategy

_COUNTERS = Path("/sys/class/net") / INTERFACE / "statistics"


class Joined(Protocol):
    """A process that has found the others."""

    parameters: int  # values in the model


Trained = TypeVar("Trained", bound=Joined)


class Trainer(Joined, Protocol):
    """What a framework does here."""

    def prepare(self, strategy: Strategy) -> float | None:
        """Starts anew with a strategy and warms up; returns its payload in bytes per step."""
        ...

    def sample(self) -> None:
        """One step, or one round of local SGD, to its very end."""
        ...

    def loss(self) -> float:
        """Of this process's last batch."""
        ...


def connect(
    framework: str, model: str, index: int, processes: int, address: str, tiny: bool
) -> Trainer:
    """Joins the other processes."""
    # Only one of the frameworks is ever loaded: their thread pools would share the core.
    if framework == "jax":
        from benchmarks.cluster.jax_trainer import JaxTrainer

        return JaxTrainer(model, index, processes, address, tiny=tiny)
    from benchmarks.cluster.torch_trainer import TorchTrainer

    return TorchTrainer(model, index, processes, address, tiny=tiny)


def counters() -> dict[str, int]:
    """Bytes that the interface has sent and received so far."""
    return {way: int((_COUNTERS / f"{way}_bytes").read_text()) for way in ("tx", "rx")}


def answer(trainer: Trainer, request: dict[str, Any]) -> dict[str, Any]:
    """Does what the request says."""
    if request["do"] == "prepare":
        return {"payload": trainer.prepare(parse_strategy(request["strategy"]))}
    if request["do"] == "bytes":
        return counters()
    seconds = []
    for _ in range(request["samples"]):
        start = time.perf_counter()
        trainer.sample()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "loss": trainer.loss()}


def serve(
    start: Callable[[], Trained], answer: Callable[[Trained, dict[str, Any]], dict[str, Any]]
) -> None:
    """Answers requests until there are no more, and ends the process.

    Args:
      start: Joins the other processes.
      answer: Of what `start` returned and a request: the answer.
    """
    # Whatever a library prints must not end up between the answers.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        trainer = start()
        print(json.dumps({"parameters": trainer.parameters}), file=replies)
        for line in sys.stdin:
            print(json.dumps(answer(trainer, json.loads(line))), file=replies)
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        print(json.dumps({"error": f"{type(error).__name__}: {first}"}), file=replies)
    # The other processes may be gone: leave without the libraries' farewells, which would wait.
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    index, framework, model, processes, address, *tiny = sys.argv[1:]
    serve(
        lambda: connect(framework, model, int(index), int(processes), address, bool(tiny)), answer
    )


if __name__ == "__main__":
    main()
