"""What the study says about one strategy; the table and the plots are made of it."""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE = "allreduce"
GOAL_RATIO, GOAL_GAP = 20.0, 1.0  # at so many times fewer bytes, at most so many per cent above


@dataclass(frozen=True)
class Row:
    """One strategy over its seeds.

    Attributes:
      strategy: Its name.
      family: What the plots colour by.
      seeds: Number of runs.
      loss: Mean final held-out loss, nats per byte.
      spread: Standard deviation of it over the seeds; 0 for one seed.
      gap: Mean over the seeds of the final loss above the uncompressed run of the *same* seed, in
        per cent. The same seed has the same initial parameters and data, so this varies less.
      gap_spread: Standard deviation of that over the seeds.
      megabytes: Handed to the network by each replica in the whole run, 10^6 bytes.
      ratio: How many times fewer than the uncompressed run.
      on_frontier: Whether no strategy sends fewer bytes and has a lower gap.
      curve: (steps, megabytes, mean loss, its standard deviation) of every evaluation.
    """

    strategy: str
    family: str
    seeds: int
    loss: float
    spread: float
    gap: float
    gap_spread: float
    megabytes: float
    ratio: float
    on_frontier: bool
    curve: list[tuple[int, float, float, float]]
