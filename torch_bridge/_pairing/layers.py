"""A model as a list of layers, on the torch and on the Flax side.

A layer holds the weight and bias of a Linear, everything of a MultiheadAttention, or one level and
direction of an LSTM. Layers are what `match` brings together.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from torch_bridge._base.tensors import BUFFER_NAMES, STATISTICS, clean_names
from torch_bridge._pairing.leaves import Tree, words_of

Sort: TypeAlias = Literal["weight", "kernel", "embedding", "norm", "attention", "recurrent", "bare"]
Shape: TypeAlias = tuple[int, ...]
Share: TypeAlias = tuple[int, int]  # (k, n): the k-th of n equal parts of the rows
Part: TypeAlias = tuple[Any, Shape]  # the name of a tensor or the path of a leaf, and its shape
Parts: TypeAlias = dict[str, Part]

_ATTENTION = frozenset({"query", "key", "value", "out"})
_GATES = (
    {"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"},
    {"ir", "iz", "in", "hr", "hz", "hn"},
    {"i", "h"},
    {"dense_i", "dense_h"},
)
_INNER = _ATTENTION.union(*_GATES)
_RECURRENT = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh|weight_hr)(_l\d+)?(_reverse)?$")
_RECURRENT_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_PACKED = ("in_proj_weight", "q_proj_weight")
# What torch's weight_norm keeps, in its old form and as a parametrization: length and direction.
_WEIGHT_NORM = {
    ".weight_g": "weight_g",
    ".parametrizations.weight.original0": "weight_g",
    ".weight_v": "weight",
    ".parametrizations.weight.original1": "weight",
}
_NORM_PARTS = ("weight", "bias", *STATISTICS)
_NORM_LEAVES = ("scale", "bias", "mean", "var", "negative_slope")


class Layer:
    """One layer of either model.

    Attributes:
      segments: Its module name (without the prefixes of wrappers), or its path without the
        collection.
      sort: What its parts are called: a torch ``weight`` may be of a Linear, a Conv or an
        Embedding, a Flax ``kernel`` of a Dense or a Conv.
      parts: What it holds: ``weight`` or ``query.kernel`` -> (tensor name or leaf path, shape).
      sep: What joins `segments`: a dot in torch, a slash in Flax.
      share: (k, n) for the k-th of the n equal parts of a packed Linear that is taken apart.
      name: The name as users write it.
      words: The name without its numbers: ``layers.3.fc1`` is (layers, #, fc, #).
      numbers: The numbers of the name: (3, 1).
    """

    def __init__(
        self,
        segments: tuple[str, ...],
        sort: Sort,
        parts: Parts,
        sep: str = ".",
        share: Share | None = None,
    ) -> None:
        self.segments = segments
        self.sort: Sort = sort
        self.parts = parts
        self.sep = sep
        self.share = share
        self.name = sep.join(segments)
        self.words, self.numbers = words_of(segments)

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {self.sort})"

    @property
    def label(self) -> str:
        """Names the layer, also one that has no name."""
        return self.name or "(root)"

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Sort, shapes and share: equal for layers that can stand for each other."""
        shapes = {key: shape for key, (_, shape) in self.parts.items()}
        return self.sort, frozenset(shapes.items()), self.share and self.share[1]

    @property
    def is_vector(self) -> bool:
        """Tells whether it is a norm, or a bare parameter that may be one."""
        return self.sort == "norm" or len(self.shape("")) == 1

    def shape(self, part: str) -> Shape:
        """Returns the shape of one part; () if the layer does not have it."""
        return self.parts[part][1] if part in self.parts else ()

    def tensors(self) -> list[Any]:
        """Lists the names of its tensors, or the paths of its leaves."""
        return [name for name, _ in self.parts.values()]

    def line(self, part: str) -> str:
        """Shows one part as errors do."""
        name, shape = self.parts[part]
        if not isinstance(name, str):
            name = "/".join(name)
        return f"{name} {shape}"

    def shares(self, count: int) -> list[Layer]:
        """Takes the layer apart into equal parts of its rows; into one, it stays as it is."""
        if count == 1:
            return [self]
        shares: list[Layer] = []
        for place in range(count):
            shares.append(Layer(self.segments, self.sort, self.parts, share=(place, count)))
        return shares

    def single(self, part: str) -> Layer:
        """Makes a layer of one part: a weight alone, or a bare parameter."""
        segments = self.segments
        if part not in ("", "weight", "kernel"):
            segments = (*segments, part)
        if part == "kernel" and self.sort == "kernel":
            return Layer(segments, "kernel", {"kernel": self.parts[part]}, self.sep)
        if "weight" in part and self.sort in ("weight", "attention", "recurrent"):
            return Layer(segments, "weight", {"weight": self.parts[part]}, self.sep)
        return Layer(segments, "bare", {"": self.parts[part]}, self.sep)


NO_LAYER = Layer((), "bare", {})


def layers_of(shapes: Mapping[str, Shape], tree: Tree) -> tuple[list[Layer], list[Layer]]:
    """Lists the layers of both models: in the order of the state dict, and in the tree's.

    Where one side alone packs attention, it is taken as linear layers on both.

    Args:
      shapes: Tensor name -> shape of the torch model.
      tree: The flattened Flax tree; if it has no place for running statistics, they take no part.
    """
    children = _children(tree)
    cleaned = clean_names(list(shapes))
    packed: set[str] = set()
    for clean in cleaned.values():
        module, _, local = clean.rpartition(".")
        if local in _PACKED:
            packed.add(module)
    attention = bool(packed) and any(map(_ATTENTION.issubset, children.values()))
    modules: dict[str, Parts] = {}
    for name, clean in cleaned.items():
        local = clean.rpartition(".")[2]
        if local in BUFFER_NAMES and not (local in STATISTICS and tree.has_statistics):
            continue
        module, local = _torch_place(clean, packed, attention)
        modules.setdefault(module, {})[local] = (name, shapes[name])
    torch: list[Layer] = []
    for module, parts in modules.items():
        torch += _of_torch(module, parts)
    bare: set[Any] = set()
    for layer in torch:
        if layer.sort == "bare":
            bare.add((layer.words, layer.numbers, layer.shape("")))
    groups: dict[tuple[str, ...], Parts] = {}
    for path, shape in tree.shapes.items():
        module, part = _flax_place(path, children, attention)
        groups.setdefault(module, {})[part] = (path, shape)
    flax: list[Layer] = []
    for module, parts in groups.items():
        flax += _of_flax(module, parts, bare)
    return torch, flax


def _children(tree: Tree) -> dict[tuple[str, ...], set[str]]:
    """Collects the names of the modules that lie in each module and hold leaves."""
    children: dict[tuple[str, ...], set[str]] = {}
    for path in tree.shapes:
        names = children.setdefault(path[:-2], set())
        names.update(name.rstrip("_") for name in path[-2:-1])
    return children


def _torch_place(clean: str, packed: Collection[str], attention: bool) -> tuple[str, str]:
    """Finds the layer that a tensor belongs to, and what it is called there."""
    for ending, local in _WEIGHT_NORM.items():
        if clean.endswith(ending):
            return clean.removesuffix(ending), local
    module, _, local = clean.rpartition(".")
    parent, _, last = module.rpartition(".")
    if module in packed and not attention and local.startswith("in_proj_"):
        return f"{module}.in_proj".lstrip("."), local.removeprefix("in_proj_")
    if last == "out_proj" and parent in packed and attention:
        return parent, f"out_proj.{local}"
    match = _RECURRENT.match(local)
    if match is None:
        return module, local
    tensor, level, reverse = match.groups(default="")
    suffix = f"{level}{reverse}".lstrip("_").replace("_", ".")
    return f"{module}.{suffix}".strip("."), tensor


def _flax_place(
    path: tuple[str, ...], children: Mapping[tuple[str, ...], set[str]], attention: bool
) -> tuple[tuple[str, ...], str]:
    """Finds the layer that a leaf belongs to, and what it is called there."""
    siblings = children[path[:-2]]
    child = "".join(path[-2:-1]).rstrip("_")
    is_head = attention and siblings >= _ATTENTION and child in _ATTENTION
    if is_head or (child and siblings in _GATES):
        return path[:-2], f"{child}.{path[-1]}"
    return path[:-1], path[-1]


def _of_torch(module: str, parts: Parts) -> Iterator[Layer]:
    """Makes the layers of the tensors of one torch module."""
    weight = parts["weight"][1] if "weight" in parts else ()
    sort: Sort = "weight"
    known: Collection[str] = ()
    if not parts.keys().isdisjoint(_PACKED):
        sort = "attention"
        known = [key for key in parts if "proj" in key]
    elif "weight_ih" in parts:
        sort = "recurrent"
        known = _RECURRENT_PARTS
    elif "running_mean" in parts or len(weight) == 1:
        sort = "norm"
        known = _NORM_PARTS
    elif len(weight) > 1:
        known = ("weight", "bias")
    segments = tuple(filter(None, module.split(".")))
    return _divided(segments, sort, parts, known, ".")


def _of_flax(module: tuple[str, ...], parts: Parts, bare: set[Any]) -> Iterator[Layer]:
    """Makes the layers of the leaves of one Flax module.

    A norm or an embedding written by hand in torch is of `bare` parameters here, too.
    """
    alone: set[Any] = set()
    inner: dict[str, str] = {}  # part of a head or gate -> its module
    for key, (_, shape) in parts.items():
        alone.add((*words_of((*module, key)), shape))
        child = key.rpartition(".")[0]
        if child in _INNER:
            inner[key] = child
    sort: Sort = "kernel"
    known: Collection[str] = ()
    if inner:
        known = inner
        sort = "attention"
        if _ATTENTION.isdisjoint(inner.values()):
            sort = "recurrent"
    elif "kernel" in parts and len(parts["kernel"][1]) > 1:
        known = ("kernel", "bias")
    elif alone <= bare:
        known = ()
    elif "embedding" in parts:
        sort = "embedding"
        known = ("embedding",)
    elif {"scale", "mean", "negative_slope"} & parts.keys():
        sort = "norm"
        known = _NORM_LEAVES
    return _divided(module, sort, parts, known, "/")


def _divided(
    segments: tuple[str, ...], sort: Sort, parts: Parts, known: Collection[str], sep: str
) -> Iterator[Layer]:
    """Makes the layer of the known parts, and a bare parameter of each other one."""
    together = {key: part for key, part in parts.items() if key in known}
    if together:
        yield Layer(segments, sort, together, sep)
    for key, part in parts.items():
        if key not in together:
            yield Layer((*segments, key), "bare", {"": part}, sep)
