"""The style of all pictures, which is that of the examples."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from benchmarks.common.paths import LANGUAGE_MODEL

sys.path.insert(0, str(LANGUAGE_MODEL))
from pictures import BLUE, GREEN, INK, MUTED, OCHRE, ORANGE, PURPLE, name_points, note, panels
from pictures import save as save_whole

TITLES = {
    "mlp": "MLP, 10M parameters",
    "transformer": "transformer, 11M parameters",
    "resnet50": "ResNet-50, 26M parameters",
    "gpt2-small": "GPT-2 small, 124M parameters",
}


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of 64 colours, a quarter as large; equal data give equal bytes."""
    save_whole(figure, path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64)
    small.save(path, optimize=True)


__all__ = [
    "BLUE", "GREEN", "INK", "MUTED", "OCHRE", "ORANGE", "PURPLE", "TITLES",
    "name_points", "note", "panels", "save",
]  # fmt: skip
