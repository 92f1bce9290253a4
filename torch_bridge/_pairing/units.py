"""A model as a list of units, on the torch and on the Flax side.

A unit is what one layer owns: the weight and bias of a Linear, everything of a MultiheadAttention,
one layer and direction of an LSTM. Units are what `_match` brings together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch_bridge._base.names import clean_names
from torch_bridge._pairing.leaves import Tree

Family = Literal["weight", "norm", "attention", "recurrent", "array"]
# entry name (`weight`, `query.kernel`) -> (full name or path, shape)
TorchEntries = dict[str, tuple[str, tuple[int, ...]]]
FlaxEntries = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]

_ATTENTION = ("query", "key", "value", "out")
_GATES = {
    frozenset({"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"}),
    frozenset({"ir", "iz", "in", "hr", "hz", "hn"}),
    frozenset({"i", "h"}),
    frozenset({"dense_i", "dense_h"}),
}
_STATISTICS = ("running_mean", "running_var")
_RECURRENT = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh|weight_hr)(_l\d+)?(_reverse)?$")
# One word per idea, where the two sides are used to different ones.
_SYNONYMS = {
    "q": "query", "k": "key", "v": "value", "reverse": "backward", "o": "out",
    "proj": "", "rnn": "", "cell": "", "forward": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stem:
    """A name without its numbers, and the numbers: ``layers.3.fc1`` is (layers, #, fc, #), (3, 1).

    `exact` keeps the case. A `Stem` compares by `words` only.
    """

    words: tuple[str, ...]
    exact: tuple[str, ...] = dataclasses.field(compare=False)
    numbers: tuple[int, ...] = dataclasses.field(compare=False)
    segments: frozenset[str] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, segments: Iterable[str]) -> Stem:
        """The stem of a name given as its dotted segments."""
        segments = tuple(segments)
        pieces = [p for s in segments for p in re.findall(r"\d+|[^\W\d_]+", s)]
        exact = tuple("#" if p.isdigit() else p for p in pieces)
        numbers = tuple(int(p) for p in pieces if p.isdigit())
        plain = {_canonical(segment) for segment in segments} - {""}
        return cls(tuple(p.lower() for p in exact), exact, numbers, frozenset(plain))


def _canonical(segment: str) -> str:
    words = re.findall(r"\d+|[^\W\d_]+", segment.lower())
    kept = [_SYNONYMS.get(str(word), str(word)) for word in words if not word.isdigit()]
    return "".join(kept)


@dataclasses.dataclass(frozen=True, eq=False)
class TorchUnit:
    """One layer of the torch model; `name` is its module name without the wrappers' prefixes.

    `part` (k, n) is the k-th of the n equal parts of a packed Linear that a rule takes apart.
    """

    name: str
    family: Family
    entries: TorchEntries
    stem: Stem
    part: tuple[int, int] | None = None

    def rows(self, tensor: str) -> tuple[int, int] | None:
        """The rows of a tensor that belong to `part`; None for all of them."""
        if self.part is None:
            return None
        position, parts = self.part
        height = self.entries[tensor][1][0] // parts
        return (position * height, (position + 1) * height)

    def names(self) -> list[str]:
        """The full names of its tensors."""
        return [name for name, _ in self.entries.values()]


@dataclasses.dataclass(frozen=True, eq=False)
class FlaxUnit:
    """One layer of the Flax model; `path` is its module path without the collection."""

    path: tuple[str, ...]
    family: Family
    entries: FlaxEntries
    stem: Stem

    @property
    def name(self) -> str:
        """The module path as users write it."""
        return "/".join(self.path)


def torch_units(
    shapes: Mapping[str, tuple[int, ...]], *, split_attention: bool, buffers: bool
) -> list[TorchUnit]:
    """Groups the tensors of a torch model into units, in the order of the state dict.

    Args:
      shapes: Tensor name -> shape.
      split_attention: Take a MultiheadAttention as two linear layers, ``in_proj`` and ``out_proj``.
      buffers: Whether running statistics take part.
    """
    cleaned = clean_names(list(shapes))
    packed = {c.rpartition(".")[0] for c in cleaned.values() if c.endswith("in_proj_weight")}
    packed |= {c.rpartition(".")[0] for c in cleaned.values() if c.endswith("q_proj_weight")}
    groups: dict[str, TorchEntries] = {}
    for name, clean in cleaned.items():
        module, _, local = clean.rpartition(".")
        if local == "num_batches_tracked" or (local in _STATISTICS and not buffers):
            continue
        module, local = _owner(module, local, packed, split_attention)
        groups.setdefault(module, {})[local] = (name, shapes[name])
    return [unit for module, entries in groups.items() for unit in _torch_units_of(module, entries)]


def _owner(module: str, local: str, packed: set[str], split_attention: bool) -> tuple[str, str]:
    """The unit that a tensor belongs to, and what it is called there."""
    parent, _, last = module.rpartition(".")
    if module in packed and split_attention and local.startswith("in_proj_"):
        return f"{module}.in_proj".lstrip("."), local.removeprefix("in_proj_")
    if last == "out_proj" and parent in packed and not split_attention:
        return parent, f"out_proj.{local}"
    if match := _RECURRENT.match(local):
        tensor, layer, reverse = (match.group(k) or "" for k in (1, 2, 3))
        suffix = f"{layer}{reverse}".lstrip("_").replace("_", ".")
        return ".".join(part for part in (module, suffix) if part), tensor
    return module, local


def _torch_units_of(module: str, entries: TorchEntries) -> Iterable[TorchUnit]:
    known: tuple[str, ...]
    weight = entries.get("weight")
    if "in_proj_weight" in entries or "q_proj_weight" in entries:
        family: Family = "attention"
        known = tuple(key for key in entries if "proj" in key)
    elif "weight_ih" in entries:
        family, known = "recurrent", ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    elif "running_mean" in entries or (weight and len(weight[1]) == 1):
        family, known = "norm", ("weight", "bias", *_STATISTICS)
    else:
        family, known = "weight", ("weight", "bias") if weight and len(weight[1]) > 1 else ()
    own = {key: entries[key] for key in entries if key in known}
    if own:
        yield TorchUnit(module, family, own, Stem.of(module.split(".") if module else ()))
    for key, (name, shape) in entries.items():
        if key not in own:  # a bare nn.Parameter
            path = [*module.split("."), key] if module else [key]
            yield TorchUnit(".".join(path), "array", {"": (name, shape)}, Stem.of(path))


def flax_units(tree: Tree, *, split_attention: bool) -> list[FlaxUnit]:
    """Groups the leaves of a Flax tree into units, in natural order.

    Args:
      tree: The flattened tree.
      split_attention: Take attention as four linear layers.
    """
    groups: dict[tuple[str, ...], FlaxEntries] = {}
    for path, shape in tree.shapes.items():
        groups.setdefault(tree.module(path), {})[path[-1]] = (path, shape)
    children: dict[tuple[str, ...], set[str]] = {}
    for module in groups:
        if module:
            children.setdefault(module[:-1], set()).add(module[-1])
    units: list[FlaxUnit] = []
    for parent, names in children.items():
        if names.issuperset(_ATTENTION) and not split_attention:
            units.append(_absorb(groups, parent, _ATTENTION, "attention"))
        elif frozenset(name.rstrip("_") for name in names) in _GATES:
            units.append(_absorb(groups, parent, sorted(names), "recurrent"))
    for module, entries in groups.items():
        units += _flax_units_of(module, entries)
    return units


def _absorb(
    groups: dict[tuple[str, ...], FlaxEntries],
    parent: tuple[str, ...],
    names: Sequence[str],
    family: Family,
) -> FlaxUnit:
    entries: FlaxEntries = {}
    for name in names:
        for key, entry in groups.pop((*parent, name)).items():
            entries[f"{name.rstrip('_')}.{key}"] = entry
    return FlaxUnit(parent, family, entries, Stem.of(parent))


def _flax_units_of(module: tuple[str, ...], entries: FlaxEntries) -> Iterable[FlaxUnit]:
    known: tuple[str, ...] = ()
    family: Family = "weight"
    if "kernel" in entries:
        known = ("kernel", "bias")
    elif "embedding" in entries:
        known = ("embedding",)
    elif {"scale", "mean", "negative_slope"} & entries.keys():
        family, known = "norm", ("scale", "bias", "mean", "var", "negative_slope")
    own = {key: entries[key] for key in entries if key in known}
    if own:
        yield FlaxUnit(module, family, own, Stem.of(module))
    for key, (path, shape) in entries.items():
        if key not in own:
            where = (*module, key)
            yield FlaxUnit(where, "array", {"": (path, shape)}, Stem.of(where))
