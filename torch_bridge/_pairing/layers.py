"""A model as a list of layers, on the torch and on the Flax side.

A layer owns the weight and bias of a Linear, everything of a MultiheadAttention, or one level and
direction of an LSTM. Layers are what `match` brings together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch_bridge._base.tensors import BUFFER_NAMES, STATISTICS, clean_names
from torch_bridge._pairing.leaves import Tree

Kind = Literal["weight", "norm", "attention", "recurrent", "array"]
Shape = tuple[int, ...]
Parts = dict[str, tuple[Any, Shape]]

_ATTENTION = {"query", "key", "value", "out"}
_GATES = (
    {"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"},
    {"ir", "iz", "in", "hr", "hz", "hn"},
    {"i", "h"},
    {"dense_i", "dense_h"},
)
_INNER = _ATTENTION.union(*_GATES)
_RECURRENT = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh|weight_hr)(_l\d+)?(_reverse)?$")
_PACKED = ("in_proj_weight", "q_proj_weight")
# One word per idea, where the two sides are used to different ones.
_SYNONYMS = {
    "q": "query", "k": "key", "v": "value", "reverse": "backward", "o": "out",
    "proj": "", "rnn": "", "cell": "", "forward": "",
}  # fmt: skip


class Layer:
    """One layer of either model.

    Attributes:
      segments: Its module name (without the prefixes of wrappers), or its path without the
        collection.
      kind: What it is.
      parts: What it owns: ``weight`` or ``query.kernel`` -> (tensor name or leaf path, shape).
      sep: What joins `segments`: a dot in torch, a slash in Flax.
      share: (k, n) for the k-th of the n equal parts of a packed Linear that a rule takes apart.
      name: The name as users write it.
      exact: The name without its numbers: ``layers.3.fc1`` is (layers, #, fc, #).
      words: `exact` in lower case.
      numbers: The numbers of the name: (3, 1).
    """

    def __init__(
        self,
        segments: tuple[str, ...],
        kind: Kind,
        parts: Parts,
        sep: str = ".",
        share: tuple[int, int] | None = None,
    ) -> None:
        self.segments, self.parts, self.sep, self.share = segments, parts, sep, share
        self.kind: Kind = kind
        self.name = sep.join(segments)
        pieces = [piece for s in segments for piece in re.findall(r"\d+|[^\W\d_]+", s)]
        self.exact = tuple("#" if piece.isdigit() else piece for piece in pieces)
        self.words = tuple(piece.lower() for piece in self.exact)
        self.numbers = tuple(int(piece) for piece in pieces if piece.isdigit())

    @property
    def signature(self) -> tuple[Kind, frozenset[tuple[str, Shape]]]:
        """Kind and shapes."""
        return self.kind, frozenset((key, shape) for key, (_, shape) in self.parts.items())

    @property
    def plain(self) -> frozenset[str]:
        """The segments as both sides write them: ``q_proj`` is query."""
        found = (re.findall(r"[^\W\d_]+", segment.lower()) for segment in self.segments)
        return frozenset("".join(_SYNONYMS.get(str(w), str(w)) for w in ws) for ws in found) - {""}

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm, or a bare parameter that may be one."""
        return self.kind == "norm" or len(self.shape("")) == 1

    def shape(self, part: str) -> Shape:
        """Of one part; () if it is not there."""
        return self.parts[part][1] if part in self.parts else ()

    def line(self, part: str) -> str:
        """One part, as errors show it."""
        name, shape = self.parts[part]
        return f"{name if isinstance(name, str) else '/'.join(name)} {shape}"

    def shares(self, count: int) -> list[Layer]:
        """The layer, or each of the equal parts that its rows are taken apart into."""
        if count == 1:
            return [self]
        numbers = range(count)
        return [Layer(self.segments, self.kind, self.parts, share=(k, count)) for k in numbers]


NO_LAYER = Layer((), "array", {})


def layers_of(shapes: Mapping[str, Shape], tree: Tree) -> tuple[list[Layer], list[Layer]]:
    """The layers of both models: in the order of the state dict, and in the tree's.

    Where one side alone packs attention, it is taken as linear layers on both.

    Args:
      shapes: Tensor name -> shape of the torch model.
      tree: The flattened Flax tree; if it has no place for running statistics, they take no part.
    """
    children: dict[tuple[str, ...], set[str]] = {}
    for path in tree.shapes:
        children.setdefault(path[:-2], set()).update(name.rstrip("_") for name in path[-2:-1])
    cleaned = clean_names(list(shapes))
    packed = {c.rpartition(".")[0] for c in cleaned.values() if c.endswith(_PACKED)}
    attention = bool(packed) and any(map(_ATTENTION.issubset, children.values()))
    modules: dict[str, Parts] = {}
    for name, clean in cleaned.items():
        module, _, local = clean.rpartition(".")
        if local not in BUFFER_NAMES or (local in STATISTICS and tree.has_statistics):
            module, local = _owner(module, local, packed, attention)
            modules.setdefault(module, {})[local] = (name, shapes[name])
    torch = [layer for module, parts in modules.items() for layer in _of_torch(module, parts)]
    bare = {(a.words, a.numbers, a.shape("")) for a in torch if a.kind == "array"}
    groups: dict[tuple[str, ...], Parts] = {}
    for path, shape in tree.shapes.items():
        owner, part = path[:-1], path[-1]
        names, child = children[path[:-2]], "".join(path[-2:-1]).rstrip("_")
        is_head = attention and names >= _ATTENTION and child in _ATTENTION
        if is_head or (child and names in _GATES):
            owner, part = path[:-2], f"{child}.{part}"
        groups.setdefault(owner, {})[part] = (path, shape)
    return torch, [layer for owner, own in groups.items() for layer in _of_flax(owner, own, bare)]


def _owner(module: str, local: str, packed: set[str], attention: bool) -> tuple[str, str]:
    """The torch layer that a tensor belongs to, and what it is called there."""
    parent, _, last = module.rpartition(".")
    if module in packed and not attention and local.startswith("in_proj_"):
        return f"{module}.in_proj".lstrip("."), local.removeprefix("in_proj_")
    if last == "out_proj" and parent in packed and attention:
        return parent, f"out_proj.{local}"
    if match := _RECURRENT.match(local):
        tensor, level, reverse = (match.group(k) or "" for k in (1, 2, 3))
        suffix = f"{level}{reverse}".lstrip("_").replace("_", ".")
        return ".".join(part for part in (module, suffix) if part), tensor
    return module, local


def _of_torch(module: str, parts: Parts) -> Iterator[Layer]:
    known: Iterable[str]
    weight = parts.get("weight")
    if any(key in parts for key in _PACKED):
        kind: Kind = "attention"
        known = [key for key in parts if "proj" in key]
    elif "weight_ih" in parts:
        kind, known = "recurrent", ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    elif "running_mean" in parts or (weight and len(weight[1]) == 1):
        kind, known = "norm", ("weight", "bias", *STATISTICS)
    else:
        kind, known = "weight", ("weight", "bias") if weight and len(weight[1]) > 1 else ()
    segments = tuple(module.split(".")) if module else ()
    return _divided(segments, kind, parts, known, ".")


def _of_flax(module: tuple[str, ...], parts: Parts, bare: set[Any]) -> Iterator[Layer]:
    """A norm or an embedding written by hand in torch is of `bare` parameters here, too."""
    alone = [Layer((*module, key), "array", {"": part}, "/") for key, part in parts.items()]
    known: Iterable[str] = ()
    kind: Kind = "weight"
    if inner := [key for key in parts if key.rpartition(".")[0] in _INNER]:
        of_attention = inner[0].rpartition(".")[0] in _ATTENTION
        kind, known = "attention" if of_attention else "recurrent", inner
    elif "kernel" in parts:
        known = ("kernel", "bias")
    elif all((a.words, a.numbers, a.shape("")) in bare for a in alone):
        pass
    elif "embedding" in parts:
        known = ("embedding",)
    elif {"scale", "mean", "negative_slope"} & parts.keys():
        kind, known = "norm", ("scale", "bias", "mean", "var", "negative_slope")
    return _divided(module, kind, parts, known, "/")


def _divided(
    segments: tuple[str, ...], kind: Kind, parts: Parts, known: Iterable[str], sep: str
) -> Iterator[Layer]:
    """The layer of the known parts, and each other one as a bare parameter."""
    own = {key: part for key, part in parts.items() if key in known}
    if own:
        yield Layer(segments, kind, own, sep)
    for key, part in parts.items():
        if key not in own:
            yield Layer((*segments, key), "array", {"": part}, sep)
