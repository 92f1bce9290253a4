"""The kinds of layers: which tensor becomes which leaf, and in which ways.

A kind is a small class with one method, `links`. Each link has a tensor, a leaf, and the views that
the shapes allow, the usual one first. Where there are several, what is said or found out decides.

References: ``torch.nn`` stores Linear as (out, in), Conv as (out, in / groups, *spatial) and
ConvTranspose as (in, out, *spatial). Flax stores (in, out), (*spatial, in / groups, out) and, with
``transpose_kernel=False``, (*spatial, in, out) reversed in space, because ``lax.conv_transpose``
does not turn the kernel as the gradient of a convolution does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from torch_bridge._base.tensors import STATISTICS
from torch_bridge._pairing.layers import Layer, Shape, Share
from torch_bridge._pairing.pairs import Maps, Pair

# Names of the forms in which a weight can be stored; others are orders of axes.
OUT_IN = "(out, in)"
IN_OUT = "(in, out)"
_BARE_AXES = 5  # a bare parameter of more axes is not turned
_SPACE_AXES = 4  # of so many axes, those of space stay together
_PACKED_AXES = 3  # the outputs of one packed kernel: query, key and value, heads, width
# Leaves that are never the turned matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})


class Answer(NamedTuple):
    """What the names and shapes of two layers do not say."""

    form: str = ""  # of the weight; "" is the usual one
    flatten: Maps = ()  # the inputs that are a flattened map, or what a norm is of
    unflatten: Maps = ()  # the outputs that become a map


USUAL = Answer()


class View(NamedTuple):
    """How a tensor, or a share of its rows, becomes a leaf: fields of a `Pair`, by its names.

    `row_maps` and `column_maps` name the field of an `Answer` that says what is a map there.
    """

    kind: str
    split: Shape
    axes: Shape
    row_axes: int = 1
    flip: Shape = ()
    row_maps: str = ""
    column_maps: str = ""


Views: TypeAlias = Mapping[str, View]  # form -> view, the usual one first


class Link(NamedTuple):
    """One tensor of a layer and its leaf, by what the layers call them."""

    tensor: str
    leaf: str
    views: Views  # none if the shapes do not fit
    share: Share | None = None
    terms: int = 1
    must_be_zero: tuple[int, int] | None = None

    def view(self, form: str) -> View:
        """Returns the view of a form, or the usual one where there is none of it."""
        return self.views.get(form) or next(iter(self.views.values()))


class Kind(Protocol):
    """What torch's and Flax's layers of one sort have in common."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Lists which tensor belongs to which leaf; both may be missing in the layers."""
        ...


class Linear:
    """Linear, Conv1D of transformers, and a Conv of one place that is a Dense on one side."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links ``weight`` with ``kernel`` and ``bias`` with ``bias``.

        The weight is (out, in), or (in, out) as by ``Conv1D``. Where Flax has three axes of outputs
        (query, key and value of each head), torch may have them in another order.
        """
        shape = torch.shape("weight")
        height = _height(shape, torch.share)
        kernel = flax.shape("kernel")
        bias = flax.shape("bias")
        weights: dict[str, View] = {}
        biases = dict(_vector(torch.shape("bias"), bias, torch.share, "unflatten"))
        cut = _cut(kernel, shape[1], height)
        if cut:
            weights[OUT_IN] = _turned(kernel, cut, "unflatten", "flatten")
        turned = _cut(kernel, height, shape[1])
        if turned and not torch.share and shape[:2] != (1, 1):
            view = View("conv1d.weight", kernel, tuple(range(len(kernel))), turned)
            weights[IN_OUT] = view._replace(row_maps="flatten", column_maps="unflatten")
        if cut and len(kernel) - cut == _PACKED_AXES:
            orders = itertools.permutations(range(_PACKED_AXES))
            for order in itertools.islice(orders, 1, None):
                weights[axes_name(order)] = _turned(kernel, cut, "", "flatten", order)
                if biases:
                    view = _turned(bias, 0, "", "", order)
                    biases[axes_name(order)] = view._replace(kind="vector")
        yield Link("weight", "kernel", weights, torch.share)
        yield Link("bias", "bias", biases, torch.share)


class Conv:
    """Conv, ConvTranspose and Bilinear."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links ``weight`` with ``kernel`` and ``bias`` with ``bias``.

        The weight is (out, in, *space), or that of a ConvTranspose. A Flax ConvTranspose with
        ``transpose_kernel=True`` has the first form, too. A Bilinear may have any order of axes.
        """
        weight = torch.shape("weight")
        kernel = flax.shape("kernel")
        kinds = {OUT_IN: "conv.weight", IN_OUT: "conv_transpose.weight"}
        orders: dict[str, Shape] = {}
        space = tuple(range(2, len(weight)))
        if len(weight) != len(kernel):  # a Conv2d over one channel that is a Conv1d in Flax
            weight = without_ones(weight)
            kernel = without_ones(kernel)
            rows_last = (*range(1, len(weight)), 0)
            orders = {OUT_IN: _kernel_order(len(weight)), axes_name(rows_last): rows_last}
        else:
            orders = {OUT_IN: (*space, 1, 0), IN_OUT: (*space, 0, 1)}
            if len(weight) == 3:
                for order in itertools.permutations(range(3)):
                    orders[axes_name(order)] = order
        views: dict[str, View] = {}
        seen: set[Shape] = set()
        for form, order in orders.items():
            wide = tuple(axis for axis in order if weight[axis] != 1)  # others change nothing
            if _moved(weight, order) == kernel and wide not in seen:
                seen.add(wide)
                views[form] = View(kinds.get(form, "array"), weight, order)
        if IN_OUT in views:
            views[IN_OUT] = views[IN_OUT]._replace(flip=tuple(range(len(space))))
        yield Link("weight", "kernel", views)
        yield Link("bias", "bias", _vector(torch.shape("bias"), flax.shape("bias")))


class Embedding:
    """A table of rows, which may be flattened maps."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links ``weight`` with ``embedding``."""
        shape = torch.shape("weight")
        views: dict[str, View] = {}
        if shape == flax.shape("embedding"):
            axes = tuple(range(len(shape)))
            views[OUT_IN] = View("embedding", shape, axes, column_maps="unflatten")
        yield Link("weight", "embedding", views)


class Norm:
    """A norm of any sort, running statistics included, and PReLU."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links ``weight`` with ``scale``, and each running statistic with its own."""
        scale = "negative_slope" if "negative_slope" in flax.parts else "scale"
        leaves = {"weight": scale, "bias": "bias", "running_mean": "mean", "running_var": "var"}
        for tensor in torch.parts:
            leaf = leaves[tensor]
            views = _vector(torch.shape(tensor), flax.shape(leaf), None, "flatten")
            if tensor in STATISTICS and views:
                views = {OUT_IN: views[OUT_IN]._replace(kind="buffer")}
            yield Link(tensor, leaf, views)


class Attention:
    """MultiheadAttention, whose projections are one tensor in torch and three kernels in Flax."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links the parts of the packed projection with the three kernels, and the output's."""
        for place, name in enumerate(("query", "key", "value")):
            yield _gate(torch, flax, "in_proj_weight", f"{name}.kernel", (place, 3))
            yield _gate(torch, flax, f"{name[0]}_proj_weight", f"{name}.kernel")
            yield _gate(torch, flax, "in_proj_bias", f"{name}.bias", (place, 3))
        yield _gate(torch, flax, "out_proj.weight", "out.kernel")
        yield _gate(torch, flax, "out_proj.bias", "out.bias")


class Recurrent:
    """One level and direction of an LSTM, GRU or RNN, or a cell."""

    # Gates in torch's order, by the number of them; a cell without gates has one unnamed one.
    _gates: Mapping[int, str] = {4: "ifgo", 3: "rzn", 1: ""}

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links the parts of the packed gates with the kernels of the gates.

        torch adds its two biases at once; Flax has both or their sum. nnx.GRUCell adds none to the
        hidden side of gate n, inside torch's reset gate, so that these values have to be zero.
        """
        packed, hidden = torch.shape("weight_hh") or (1, 2)
        count = packed // hidden
        if packed % hidden or count not in self._gates:
            return
        letters = self._gates[count]
        shares: dict[str, Share | None] = {}
        prefix = ""
        if "dense_i.kernel" in flax.parts:  # flax.nnx packs the gates as torch does
            letters = ""
            prefix = "dense_"
        for place, letter in enumerate(letters):
            shares[letter] = (place, count)
        if not letters:
            shares[""] = None
        for letter, share in shares.items():
            inputs = f"{prefix}i{letter}"
            state = f"{prefix}h{letter}"
            kernel = _gate(torch, flax, "weight_ih", f"{inputs}.kernel", share)
            for form, view in kernel.views.items():
                kernel = kernel._replace(views={form: view._replace(column_maps="flatten")})
            yield kernel
            yield _gate(torch, flax, "weight_hh", f"{state}.kernel", share)
            if "bias_ih" not in torch.parts:
                continue
            leaves = [f"{inputs}.bias", f"{state}.bias"]
            tensors = ["bias_ih", "bias_hh"]
            if flax.parts.keys() >= {*leaves}:
                yield _gate(torch, flax, tensors[0], leaves[0], share)
                yield _gate(torch, flax, tensors[1], leaves[1], share)
                continue
            if leaves[1] in flax.parts:
                leaves.reverse()
                tensors.reverse()
            of_n = None
            if count == 3 and share is None:
                of_n = (2 * hidden, 3 * hidden)
            first = _gate(torch, flax, tensors[0], leaves[0], share)
            second = _gate(torch, flax, tensors[1], leaves[0], share)
            yield first._replace(terms=2)
            yield second._replace(terms=2, must_be_zero=of_n)


class Bare:
    """A parameter without a module of its own, or a layer of one part beside one."""

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Links the only tensor with the only leaf, in all orders of the axes that fit.

        Axes of one place take no part. What a module of torch multiplies with is usually turned,
        and another parameter is as it is. Orders that no layer has come where no other fits.
        """
        if len(torch.parts) != 1 or len(flax.parts) != 1:
            return
        ((tensor, (_, shape)),) = torch.parts.items()
        ((leaf, (path, target)),) = flax.parts.items()
        wide = without_ones(shape)
        goal = without_ones(target)
        same = tuple(range(len(wide)))
        if len(wide) < 2:
            maps = ""
            if torch.sort == "bare":
                maps = "flatten"
            yield Link(tensor, leaf, _vector(shape, target, None, maps))
            return
        orders = [same, _kernel_order(len(wide))]
        if wide == goal and path[-1] in _AS_THEY_ARE:
            orders = [same]
        elif torch.sort in ("weight", "recurrent", "attention"):
            orders.reverse()
        if len(orders) == 2 and len(wide) < _SPACE_AXES:
            orders += itertools.permutations(same)
        elif len(orders) == 2:
            orders += [(*same[2:], *same[:2]), (same[0], *same[2:], same[1])]
        # Without axes of one place, the first of those that stay may be torch's columns.
        row_axes = int(shape[0] > 1)
        views = _orders(wide, goal, orders, row_axes)
        if not views and len(wide) <= _BARE_AXES:
            views = _orders(wide, goal, itertools.permutations(same), row_axes)
        if torch.sort == "weight" and len(shape) == 2:
            for form, view in views.items():
                if view.axes == (1, 0):
                    views[form] = view._replace(row_maps="unflatten", column_maps="flatten")
        yield Link(tensor, leaf, views)


_BARE = Bare()
_SAME_SORT: Mapping[str, Kind] = {
    "norm": Norm(),
    "attention": Attention(),
    "recurrent": Recurrent(),
}
_WEIGHTS: Mapping[str, Kind] = {"embedding": Embedding(), "kernel": Conv()}
_LINEAR = Linear()


def _kind_of(torch: Layer, flax: Layer) -> Kind:
    """Finds the kind that two layers have in common; of others, only single parts can meet."""
    weight = torch.shape("weight")
    if torch.sort == flax.sort:
        return _SAME_SORT.get(torch.sort, _BARE)
    if torch.sort != "weight" or flax.sort not in _WEIGHTS:
        return _BARE
    is_dense = len(weight) == 2 or (math.prod(weight[2:]) == 1 and len(flax.shape("kernel")) == 2)
    if flax.sort == "kernel" and is_dense:
        return _LINEAR
    return _WEIGHTS[flax.sort]


def links_of(torch: Layer, flax: Layer) -> list[Link]:
    """Lists the links of two layers whose tensor torch has."""
    links = _kind_of(torch, flax).links(torch, flax)
    return [link for link in links if link.tensor in torch.parts]


def forms_of(torch: Layer, flax: Layer) -> list[str]:
    """Lists the forms in which the weight of two layers fits, the usual one first."""
    links = links_of(torch, flax)
    if not links:
        return []
    return list(links[0].views)


class Built(NamedTuple):
    """The pairs of two layers, and a line for each tensor and leaf without one."""

    pairs: list[Pair]
    missing: list[str]
    unexpected: list[str]
    mis_shaped: list[str]

    @property
    def fits(self) -> bool:
        """Tells whether every leaf and every tensor has its place."""
        return not (self.missing or self.unexpected or self.mis_shaped)


def build(torch: Layer, flax: Layer, answer: Answer = USUAL) -> Built:
    """Pairs the tensors of a torch layer and the leaves of a Flax layer.

    Args:
      torch: The one.
      flax: The other.
      answer: What is known about them.
    """
    built = Built([], [], [], [])
    placed: set[str] = set()
    lost: set[str] = set()
    filled: set[str] = set()
    for link in links_of(torch, flax):
        if link.leaf not in flax.parts:
            lost.add(link.tensor)  # of a packed tensor, every part must have a leaf
            continue
        placed.add(link.tensor)
        filled.add(link.leaf)
        if link.views:
            built.pairs.append(_pair(torch, flax, link, answer))
        else:
            built.mis_shaped.append(f"{torch.line(link.tensor)} <-> {flax.line(link.leaf)}")
    for leaf in flax.parts:
        if leaf not in filled:
            built.missing.append(flax.line(leaf))
    for tensor in torch.parts:
        if tensor not in placed or tensor in lost:
            built.unexpected.append(torch.line(tensor))
    return built


def _pair(torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair:
    """Makes the pair of a tensor and a leaf."""
    name, torch_shape = torch.parts[link.tensor]
    path, shape = flax.parts[link.leaf]
    view = link.view(answer.form)
    rows = None
    if link.share:
        height = _height(torch_shape, link.share)
        rows = (link.share[0] * height, (link.share[0] + 1) * height)
    return Pair(
        name,
        torch_shape,
        path,
        shape,
        view.kind,
        view.split,
        view.axes,
        view.row_axes,
        view.flip,
        rows,
        link.terms,
        link.must_be_zero,
        row_maps=getattr(answer, view.row_maps, ()),
        column_maps=getattr(answer, view.column_maps, ()),
    )


def _gate(torch: Layer, flax: Layer, tensor: str, leaf: str, share: Share | None = None) -> Link:
    """Links a matrix (out, in) or a vector with a leaf; a share of its rows if there is one."""
    shape = torch.shape(tensor)
    target = flax.shape(leaf)
    if len(shape) < 2:
        return Link(tensor, leaf, _vector(shape, target, share), share)
    views: dict[str, View] = {}
    cut = _cut(target, shape[1], _height(shape, share))
    if cut:
        views[OUT_IN] = _turned(target, cut)
    return Link(tensor, leaf, views, share)


def _height(shape: Shape, share: Share | None) -> int:
    """Returns the rows of a tensor or of a share of it; 0 if it has no equal shares."""
    rows = math.prod(shape[:1])
    if share is None:
        return rows
    height, rest = divmod(rows, share[1])
    if rest:
        return 0
    return height


def _vector(shape: Shape, target: Shape, share: Share | None = None, maps: str = "") -> Views:
    """Sees a bias, a scale or a running statistic as the leaf, if it has as many values."""
    if _height(shape, share) * math.prod(shape[1:]) != math.prod(target):
        return {}
    axes = tuple(range(len(target)))
    row_axes = len(target)
    if len(shape) > 1 and shape[0] == 1:
        row_axes = 0  # (1, C) has its values in columns, and (C, 1, 1) in rows
    return {OUT_IN: View("vector", target, axes, row_axes, row_maps=maps)}


def _cut(kernel: Shape, n_in: int, n_out: int) -> int:
    """Finds where the input axes of a dense kernel end; 0 if its shape does not fit."""
    for cut in range(1, len(kernel)):
        if math.prod(kernel[:cut]) == n_in and math.prod(kernel[cut:]) == n_out:
            return cut
    return 0


def _turned(
    kernel: Shape, cut: int, row_maps: str = "", column_maps: str = "", order: Shape = ()
) -> View:
    """Sees (*outs, *ins) in torch as (*ins, *outs) in Flax.

    Args:
      kernel: The shape in Flax.
      cut: How many of its axes are inputs.
      row_maps: As in `View`.
      column_maps: As in `View`.
      order: The order in which torch has the axes of outputs, if it is another.
    """
    outs = kernel[cut:]
    count = len(outs)
    order = order or tuple(range(count))
    split = _moved(outs, order) + kernel[:cut]
    axes = (*range(count, len(kernel)), *map(order.index, range(count)))
    return View("linear.weight", split, axes, count, (), row_maps, column_maps)


def _moved(shape: Shape, order: Iterable[int]) -> Shape:
    return tuple(shape[axis] for axis in order)


def without_ones(shape: Iterable[int]) -> Shape:
    """Returns a shape without the axes of one place."""
    return tuple(size for size in shape if size != 1)


def _orders(
    shape: Shape, goal: Shape, orders: Iterable[Shape], row_axes: int = 1
) -> dict[str, View]:
    """Sees a shape in those orders of its axes that make it another, each once."""
    kinds = {1: "vector", 2: "linear.weight"}
    views: dict[str, View] = {}
    for order in orders:
        kind = kinds.get(len(order), "conv.weight")
        if order == tuple(range(len(order))):
            kind = "array"
        if _moved(shape, order) == goal:
            views.setdefault(axes_name(order), View(kind, shape, order, row_axes))
    return views


def _kernel_order(count: int) -> Shape:
    """Returns the order of axes that makes (out, in, *spatial) into (*spatial, in, out)."""
    if count < 2:
        return tuple(range(count))
    return (*range(2, count), 1, 0)


def axes_name(order: Iterable[int]) -> str:
    """Names the form in which a weight has its axes in another order."""
    return f"axes {','.join(map(str, order))}"
