"""The look of all pictures, which is that of the examples."""

from __future__ import annotations

import sys

from benchmarks.common.paths import LANGUAGE_MODEL

sys.path.insert(0, str(LANGUAGE_MODEL))
from pictures import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    OCHRE,
    ORANGE,
    PURPLE,
    SKY,
    name_points,
    note,
    panels,
    save,
)

TITLES = {
    "mlp": "MLP, 10M parameters",
    "transformer": "transformer, 11M parameters",
    "resnet50": "ResNet-50, 26M parameters",
    "gpt2-small": "GPT-2 small, 124M parameters",
}

__all__ = [
    "BLUE",
    "GREEN",
    "GRID",
    "INK",
    "MUTED",
    "OCHRE",
    "ORANGE",
    "PURPLE",
    "SKY",
    "TITLES",
    "name_points",
    "note",
    "panels",
    "save",
]
