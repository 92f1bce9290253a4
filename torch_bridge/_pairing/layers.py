"""Divides a torch model and a Flax model into layers, which `match` pairs.

A layer has the weight and bias of a Linear, all tensors of a MultiheadAttention, or one level and
direction of an LSTM.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch_bridge._base.tensors import BUFFER_NAMES, STATISTICS, clean_names
from torch_bridge._pairing.leaves import Tree, words_of
from torch_bridge._pairing.pairs import Path, Shape

Kind: TypeAlias = Literal["weight", "kernel", "embedding", "norm", "attention", "recurrent", "bare"]
# (k, sizes): the k-th part of the rows, which are divided in the ratio of `sizes`.
Share: TypeAlias = tuple[int, Shape]
# The name of a tensor or the path of a leaf, and its shape.
NamedShape: TypeAlias = tuple[Any, Shape]
Parts: TypeAlias = dict[str, NamedShape]
Kinds: TypeAlias = Mapping[Kind, tuple[str, str]]

_ATTENTION = frozenset({"query", "key", "value", "out"})
_GATES = (
    {"ii", "if", "ig", "io", "hi", "hf", "hg", "ho"},
    {"ir", "iz", "in", "hr", "hz", "hn"},
    {"i", "h"},
    {"dense_i", "dense_h"},
)
_RECURRENT = re.compile(
    r"(weight_ih|weight_hh|bias_ih|bias_hh|weight_hr)(?:_(l\d+))?(?:_(reverse))?"
)
_PACKED = re.compile(r"\b(in_proj_weight|q_proj_weight)$")
# Kind of a layer -> patterns of the parts that show it, and of all its parts. The first one counts.
_NORM = r"weight|bias|running_mean|running_var"
_TORCH_KINDS: Kinds = {
    "attention": (r"in_proj_weight|q_proj_weight", r".*proj.*"),
    "recurrent": (r"weight_ih", r"(weight|bias)_[ih]h"),
    "norm": (r"running_mean", _NORM),
    "weight": (r"weight", r"weight|bias"),
}
_FLAX_KINDS: Kinds = {
    "attention": (r"(query|key|value|out)\..*", r"(query|key|value|out)\..*"),
    "recurrent": (r"(dense_)?[ih].?\..*", r"(dense_)?[ih].?\..*"),
    "kernel": (r"kernel", r"kernel|bias"),
    "embedding": (r"embedding", r"embedding"),
    "norm": (r"scale|mean|negative_slope", r"scale|bias|mean|var|negative_slope"),
}
# Matrices of torch's own modules, which always are (out, in).
OF_TORCH = re.compile(r"\b(in_proj_weight|weight_[ih]h(_l\d+)?(_reverse)?)$")
# The tensors of torch's weight_norm (length and direction), in its old form and as a
# parametrization.
_WEIGHT_NORM = {
    "weight_g": r"\.parametrizations\.weight\.original0$",
    "weight": r"\.(weight_v|parametrizations\.weight\.original1)$",
}
# Advice -> pattern of the names of tensors that it is for.
_REPARAMETRIZED = {
    "weight_norm stores a length and a direction instead of a weight. Put flax.linen."
    "WeightNorm around the layer, or call torch.nn.utils.remove_weight_norm (or parametrize."
    "remove_parametrizations) before you save the file.": r".*(weight_g|weight\.original0)\b.*",
    "spectral_norm divides a weight by its largest singular value. Call torch.nn.utils."
    "remove_spectral_norm (or parametrize.remove_parametrizations) before you save the file.": (
        r".*(weight_orig|weight\.original|weight\.0\._[uv]|weight_[uv])\b.*"
    ),
    "An LSTM with proj_size has no counterpart among Flax's cells. Write the cell by hand and name "
    "its leaves with rules.": r".*weight_hr_.*",
}


@dataclasses.dataclass(eq=False)
class Layer:
    """One layer of either model.

    Attributes:
      segments: The module's name in torch (without the prefixes of wrappers), or its path in Flax
        (without the collection), as strings.
      kind: The kind, as far as the names of the layer's parts show it. A torch ``weight`` may be of
        a Linear, a Conv or an Embedding, a Flax ``kernel`` of a Dense or a Conv.
      parts: Name of a part, ``weight`` or ``query.kernel`` -> (tensor name or leaf path, shape).
      sep: The separator between `segments`: a dot in torch, a slash in Flax.
      share: The part of a packed Linear that the layer is; None for a whole layer.
      name: The name as users write it.
      words: The name without its numbers: (layers, #, fc, #) for ``layers.3.fc1``.
      numbers: The numbers in the name: (3, 1).
    """

    segments: Path
    kind: Kind
    parts: Parts
    sep: str = "."
    share: Share | None = None

    def __post_init__(self) -> None:
        self.name = self.sep.join(self.segments)
        self.words, self.numbers = words_of(self.segments)

    def __str__(self) -> str:
        return self.name or "(root)"

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Returns kind, shapes and sizes of shares: equal for layers that can be exchanged."""
        shapes = frozenset((part, shape) for part, (_, shape) in self.parts.items())
        divided = None
        if self.share:
            place, sizes = self.share
            divided = (sizes[place], sizes)
        return self.kind, shapes, divided

    @functools.cached_property
    def sizes(self) -> tuple[Any, ...]:
        """Returns the lengths of all axes and sizes of shares: equal for layers that may exchange.

        A bare parameter may be what an embedding or a matrix is in the other model, so neither the
        kind of the layer counts nor the order of its axes.
        """
        lengths = []
        for _, shape in self.parts.values():
            lengths.append(tuple(sorted(size for size in shape if size != 1)))
        *_, divided = self.signature
        return tuple(sorted(lengths)), divided

    @property
    def is_vector(self) -> bool:
        """Returns True for a norm, and for a bare vector, which may be of a norm."""
        return self.kind == "norm" or len(self.shape("")) == 1

    def shape(self, part: str) -> Shape:
        """Returns the shape of one part; () if the layer does not have it."""
        if part not in self.parts:
            return ()
        return self.parts[part][1]

    def tensors(self) -> list[Any]:
        """Lists the names of the layer's tensors, or the paths of its leaves."""
        return [name for name, _ in self.parts.values()]

    def line(self, part: str) -> str:
        """Returns the name and shape of one part, as errors show it."""
        name, shape = self.parts[part]
        if not isinstance(name, str):
            name = "/".join(name)
        return f"{name} {shape}"

    def shares(self, sizes: Shape) -> list[Layer]:
        """Divides the rows of the layer in the ratio of `sizes`; a single share is the layer."""
        if len(sizes) == 1:
            return [self]
        shares = []
        for place in range(len(sizes)):
            shares.append(dataclasses.replace(self, share=(place, sizes)))
        return shares

    def is_packed_by_torch(self) -> bool:
        """Returns True for a packed tensor of torch's own modules, whose order is known."""
        return any(map(OF_TORCH.search, map(str, self.tensors())))

    def single(self, part: str) -> Layer:
        """Returns one part as a layer by itself: a weight alone, or a bare parameter."""
        segments = self.segments
        if part not in ("", "weight", "kernel"):
            segments = (*segments, part)
        kind: Kind = "bare"
        name = ""
        if part == "kernel" and self.kind == "kernel":
            kind = name = "kernel"
        elif "weight" in part and self.kind in ("weight", "attention", "recurrent"):
            kind = name = "weight"
        return Layer(segments, kind, {name: self.parts[part]}, self.sep)


def replace_layers(layers: list[Layer], parts: Mapping[Layer, Sequence[Layer]]) -> None:
    """Replaces layers by their parts, in place; drops layers without tensors or leaves."""
    whole = layers.copy()
    layers.clear()
    for layer in whole:
        for part in parts.get(layer, [layer]):
            if part.parts:
                layers.append(part)


def layers_of(shapes: Mapping[str, Shape], tree: Tree) -> tuple[list[Layer], list[Layer]]:
    """Lists the torch layers, in the order of the state dict, and the Flax layers.

    If only one side packs the projections of attention, both sides get linear layers instead of an
    attention layer.

    Args:
      shapes: Tensor name -> shape of the torch model.
      tree: The flattened Flax tree. If it has no running statistics, torch's are left out.
    """
    children = {}  # path of a module -> names of the modules in it
    for path in tree.shapes:
        names = children.setdefault(path[:-2], set())
        for name in path[-2:-1]:
            names.add(name.rstrip("_"))
    cleaned = clean_names(list(shapes))
    heads = set()  # modules that pack the projections of attention, if Flax has them, too
    if any(map(_ATTENTION.issubset, children.values())):
        for name in filter(_PACKED.search, cleaned.values()):
            heads.add(name.rpartition(".")[0])

    modules = {}
    for name, clean in cleaned.items():
        segments, local = _torch_place(clean, heads)
        if local not in BUFFER_NAMES or (local in STATISTICS and tree.has_statistics):
            modules.setdefault(segments, {})[local] = (name, shapes[name])
    torch = []
    for segments, parts in modules.items():
        torch += _divided(segments, *_kind_of(parts, _TORCH_KINDS), parts, ".")

    bare = set()
    for layer in torch:
        if layer.kind == "bare":
            bare.add((layer.words, layer.numbers, layer.shape("")))
    groups = {}
    for path, shape in tree.shapes.items():
        module, part = _flax_place(path, children, bool(heads))
        groups.setdefault(module, {})[part] = (path, shape)
    flax = []
    for module, parts in groups.items():
        kind, known = _kind_of(parts, _FLAX_KINDS)
        if kind in ("embedding", "norm"):  # if torch has bare parameters of these names, Flax, too
            alone = set()
            for key, (_, shape) in parts.items():
                alone.add((*words_of((*module, key)), shape))
            if alone <= bare:
                known = ""
        flax += _divided(module, kind, known, parts, "/")
    return torch, flax


def _torch_place(clean: str, heads: Collection[str]) -> tuple[Any, str]:
    """Returns the segments of a tensor's layer, and the name of the tensor in the layer."""
    for local, pattern in _WEIGHT_NORM.items():
        clean = re.sub(pattern, f".{local}", clean)
    module, _, local = clean.rpartition(".")
    segments = list(filter(None, module.split(".")))
    recurrent = _RECURRENT.fullmatch(local)
    if recurrent:
        local, *suffixes = recurrent.groups()
        segments += filter(None, suffixes)
    elif local.startswith("in_proj_") and module not in heads:
        segments.append("in_proj")
        local = local.removeprefix("in_proj_")
    elif segments[-1:] == ["out_proj"] and ".".join(segments[:-1]) in heads:
        local = f"{segments.pop()}.{local}"
    return tuple(segments), local


def _flax_place(path: Path, children: Mapping[Path, set[str]], attention: bool) -> tuple[Path, str]:
    """Returns the path of a leaf's layer, and the name of the leaf in the layer."""
    siblings = children[path[:-2]]
    child = "".join(path[-2:-1]).rstrip("_")
    is_head = attention and siblings >= _ATTENTION and child in _ATTENTION
    if is_head or (child and siblings in _GATES):
        return path[:-2], f"{child}.{path[-1]}"
    return path[:-1], path[-1]


def _kind_of(parts: Parts, kinds: Kinds) -> tuple[Kind, str]:
    """Returns the kind of the layer in a module, and the pattern of the layer's parts."""
    for kind, (mark, known) in kinds.items():
        for part in filter(re.compile(mark).fullmatch, parts):
            _, shape = parts[part]
            if part == "weight" and len(shape) == 1:
                return "norm", _NORM
            # A scalar weight or a vector named "kernel" is a bare parameter.
            if len(shape) >= {"weight": 2, "kernel": 2}.get(part, 0):
                return kind, known
    return "bare", ""


def _divided(segments: Path, kind: Kind, known: str, parts: Parts, sep: str) -> Iterator[Layer]:
    """Yields one layer of the parts that `known` matches, and each other part as a layer."""
    together = {}
    alone = {}
    for key, part in parts.items():
        side = together if re.fullmatch(known, key) else alone
        side[key] = part
    if together:
        yield Layer(segments, kind, together, sep)
    for key, part in alone.items():
        yield Layer((*segments, key), "bare", {"": part}, sep)


def reparametrized(names: Collection[str]) -> str:
    """Returns advice for weights that torch computes from other tensors; "" if there are none."""
    sentences = ""
    for sentence, pattern in _REPARAMETRIZED.items():
        if any(map(re.compile(pattern).match, names)):
            sentences += f"{sentence} "
    return sentences
