"""One process of a run of `benchmarks.time_to_loss`: answers requests, a JSON line each.

    python -m benchmarks.time_to_loss.process INDEX FRAMEWORK FOLDER PROCESSES ADDRESS

The folder holds `config.json` and a file of `task.write_task` for every seed. The requests:

- ``{"do": "start", "strategy": "powersgd-16-int6", "seed": 0}``: the seed's parameters, and an
  optimizer and a reducer without a past.
- ``{"do": "train", "first": 0, "count": 24}``: that many steps. The answer has the seconds of each
  call (a step, or a round of local SGD) and the bytes that the interface sent.
- ``{"do": "evaluate"}``: the answer has the loss of its share of the held-out text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cluster.plan import Strategy, parse_strategy
from benchmarks.cluster.process import Joined, counters, serve


class Trainer(Joined, Protocol):
    """What a framework does here."""

    def start(self, strategy: Strategy, seed: int) -> None:
        """Begins anew."""
        ...

    def train(self, steps: Sequence[int]) -> list[float]:
        """Takes steps with the batches of these numbers; the seconds of each call."""
        ...

    def held_out_loss(self) -> float:
        """Of its share, in nats per byte; of local SGD, at the end of a round."""
        ...


def connect(framework: str, folder: Path, index: int, processes: int, address: str) -> Trainer:
    """Joins the other processes."""
    # Only one of the frameworks is ever loaded: their thread pools would share the core.
    if framework == "jax":
        from benchmarks.time_to_loss.jax_side import JaxTrainer

        return JaxTrainer(folder, index, processes, address)
    from benchmarks.time_to_loss.torch_side import TorchTrainer

    return TorchTrainer(folder, index, processes, address)


def answer(trainer: Trainer, request: dict[str, Any]) -> dict[str, Any]:
    """Does what the request says."""
    if request["do"] == "start":
        trainer.start(parse_strategy(request["strategy"]), request["seed"])
        return {}
    if request["do"] == "evaluate":
        return {"loss": trainer.held_out_loss()}
    before, first = counters()["tx"], request["first"]
    seconds = trainer.train(range(first, first + request["count"]))
    return {"seconds": seconds, "sent": counters()["tx"] - before}


def main() -> None:
    index, framework, folder, processes, address = sys.argv[1:]
    serve(lambda: connect(framework, Path(folder), int(index), int(processes), address), answer)


if __name__ == "__main__":
    main()
