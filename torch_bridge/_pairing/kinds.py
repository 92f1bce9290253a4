"""The kinds of layers: the leaf of each tensor, and the forms that its weight may have.

For each kind a function lists links. A link has a tensor, a leaf, and a view for every form that
the shapes allow. The first of these forms is called the usual one, here and in all other files.
Among several forms the user or an example decides.

References: ``torch.nn`` stores Linear as (out, in), Conv as (out, in / groups, *spatial) and
ConvTranspose as (in, out, *spatial). Flax stores Dense as (in, out), Conv as (*spatial, in /
groups, out) and ConvTranspose with ``transpose_kernel=False`` as (*spatial, in, out). The spatial
axes of the last one are reversed, because ``lax.conv_transpose`` does not reverse the kernel, and
torch's ConvTranspose, the gradient of a convolution, does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from torch_bridge._pairing.layers import Layer, Share
from torch_bridge._pairing.pairs import Maps, Packing, Pair, Shape

# The form in which a weight is stored: `OUT_IN`, the name of an option, or the order of torch's
# axes in Flax.
Form: TypeAlias = str | Shape
OUT_IN = "(out, in)"
CONV1D = "conv1d"
CONV_TRANSPOSE = "conv_transpose"
_BARE_AXES = 5  # a bare parameter with more axes keeps their order
_PACKED_AXES = 3  # output axes of a packed kernel: (query, key, value), heads, width of a head
_NO_MAPS = ("", "")
_DENSE = ("flatten", "unflatten")  # the inputs and the outputs of a kernel may be maps
# Leaves that are never the transposed matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})
# Number of gates -> their letters in torch's order. A cell without gates has one without a name.
_GATES = {4: "ifgo", 3: "rzn", 1: ("",)}


class Answer(NamedTuple):
    """The answer to the questions about two layers that their names and shapes leave open."""

    form: Form = ""  # the form of the weight; "" is the usual one
    flatten: Maps = ()  # flattened maps among the inputs, or among the values of a norm
    unflatten: Maps = ()  # flattened maps among the outputs
    packing: Packing | None = None  # the order of packed parts among the outputs


USUAL = Answer()


class View(NamedTuple):
    """The conversion of a tensor, or some of its rows, to a leaf, in one form.

    Attributes:
      pair: The pair, without the answer about maps.
      row_field: The field of `Answer` with the maps in the rows; "" if no maps can be there.
      column_field: The same for the columns.
    """

    pair: Pair
    row_field: str
    column_field: str

    def with_rows(self, order: Shape) -> View:
        """Returns the view for a tensor whose row axes have another order."""
        moved = (*order, *range(len(order), len(self.pair.split)))
        split = tuple(map(self.pair.split.__getitem__, moved))
        axes = tuple(map(moved.index, self.pair.axes))
        return self._replace(pair=dataclasses.replace(self.pair, split=split, axes=axes))


Views: TypeAlias = dict[Form, View]  # the views in all forms that the shapes allow


class Link(NamedTuple):
    """A tensor of a torch layer and a leaf of a Flax layer, which may be one.

    Attributes:
      tensor: The tensor's name in its layer, which may lack it.
      leaf: The leaf's name in its layer, which may lack it.
      share: The part of the rows that go to the leaf; None for all rows.
      map_fields: The fields of `Answer` with the maps in the leaf's first axes and in its last
        axes; "" if no maps can be there.
      forms: Form -> order of torch's axes; None for a vector, or a matrix (out, in).
      is_packed: Whether three row axes of the leaf may have any order in torch.
      terms: As for `Pair`, like `must_be_zero`.
    """

    tensor: str
    leaf: str
    share: Share | None = None
    map_fields: tuple[str, str] = _NO_MAPS
    forms: Mapping[Form, Shape] | None = None
    is_packed: bool = False
    terms: int = 1
    must_be_zero: tuple[int, int] | None = None


class Joined(NamedTuple):
    """A torch layer and a Flax layer as partners.

    Attributes:
      links: The names of each tensor and its leaf -> the views, for those that fit.
      problems: Lines of text: ``missing`` for leaves without a tensor, ``unexpected`` for tensors
        without a leaf, ``mis_shaped`` for tensors and leaves whose shapes do not fit.
    """

    links: dict[tuple[str, str], Views]
    problems: dict[str, list[str]]

    @property
    def fits(self) -> bool:
        """Returns whether every leaf and every tensor is in a link."""
        return not any(self.problems.values())

    @property
    def forms(self) -> list[Form]:
        """Returns the possible forms of the weight."""
        return list(next(iter(self.links.values()), ()))

    def views(self, form: Form) -> list[View]:
        """Returns the view of each link in a form, or the usual view if it has no such form."""
        views = []
        for several in self.links.values():
            views.append(several.get(form) or next(iter(several.values())))
        return views

    def pairs(self, answer: Answer) -> list[Pair]:
        """Makes the pairs of all links, with the answer for the layers."""
        pairs = []
        for pair, row_field, column_field in self.views(answer.form):
            maps = {
                "row_maps": getattr(answer, row_field, ()),
                "column_maps": getattr(answer, column_field, ()),
            }
            pairs.append(dataclasses.replace(pair, packing=answer.packing, **maps))
        return pairs


@functools.lru_cache(maxsize=2**12)
def join(torch: Layer, flax: Layer) -> Joined:
    """Links the tensors of a torch layer with the leaves of a Flax layer."""
    links = {}
    lost = set()  # packed tensors, of which a part has no leaf
    list_links = _LINKS_OF.get((torch.kind, flax.kind), _bare)
    for link in list_links(torch, flax):
        both = (link.tensor, link.leaf)
        if link.leaf not in flax.parts:
            lost.add(link.tensor)
        elif link.tensor in torch.parts and not links.get(both):
            # Of several links of the same names, the first one that fits counts.
            links[both] = _views(link, torch, flax)
    problems = {"missing": [], "unexpected": [], "mis_shaped": []}
    fitting = {}
    empty = dict.fromkeys(flax.parts)
    unlinked = dict.fromkeys(torch.parts)
    for (tensor, leaf), views in links.items():
        empty.pop(leaf, None)
        if tensor not in lost:
            unlinked.pop(tensor, None)
        if views:
            fitting[tensor, leaf] = views
        else:
            line = f"{torch.line(tensor)} <-> {flax.line(leaf)}"
            problems["mis_shaped"].append(line)
    problems["missing"] += map(flax.line, empty)
    problems["unexpected"] += map(torch.line, unlinked)
    return Joined(fitting, problems)


def _weight(torch: Layer, flax: Layer) -> list[Link]:
    """Links a Linear, Conv, ConvTranspose, Bilinear, or Conv1D of transformers.

    A weight is (out, in, *space), or (in, out, *space) in ``Conv1D`` and ConvTranspose. A Flax
    ConvTranspose with ``transpose_kernel=True`` has the first form, too. The axes of a Bilinear may
    have any order. If a Flax kernel has three output axes (query, key and value of each head),
    these may have any order in torch.
    """
    shape = torch.shape("weight")
    kernel = flax.shape("kernel")
    space = tuple(range(2, len(shape)))
    in_out = CONV_TRANSPOSE if space else CONV1D
    forms: dict[Form, Shape] = {OUT_IN: (*space, 1, 0), in_out: (*space, 0, 1)}
    maps = _NO_MAPS
    if not space or len(kernel) == 2:
        maps = _DENSE
        if math.prod(shape[2:]) > 1:  # a convolution over patches, each one flattened for a Dense
            forms = {OUT_IN: (1, 0), in_out: (0, 1)}
    elif len(shape) != len(kernel):
        # A Conv2d over one channel that is a Conv1d in Flax, or (1, out, in, *space).
        last = (*space[1:], *space[:1], 1, 0)
        forms = {OUT_IN: forms[OUT_IN], last: last}
    elif len(shape) == 3 and not torch.share:
        for order in itertools.permutations(range(3)):
            forms[order] = order
    if torch.share:
        forms = {OUT_IN: forms[OUT_IN]}
    # Only in a parameter of several layers is it more than a vector.
    bias: dict[Form, Shape] = {OUT_IN: tuple(range(max(len(torch.shape("bias")), 1)))}
    return [
        Link("weight", "kernel", torch.share, maps, forms, is_packed=True),
        Link("bias", "bias", torch.share, ("", maps[1]), bias, is_packed=True),
    ]


def _embedding(torch: Layer, _: Layer) -> list[Link]:
    """Links an embedding, whose rows may be flattened maps."""
    same = tuple(range(len(torch.shape("weight"))))
    return [Link("weight", "embedding", map_fields=("", "unflatten"), forms={OUT_IN: same})]


def _norm(_: Layer, flax: Layer) -> list[Link]:
    """Links a norm of any kind, with its running statistics, or a PReLU."""
    leaves = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    if "negative_slope" in flax.parts:
        leaves["weight"] = "negative_slope"
    return [Link(tensor, leaf, map_fields=("", "flatten")) for tensor, leaf in leaves.items()]


def _norm_of_map(torch: Layer, flax: Layer) -> list[Link]:
    """Links a LayerNorm over several axes, in torch's order or with the channels last.

    Both orders fit a cube, and both are common: (C, H, W) has its channels last in Flax, and
    (positions, features) keeps its order.
    """
    same = tuple(range(len(torch.shape("weight"))))
    last = (*same[1:], 0)
    forms: dict[Form, Shape] = {same: same, last: last}
    weight = Link("weight", "scale", forms=forms)
    is_linear = len(torch.shape("bias") or same) != len(same)  # even of one value
    if is_linear or "scale" not in flax.parts or not _views(weight, torch, flax):
        return _bare(torch, flax)
    return [weight, Link("bias", "bias", forms=forms)]


def _attention(_: Layer, __: Layer) -> list[Link]:
    """Links the parts of MultiheadAttention's packed projection, and the output projection."""
    links = [Link("out_proj.weight", "out.kernel"), Link("out_proj.bias", "out.bias")]
    for place, name in enumerate(("query", "key", "value")):
        share = (place, (1, 1, 1))
        links += [
            Link("in_proj_weight", f"{name}.kernel", share),
            Link(f"{name[0]}_proj_weight", f"{name}.kernel"),
            Link("in_proj_bias", f"{name}.bias", share),
        ]
    return links


def _recurrent(torch: Layer, flax: Layer) -> list[Link]:
    """Links the packed gates of a cell, or of one level and direction, with each gate's kernels.

    torch adds two biases; Flax has both or their sum. torch multiplies the hidden bias of gate n by
    the reset gate. nnx.GRUCell does not have this bias, so torch's values must be zero.
    """
    packed, hidden = torch.shape("weight_hh") or (1, 2)
    count, rest = divmod(packed, hidden)
    if rest or count not in _GATES:
        return []
    prefix = ""
    gates = _GATES[count]
    if "dense_i.kernel" in flax.parts:  # flax.nnx packs the gates as torch does
        prefix = "dense_"
        gates = ("",)
    links = []
    for place, gate in enumerate(gates):
        share = (place, (1,) * len(gates))
        inputs = f"{prefix}i{gate}"
        state = f"{prefix}h{gate}"
        links.append(Link("weight_ih", f"{inputs}.kernel", share, ("flatten", "")))
        links.append(Link("weight_hh", f"{state}.kernel", share))
        biases = [Link("bias_ih", f"{inputs}.bias", share), Link("bias_hh", f"{state}.bias", share)]
        first, second = sorted(biases, key=lambda bias: bias.leaf not in flax.parts)
        if second.leaf not in flax.parts:  # the first leaf is the sum of both biases
            first = first._replace(terms=2)
            second = second._replace(leaf=first.leaf, terms=2)
            if count == 3 and prefix:
                second = second._replace(must_be_zero=(2 * hidden, 3 * hidden))
        links += [first, second]
    return links


def _bare(torch: Layer, flax: Layer) -> list[Link]:
    """Links the only tensor of a layer with the only leaf, in all orders of the axes that fit.

    Axes of length 1 are ignored. The usual form of a torch module's weight is transposed, and any
    other parameter keeps its order. The spatial axes are separated only if no other order fits.
    """
    if len(torch.parts) != 1 or len(flax.parts) != 1:
        return []
    ((tensor, (_, shape)),) = torch.parts.items()
    ((leaf, (path, target)),) = flax.parts.items()
    same = tuple(range(len(shape) or 1))
    space = same[2:]
    orders = [same, (*space, *same[1::-1])]
    if torch.kind in ("weight", "recurrent", "attention"):
        orders.reverse()
    for axes in itertools.permutations((same[:1], same[1:2], space)):
        orders.append(tuple(itertools.chain(*axes)))
    if path[-1] in _AS_THEY_ARE and without_ones(shape) == without_ones(target):
        orders = [same]
    maps = _NO_MAPS
    if torch.kind == "weight" and len(shape) == 2:
        maps = _DENSE
    elif torch.kind == "bare" and len(without_ones(shape)) <= 1:
        maps = ("", "flatten")
    likely = Link(tensor, leaf, map_fields=maps, forms={order: order for order in orders})
    if len(same) > _BARE_AXES:
        return [likely]
    every = itertools.permutations(same)
    return [likely, likely._replace(forms={order: order for order in every})]


# Kinds of a torch and a Flax layer -> the function that links them. `_bare` links other kinds, if
# both layers have one part.
_LINKS_OF: Mapping[tuple[str, str], Callable[[Layer, Layer], list[Link]]] = {
    ("weight", "kernel"): _weight,
    ("weight", "embedding"): _embedding,
    ("norm", "norm"): _norm,
    ("weight", "norm"): _norm_of_map,
    ("attention", "attention"): _attention,
    ("recurrent", "recurrent"): _recurrent,
}


def _views(link: Link, torch: Layer, flax: Layer) -> Views:
    """Returns the view of a link in each form that the shapes allow, without equal views."""
    name, whole = torch.parts[link.tensor]
    path, target = flax.parts[link.leaf]
    shape = whole or (1,)
    forms = link.forms or {OUT_IN: tuple(range(len(shape)))[::-1]}
    rows = None
    if link.share and len(link.share[1]) > 1:
        place, sizes = link.share
        unit, rest = divmod(shape[0], sum(sizes))
        if rest:
            return {}
        start = unit * sum(sizes[:place])
        rows = (start, start + unit * sizes[place])
        shape = (unit * sizes[place], *shape[1:])
    views: Views = {}
    seen = set()
    for form, order in forms.items():
        last = len(order) - 1
        shape = (*shape[:last], math.prod(shape[last:]))  # axes that the order does not name
        leaf_axes = _leaf_axes(shape, target, order)
        # Axes of length 1 do not matter, so without them two orders may be the same.
        wide = tuple(axis for axis in order if shape[axis] != 1)
        if leaf_axes is None or wide in seen:
            continue
        seen.add(wide)
        in_turn = list(itertools.chain(*leaf_axes))
        split = tuple(map(target.__getitem__, in_turn))
        axes = tuple(map(in_turn.index, range(len(target))))
        flip = ()
        if form == CONV_TRANSPOSE:
            flip = tuple(range(len(target) - 2))
        pair = Pair(
            torch_name=name,
            torch_shape=whole,
            path=path,
            shape=target,
            split=split,
            axes=axes,
            row_axes=len(leaf_axes[0]),
            flip=flip,
            rows=rows,
            terms=link.terms,
            must_be_zero=link.must_be_zero,
        )
        row_field, column_field = link.map_fields
        if order[-1] == 0:  # torch's rows are the last axis in Flax
            column_field, row_field = link.map_fields
        views[form] = View(pair, row_field, column_field)
    usual = views.get(OUT_IN)
    if link.is_packed and usual and usual.pair.row_axes == _PACKED_AXES:
        for order in itertools.islice(itertools.permutations(range(_PACKED_AXES)), 1, None):
            views[order] = usual.with_rows(order)
    return views


def _leaf_axes(shape: Shape, target: Shape, order: Shape) -> list[list[int]] | None:
    """Returns for each torch axis its axes in the leaf; None if the shapes do not fit.

    One torch axis may be several axes in Flax, such as heads and width in attention. If both shapes
    have the same number of axes, they must be equal in this order. Otherwise axes of length 1 may
    be anywhere.
    """
    if len(shape) == len(target) and tuple(map(shape.__getitem__, order)) != target:
        return None
    taken: list[list[int]] = [[] for _ in shape]
    rest = list(range(len(target)))
    for axis in order:
        size = 1
        while rest and (size != shape[axis] or target[rest[0]] == 1):
            size *= target[rest[0]]
            taken[axis].append(rest.pop(0))
        if size != shape[axis]:
            return None
    if rest:
        return None
    return taken


def without_ones(shape: Iterable[int]) -> Shape:
    """Returns a shape without its axes of length 1."""
    return tuple(size for size in shape if size != 1)
