"""How a weight is stored where its shape does not tell, and what the rest of the model says."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch_bridge._pairing.layers import dense_cut, orientation
from torch_bridge._pairing.units import FlaxUnit, TorchUnit

_CLEAR = ("linear", "straight")
_OF_TORCH = re.compile(r"(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
Couples = Mapping[TorchUnit, FlaxUnit]


def form_of(unit: TorchUnit, target: FlaxUnit) -> str:
    """What a kernel with spatial axes can be; see `orientation`."""
    shape, kernel = shapes(unit, target)
    return orientation(shape, kernel) if kernel and len(shape) > 2 else "none"


def storage(unit: TorchUnit, target: FlaxUnit) -> str:
    """How a matrix can be stored: ``linear`` (out, in), ``straight`` (in, out), ``both``, ``none``.

    A Linear keeps its weight (out, in), transformers' Conv1D (in, out).
    """
    shape, kernel = shapes(unit, target)
    if not kernel or len(shape) != 2:
        return "none"
    # Rows of a packed one; what nn.MultiheadAttention packs, and nn.LSTM.
    if unit.part is not None or _OF_TORCH.search(unit.entries["weight"][0]):
        return "linear"
    forms = (bool(dense_cut(kernel, *shape[::-1])), bool(dense_cut(kernel, *shape)))
    names = {(True, True): "both", (True, False): "linear", (False, True): "straight"}
    return names.get(forms, "none")


def shapes(unit: TorchUnit, target: FlaxUnit | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the weight and the kernel; () for what is not there."""
    if target is None:
        return (), ()
    weight, kernel = unit.entries.get("weight"), target.entries.get("kernel")
    return weight[1] if weight else (), kernel[1] if kernel else ()


def storage_of_its_kind(unit: TorchUnit, couples: Couples) -> str:
    """How a square matrix is stored, from those that are not square.

    The layers of the same name decide, else those of the same module, else all. ``both`` if these
    disagree, ``none`` if there are none: what torch itself calls attention or LSTM counts, too.
    """
    clear = {u: form for u, t in couples.items() if (form := storage(u, t)) in _CLEAR}
    if "straight" not in clear.values():
        of_torch = any(unit.family in ("attention", "recurrent") for unit in couples)
        return "linear" if clear or of_torch else "none"
    module, _, name = unit.name.rpartition(".")
    for part, word in ((2, name), (0, module)):
        kind = {form for u, form in clear.items() if u.name.rpartition(".")[part] == word}
        if len(kind) == 1:
            return kind.pop()
    return "both" if "linear" in clear.values() else "straight"
