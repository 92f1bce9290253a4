"""Tensors and leaves that belong together by their own names, whatever layers they are parts of.

A norm or an embedding written by hand calls its tensors as it likes, and a plain JAX tree its
leaves. Where a rule names both exactly, or both have the same name and shape, they are taken out of
their layers and become a couple of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch_bridge._pairing.layers import dense_cut, orientation
from torch_bridge._pairing.units import Family, FlaxUnit, Stem, TorchUnit

Shape = tuple[int, ...]
# Leaves that are never the turned matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})
_STATISTICS = {"mean": "running_mean", "var": "running_var"}


@dataclasses.dataclass(frozen=True)
class Cut:
    """One tensor of a torch unit and one leaf of a Flax unit, by their keys there."""

    torch: TorchUnit
    tensor: str
    flax: FlaxUnit
    leaf: str

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of the tensor and of the leaf."""
        return self.torch.entries[self.tensor][1], self.flax.entries[self.leaf][1]

    @property
    def is_needed(self) -> bool:
        """Whether the two cannot meet as parts of their layers."""
        ours, theirs = self.shapes
        family = self.torch.family
        return family != self.flax.family or (family == "array" and ours != theirs)

    @property
    def is_kernel(self) -> bool:
        """Whether the leaf is the tensor with its axes turned, or may be that."""
        ours, theirs = self.shapes
        if len(ours) < 2 or self.leaf in _AS_THEY_ARE:
            return False
        turned = dense_cut(theirs, *ours[::-1]) if len(ours) == 2 else len(ours) == len(theirs)
        if len(ours) > 2:
            turned = turned and orientation(ours, theirs) != "none"
        own_name = self.torch.entries[self.tensor][0].rpartition(".")[2]
        named = "weight" in own_name or self.leaf == "kernel"
        return bool(turned) and (ours != theirs or named)

    def units(self) -> tuple[TorchUnit, FlaxUnit]:
        """The two as units of one family."""
        family: Family = "array"
        tensor = leaf = ""
        if self.is_kernel:
            family, tensor, leaf = "weight", "weight", "kernel"
        elif len(self.shapes[0]) == 1:  # so that it moves with what stands beside it
            family, tensor, leaf = "norm", _STATISTICS.get(self.leaf, "weight"), "scale"
            leaf = self.leaf if self.leaf in _STATISTICS else leaf
        entry, name = self.torch.entries[self.tensor], self.torch.name
        if self.tensor not in ("", "weight"):
            name = f"{name}.{self.tensor}".lstrip(".")
        path = (*self.flax.path, self.leaf) if self.leaf else self.flax.path
        return (
            TorchUnit(name, family, {tensor: entry}, Stem.of(name.split("."))),
            FlaxUnit(path, family, {leaf: self.flax.entries[self.leaf]}, Stem.of(path)),
        )


def of_equal_names(torch: Sequence[TorchUnit], flax: Iterable[FlaxUnit]) -> list[Cut]:
    """Flax layers of which every leaf has the name and the shape of a bare parameter of torch.

    A square kernel is left to a rule: its name does not say whether it is turned.
    """
    bare = {(u.stem.exact, u.stem.numbers): u for u in torch if u.family == "array"}
    cuts: list[Cut] = []
    for unit in flax if bare else ():
        stems = {leaf: Stem.of((*unit.path, leaf)) for leaf in unit.entries}
        found = {leaf: bare.get((stem.exact, stem.numbers)) for leaf, stem in stems.items()}
        mine = [Cut(u, "", unit, leaf) for leaf, u in found.items() if u is not None]
        alike = [cut for cut in mine if cut.shapes[0] == cut.shapes[1] and not cut.is_kernel]
        if unit.family != "array" and len(alike) == len(unit.entries):
            cuts += alike
    return cuts


def without(units: Sequence, taken: Mapping, new: Mapping) -> list:
    """The units with those parts of them exchanged that are `taken`.

    Args:
      units: Of one side.
      taken: Unit -> keys that it loses.
      new: Unit -> the units that stand for these.
    """
    kept: list = []
    for unit in units:
        rest = {key: entry for key, entry in unit.entries.items() if key not in taken.get(unit, ())}
        kept += new.get(unit, ())
        if unit not in taken:
            kept.append(unit)
        elif rest:
            kept.append(dataclasses.replace(unit, entries=rest))
    return kept
