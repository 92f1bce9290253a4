"""A model as a list of layers, on the torch and on the Flax side.

A layer owns the weight and bias of a Linear, everything of a MultiheadAttention, or one level and
direction of an LSTM. Layers are what `match` brings together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch_bridge._base.tensors import clean_names
from torch_bridge._pairing.leaves import Tree

Kind = Literal["weight", "norm", "attention", "recurrent", "array"]
Shape = tuple[int, ...]
Parts = dict[str, tuple[Any, Shape]]

_ATTENTION = ("query", "key", "value", "out")
_GATES = {
    frozenset({"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"}),
    frozenset({"ir", "iz", "in", "hr", "hz", "hn"}),
    frozenset({"i", "h"}),
    frozenset({"dense_i", "dense_h"}),
}
_STATISTICS = ("running_mean", "running_var")
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
      signature: Kind and shapes.
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
        self.signature = kind, frozenset((key, shape) for key, (_, shape) in parts.items())

    @property
    def plain(self) -> frozenset[str]:
        """The segments as both sides write them: ``q_proj`` is query."""
        found = (re.findall(r"[^\W\d_]+", segment.lower()) for segment in self.segments)
        return frozenset("".join(_SYNONYMS.get(str(w), str(w)) for w in ws) for ws in found) - {""}

    def shape(self, part: str) -> Shape:
        """Of one part; () if it is not there."""
        return self.parts[part][1] if part in self.parts else ()

    def rows(self, tensor: str) -> tuple[int, int] | None:
        """The rows of a tensor that belong to `share`; None for all of them."""
        if self.share is None:
            return None
        position, count = self.share
        height = self.shape(tensor)[0] // count
        return (position * height, (position + 1) * height)


def torch_layers(
    shapes: Mapping[str, Shape], *, split_attention: bool, buffers: bool
) -> list[Layer]:
    """The layers of a torch model, in the order of the state dict.

    Args:
      shapes: Tensor name -> shape.
      split_attention: Take a MultiheadAttention as two linear layers, ``in_proj`` and ``out_proj``.
      buffers: Whether running statistics take part.
    """
    cleaned = clean_names(list(shapes))
    packed = {c.rpartition(".")[0] for c in cleaned.values() if c.endswith(_PACKED)}
    groups: dict[str, Parts] = {}
    for name, clean in cleaned.items():
        module, _, local = clean.rpartition(".")
        if local == "num_batches_tracked" or (local in _STATISTICS and not buffers):
            continue
        module, local = _owner(module, local, packed, split_attention)
        groups.setdefault(module, {})[local] = (name, shapes[name])
    return [layer for module, parts in groups.items() for layer in _of_torch(module, parts)]


def _owner(module: str, local: str, packed: set[str], split_attention: bool) -> tuple[str, str]:
    """The layer that a tensor belongs to, and what it is called there."""
    parent, _, last = module.rpartition(".")
    if module in packed and split_attention and local.startswith("in_proj_"):
        return f"{module}.in_proj".lstrip("."), local.removeprefix("in_proj_")
    if last == "out_proj" and parent in packed and not split_attention:
        return parent, f"out_proj.{local}"
    if match := _RECURRENT.match(local):
        tensor, level, reverse = (match.group(k) or "" for k in (1, 2, 3))
        suffix = f"{level}{reverse}".lstrip("_").replace("_", ".")
        return ".".join(part for part in (module, suffix) if part), tensor
    return module, local


def _of_torch(module: str, parts: Parts) -> Iterable[Layer]:
    known: tuple[str, ...]
    weight = parts.get("weight")
    if any(key in parts for key in _PACKED):
        kind: Kind = "attention"
        known = tuple(key for key in parts if "proj" in key)
    elif "weight_ih" in parts:
        kind, known = "recurrent", ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    elif "running_mean" in parts or (weight and len(weight[1]) == 1):
        kind, known = "norm", ("weight", "bias", *_STATISTICS)
    else:
        kind, known = "weight", ("weight", "bias") if weight and len(weight[1]) > 1 else ()
    own = {key: parts[key] for key in parts if key in known}
    segments = tuple(module.split(".")) if module else ()
    if own:
        yield Layer(segments, kind, own)
    for key, part in parts.items():
        if key not in own:  # a bare nn.Parameter
            yield Layer((*segments, key), "array", {"": part})


def flax_layers(tree: Tree, torch: Iterable[Layer], *, split_attention: bool) -> list[Layer]:
    """The layers of a Flax tree, in natural order.

    Args:
      tree: The flattened tree.
      torch: The torch side: a norm or an embedding written by hand has bare parameters there.
      split_attention: Take attention as four linear layers.
    """
    bare = {(a.words, a.numbers, a.shape("")) for a in torch if a.kind == "array"}
    groups: dict[tuple[str, ...], Parts] = {}
    for path, shape in tree.shapes.items():
        groups.setdefault(tree.module(path), {})[path[-1]] = (path, shape)
    children: dict[tuple[str, ...], list[str]] = {}
    for module in groups:
        if module:
            children.setdefault(module[:-1], []).append(module[-1])
    layers: list[Layer] = []
    for parent, names in children.items():
        kind: Kind = "recurrent"
        if not split_attention and set(names).issuperset(_ATTENTION):
            kind, names = "attention", list(_ATTENTION)
        elif frozenset(name.rstrip("_") for name in names) not in _GATES:
            continue
        inner = {name.rstrip("_"): groups.pop((*parent, name)) for name in names}
        parts = {f"{name}.{key}": part for name, own in inner.items() for key, part in own.items()}
        layers.append(Layer(parent, kind, parts, "/"))
    for module, parts in groups.items():
        layers += _of_flax(module, parts, bare)
    return layers


def _of_flax(module: tuple[str, ...], parts: Parts, bare: set[Any]) -> Iterable[Layer]:
    alone = {key: Layer((*module, key), "array", {"": part}, "/") for key, part in parts.items()}
    known: tuple[str, ...] = ()
    kind: Kind = "weight"
    if "kernel" in parts:
        known = ("kernel", "bias")
    elif all((a.words, a.numbers, a.shape("")) in bare for a in alone.values()):
        pass
    elif "embedding" in parts:
        known = ("embedding",)
    elif {"scale", "mean", "negative_slope"} & parts.keys():
        kind, known = "norm", ("scale", "bias", "mean", "var", "negative_slope")
    own = {key: part for key, part in parts.items() if key in known}
    if own:
        yield Layer(module, kind, own, "/")
    yield from (layer for key, layer in alone.items() if key not in own)
