"""The cases of `from_torch.py`, and the steps at which they move. Imports no framework."""

from __future__ import annotations

import itertools
from typing import NamedTuple

WORLD = 2  # processes in torch, devices in JAX
START = 10  # first compressed step
MOVES = (30, 63)  # torch -> JAX, JAX -> torch
STEPS = 96


class Case(NamedTuple):
    """One training run."""

    model: str
    optimizer: str
    rank: int

    @property
    def name(self) -> str:
        """Returns the name in files and tables."""
        return f"{self.model}-{self.optimizer}-rank{self.rank}"


MODELS, OPTIMIZERS, RANKS = ("cnn", "transformer"), ("sgd", "adamw"), (1, 4)
CASES = tuple(Case(*choice) for choice in itertools.product(MODELS, OPTIMIZERS, RANKS))
