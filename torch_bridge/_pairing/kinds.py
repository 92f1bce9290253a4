"""The kinds of layers: which tensors belong together, which leaf each becomes, and how.

A kind is a small class without state. `links` says which tensor belongs to which leaf, `forms` how
the shapes allow the weight to be stored, the usual way first, and `pair` makes the exact map.

References: ``torch.nn`` stores Linear as (out, in), Conv as (out, in / groups, *spatial) and
ConvTranspose as (in, out, *spatial). Flax stores (in, out), (*spatial, in / groups, out) and, with
``transpose_kernel=False``, (*spatial, in, out) reversed in space, because ``lax.conv_transpose``
does not turn the kernel as the gradient of a convolution does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch_bridge._base.tensors import STATISTICS
from torch_bridge._pairing.layers import Layer, Shape
from torch_bridge._pairing.pairs import Maps, Pair

# Names of the forms in which a weight can be stored, as errors and tests say them.
OUT_IN = "(out, in)"
IN_OUT = "(in, out)"
AS_IT_IS = "as it is"
TURNED = "turned"
_ROWS = "outputs in the order "
_PACKED_AXES = (0, 1, 2)  # the outputs of one packed kernel: query, key and value, heads, width
_BARE_AXES = 5  # a bare parameter of more axes is not turned
_MAP_AXES = 4  # of so many axes, those of space stay together
# Leaves that are never the turned matrix of a Linear.
_AS_THEY_ARE = frozenset({"scale", "bias", "mean", "var", "negative_slope", "embedding"})


class Answer(NamedTuple):
    """What the names and shapes of two layers do not say."""

    form: str = ""  # of the weight; '' is the usual one of those that fit
    flatten: Maps = ()  # the inputs that are a flattened map, or what a norm is of
    unflatten: Maps = ()  # the outputs that become a map


USUAL = Answer()


class Link(NamedTuple):
    """One tensor of a layer and its leaf, by what the layers call them."""

    tensor: str
    leaf: str
    share: tuple[int, int] | None = None  # (k, n): the leaf is the k-th of n parts of the rows
    fields: Mapping[str, Any] = {}  # of the pair
    reads_map: bool = True  # whether `flatten` speaks of this weight


class _View(NamedTuple):
    """How the rows and columns of a tensor become a leaf: four fields of a `Pair`, by its names."""

    split: Shape
    axes: Shape
    row_axes: int
    flip: Shape = ()


class Linear:
    """Linear, Conv1D of transformers, and a Conv of one place that is a Dense on one side."""

    name = "linear"

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs ``weight`` with ``kernel`` and ``bias`` with ``bias``."""
        yield Link("weight", "kernel", torch.share)
        yield Link("bias", "bias", torch.share)

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists how the weight can be stored: (out, in), or (in, out) as by ``Conv1D``.

        Where Flax has three axes of outputs (query, key and value of each head), torch may have
        them in another order.
        """
        height, width = _sides(torch)
        kernel = flax.shape("kernel")
        forms: list[str] = []
        cut = dense_cut(kernel, width, height)
        if cut:
            forms.append(OUT_IN)
        if dense_cut(kernel, height, width) and not torch.share and (height, width) != (1, 1):
            forms.append(IN_OUT)
        if cut and len(kernel) - cut == len(_PACKED_AXES):
            for order in itertools.permutations(_PACKED_AXES):
                if order != _PACKED_AXES:
                    forms.append(f"{_ROWS}{','.join(map(str, order))}")
        return tuple(forms)

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair of a weight or of a bias."""
        order = _rows_of(answer.form)
        if link.tensor == "bias":
            if order:
                return make_pair(
                    torch, flax, link, "vector", _turned((), flax.shape("bias"), order)
                )
            return vector_pair(torch, flax, link, answer.unflatten)
        height, width = _sides(torch)
        kernel = flax.shape("kernel")
        if answer.form == IN_OUT:
            cut = dense_cut(kernel, height, width)
            ins = kernel[:cut]
            outs = kernel[cut:]
            view = _View((*ins, *outs), tuple(range(len(kernel))), len(ins))
            maps = {"row_maps": answer.flatten, "column_maps": answer.unflatten}
            kind = "conv1d.weight"
        else:
            cut = dense_cut(kernel, width, height)
            ins = kernel[:cut]
            outs = kernel[cut:]
            view = _turned(ins, outs, order)
            maps = {"row_maps": answer.unflatten, "column_maps": answer.flatten}
            kind = "linear.weight"
        if not cut:
            return None
        return make_pair(torch, flax, link, kind, view, maps)


class Conv:
    """Conv and ConvTranspose."""

    name = "conv"

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs ``weight`` with ``kernel`` and ``bias`` with ``bias``."""
        yield Link("weight", "kernel")
        yield Link("bias", "bias")

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists how the weight can be stored: (out, in, *space), or that of a ConvTranspose.

        A Flax ConvTranspose with ``transpose_kernel=True`` has the first form, too.
        """
        weight = torch.shape("weight")
        kernel = flax.shape("kernel")
        first, second, *space = weight
        if len(weight) != len(kernel):  # a Conv2d over one channel that is a Conv1d in Flax
            wide = _without_ones(weight)
            orders = [_kernel_order(len(wide)), (*range(1, len(wide)), 0)]
            return _fitting_orders(wide, _without_ones(kernel), orders)
        forms: list[str] = []
        if kernel == (*space, second, first):
            forms.append(OUT_IN)
        if kernel == (*space, first, second) and (first, second) != (1, 1):
            forms.append(IN_OUT)
        if len(weight) == 3:  # it may be of a Bilinear: any order of three axes that fits
            usual = {_wide_order(weight, order) for order in ((2, 1, 0), (2, 0, 1))}
            for order in itertools.permutations(range(3)):
                turned = tuple(weight[axis] for axis in order)
                if turned == kernel and _wide_order(weight, order) not in usual:
                    forms.append(axes_name(order))
        return tuple(forms)

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair of a kernel or of a bias."""
        if link.tensor == "bias":
            return vector_pair(torch, flax, link)
        form = answer.form or usual_form(torch, flax)
        weight = torch.shape("weight")
        if not form:
            return None
        space = tuple(range(2, len(weight)))
        reverse = tuple(range(len(space)))
        if form == OUT_IN:
            view = _View(weight, (*space, 1, 0), 1)
            kind = "conv.weight"
        elif form == IN_OUT:
            view = _View(weight, (*space, 0, 1), 1, reverse)
            kind = "conv_transpose.weight"
        else:
            if len(weight) != len(flax.shape("kernel")):
                weight = _without_ones(weight)
            view = _View(weight, axes_of(form) or tuple(range(len(weight))), 1)
            kind = "array"
        return make_pair(torch, flax, link, kind, view)


class Embedding:
    """A table of rows."""

    name = "embedding"

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs ``weight`` with ``embedding``."""
        yield Link("weight", "embedding")

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists the only form that there is."""
        return (AS_IT_IS,) if torch.shape("weight") == flax.shape("embedding") else ()

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair of the table, whose rows may be flattened maps, too."""
        shape = torch.shape("weight")
        if shape != flax.shape("embedding"):
            return None
        view = _View(shape, tuple(range(len(shape))), 1)
        maps = {"column_maps": answer.unflatten}
        return make_pair(torch, flax, link, "embedding", view, maps)


class Norm:
    """A norm of any sort, running statistics included, and PReLU."""

    name = "norm"
    _leaves: Mapping[str, tuple[str, ...]] = {
        "weight": ("scale", "negative_slope"),
        "bias": ("bias",),
        "running_mean": ("mean",),
        "running_var": ("var",),
    }

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs ``weight`` with ``scale``, and each running statistic with its own."""
        for tensor in torch.parts:
            leaves = self._leaves[tensor]
            present = [leaf for leaf in leaves if leaf in flax.parts]
            yield Link(tensor, present[0] if present else leaves[0])

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists the only form that there is."""
        return (AS_IT_IS,)

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair of one vector; the map that a neighbour flattens moves it, too."""
        return vector_pair(torch, flax, link, answer.flatten or answer.unflatten)


class Attention:
    """MultiheadAttention, whose projections are one tensor in torch and three kernels in Flax."""

    name = "attention"

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs the parts of the packed projection with the three kernels, and the output's."""
        for place, name in enumerate(("query", "key", "value")):
            yield Link("in_proj_weight", f"{name}.kernel", (place, 3))
            yield Link(f"{name[0]}_proj_weight", f"{name}.kernel")
            yield Link("in_proj_bias", f"{name}.bias", (place, 3))
        yield Link("out_proj.weight", "out.kernel")
        yield Link("out_proj.bias", "out.bias")

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists the only form that there is."""
        return (OUT_IN,)

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair of one projection."""
        return matrix_or_vector_pair(torch, flax, link)


class Recurrent:
    """One level and direction of an LSTM, GRU or RNN, or a cell."""

    name = "recurrent"
    # Gates in torch's order, by the number of them; a cell without gates has one unnamed one.
    _gates: Mapping[int, str] = {4: "ifgo", 3: "rzn", 1: ""}

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs the parts of the packed gates with the kernels of the gates."""
        packed, hidden = torch.shape("weight_hh") or (1, 2)
        letters = None if packed % hidden else self._gates.get(packed // hidden)
        if letters is None:
            return
        names = [("i", "h")]
        shares: list[tuple[int, int] | None] = [None]
        if "dense_i.kernel" in flax.parts:  # flax.nnx packs the gates as torch does
            names = [("dense_i", "dense_h")]
        elif letters:
            names = [(f"i{letter}", f"h{letter}") for letter in letters]
            shares = [(place, len(letters)) for place in range(len(letters))]
        for (of_input, of_hidden), share in zip(names, shares, strict=True):
            yield Link("weight_ih", f"{of_input}.kernel", share)
            yield Link("weight_hh", f"{of_hidden}.kernel", share, reads_map=False)
            if {"bias_ih", "bias_hh"} <= torch.parts.keys():
                of_n = (2 * hidden, 3 * hidden) if letters == "rzn" and share is None else None
                yield from self._biases(flax, f"{of_input}.bias", f"{of_hidden}.bias", share, of_n)

    def _biases(
        self,
        flax: Layer,
        of_input: str,
        of_hidden: str,
        share: tuple[int, int] | None,
        of_n: tuple[int, int] | None,
    ) -> Iterator[Link]:
        """Pairs torch's two biases, which are added at once, with both of Flax or with their sum.

        nnx.GRUCell adds no bias to the hidden side of gate n, inside torch's reset gate, so that
        these values of torch's have to be zero.
        """
        if of_input in flax.parts and of_hidden in flax.parts:
            yield Link("bias_ih", of_input, share, {"terms": 1})
            yield Link("bias_hh", of_hidden, share, {"terms": 1})
        elif of_hidden in flax.parts:
            yield Link("bias_hh", of_hidden, share, {"terms": 2})
            yield Link("bias_ih", of_hidden, share, {"terms": 2, "must_be_zero": of_n})
        else:
            yield Link("bias_ih", of_input, share, {"terms": 2})
            yield Link("bias_hh", of_input, share, {"terms": 2, "must_be_zero": of_n})

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists the only form that there is."""
        return (OUT_IN,)

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair of one gate's matrix or bias."""
        maps = answer.flatten if link.tensor == "weight_ih" else ()
        return matrix_or_vector_pair(torch, flax, link, maps)


class Bare:
    """A parameter without a module of its own, or a layer of one part beside one."""

    name = "bare"

    def links(self, torch: Layer, flax: Layer) -> Iterator[Link]:
        """Pairs the only tensor with the only leaf."""
        if len(torch.parts) == 1 and len(flax.parts) == 1:
            yield Link(next(iter(torch.parts)), next(iter(flax.parts)))

    def forms(self, torch: Layer, flax: Layer) -> tuple[str, ...]:
        """Lists the orders of the axes that make the shapes equal, the likeliest first.

        Axes of one place take no part. What a module of torch multiplies with is turned, and
        another parameter is as it is, if both orders fit. Orders that no layer has are tried where
        no other fits.
        """
        if len(torch.parts) != 1 or len(flax.parts) != 1:
            return ()
        ((_, shape),) = torch.parts.values()
        ((path, target),) = flax.parts.values()
        wide = _without_ones(shape)
        goal = _without_ones(target)
        if sorted(wide) != sorted(goal) or len(wide) > _BARE_AXES:
            return ()
        same = tuple(range(len(wide)))
        if wide == goal and path[-1] in _AS_THEY_ARE:
            return (AS_IT_IS,)
        if torch.sort in ("weight", "recurrent", "attention"):
            orders = [_kernel_order(len(wide)), same]
        else:
            orders = [same, _kernel_order(len(wide))]
        if len(wide) < _MAP_AXES:
            orders += itertools.permutations(same)
        else:
            orders += [(*same[2:], *same[:2]), (same[0], *same[2:], same[1])]
        forms = _fitting_orders(wide, goal, orders)
        return forms or _fitting_orders(wide, goal, itertools.permutations(same))

    def pair(self, torch: Layer, flax: Layer, link: Link, answer: Answer) -> Pair | None:
        """Makes the pair, with the axes in the order that the form says."""
        forms = self.forms(torch, flax)
        if not forms:
            return None
        shape = torch.shape(link.tensor)
        wide = _without_ones(shape)
        order = axes_of(answer.form or forms[0]) or tuple(range(len(wide)))
        if len(wide) < 2:
            return vector_pair(torch, flax, link, answer.flatten or answer.unflatten)
        # Without axes of one place, the first of those that stay may be torch's columns.
        row_axes = 1 if shape[0] > 1 else 0
        kind = "array" if order == tuple(range(len(order))) else "linear.weight"
        if len(wide) > 2 and kind != "array":
            kind = "conv.weight"
        return make_pair(torch, flax, link, kind, _View(wide, order, row_axes))


Kind: TypeAlias = Linear | Conv | Embedding | Norm | Attention | Recurrent | Bare
LINEAR = Linear()
CONV = Conv()
EMBEDDING = Embedding()
NORM = Norm()
ATTENTION = Attention()
RECURRENT = Recurrent()
BARE = Bare()
_SAME_SORT: Mapping[str, Kind] = {"norm": NORM, "attention": ATTENTION, "recurrent": RECURRENT}


def kind_of(torch: Layer, flax: Layer) -> Kind:
    """Finds the kind that two layers have in common; of others, only single parts can meet."""
    if torch.sort == flax.sort:
        return _SAME_SORT.get(torch.sort, BARE)
    if (torch.sort, flax.sort) == ("weight", "embedding"):
        return EMBEDDING
    if (torch.sort, flax.sort) != ("weight", "kernel"):
        return BARE
    weight = torch.shape("weight")
    if len(weight) == 2 or (math.prod(weight[2:]) == 1 and len(flax.shape("kernel")) == 2):
        return LINEAR
    return CONV


def usual_form(torch: Layer, flax: Layer) -> str:
    """Returns the likeliest form in which the weight of two layers fits; '' if none does."""
    forms = kind_of(torch, flax).forms(torch, flax)
    return forms[0] if forms else ""


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
    kind = kind_of(torch, flax)
    forms = kind.forms(torch, flax)
    if answer.form not in forms:
        answer = answer._replace(form=forms[0] if forms else "")
    built = Built([], [], [], [])
    placed: set[str] = set()
    lost: set[str] = set()
    filled: set[str] = set()
    for link in kind.links(torch, flax):
        if link.tensor not in torch.parts:
            continue
        if link.leaf not in flax.parts:
            lost.add(link.tensor)  # of a packed tensor, every part must have a leaf
            continue
        placed.add(link.tensor)
        filled.add(link.leaf)
        pair = kind.pair(torch, flax, link, answer)
        if pair:
            built.pairs.append(pair)
            continue
        built.mis_shaped.append(f"{torch.line(link.tensor)} <-> {flax.line(link.leaf)}")
    for leaf in flax.parts:
        if leaf not in filled:
            built.missing.append(flax.line(leaf))
    for tensor in torch.parts:
        if tensor not in placed or tensor in lost:
            built.unexpected.append(torch.line(tensor))
    return built


def make_pair(
    torch: Layer,
    flax: Layer,
    link: Link,
    kind: str,
    view: _View,
    maps: Mapping[str, Maps] | None = None,
) -> Pair | None:
    """Makes a pair if the sizes of its sides agree; None if they do not.

    Args:
      torch: The torch layer.
      flax: The Flax layer.
      link: Which tensor and leaf of them.
      kind: The pair's.
      view: How the selected rows become the leaf.
      maps: Its ``row_maps`` and ``column_maps``.
    """
    name, torch_shape = torch.parts[link.tensor]
    path, shape = flax.parts[link.leaf]
    height = math.prod(torch_shape[:1])
    width = math.prod(torch_shape[1:])
    rows = None
    if link.share:
        place, count = link.share
        height //= count
        rows = (place * height, (place + 1) * height)
    split_rows = math.prod(view.split[: view.row_axes])
    split_columns = math.prod(view.split[view.row_axes :])
    if (split_rows, split_columns) != (height, width) or math.prod(shape) != height * width:
        return None
    fields = {**view._asdict(), **link.fields}
    sizes = {"row_maps": height, "column_maps": width}
    for side, said in (maps or {}).items():
        if said and map_size(said) > sizes[side]:
            return None
        fields[side] = said
    return Pair(name, torch_shape, path, shape, kind, rows=rows, **fields)


def vector_pair(torch: Layer, flax: Layer, link: Link, maps: Maps = ()) -> Pair | None:
    """Makes the pair of a bias, a scale or a running statistic."""
    kind = "buffer" if link.tensor in STATISTICS else "vector"
    shape = flax.shape(link.leaf)
    rank = len(torch.shape(link.tensor))
    view = _View(shape, tuple(range(len(shape))), len(shape))
    if rank > 1:  # (C, 1, 1) and the like, or (1, C)
        leading = 0 if torch.shape(link.tensor)[0] == 1 else len(shape)
        view = view._replace(row_axes=leading)
    return make_pair(torch, flax, link, kind, view, {"row_maps": maps})


def matrix_or_vector_pair(torch: Layer, flax: Layer, link: Link, flatten: Maps = ()) -> Pair | None:
    """Makes the pair of a matrix (out, in) that becomes (in, out), or of a vector."""
    shape = torch.shape(link.tensor)
    if len(shape) == 1:
        return vector_pair(torch, flax, link)
    height, width = shape
    if link.share:
        height //= link.share[1]
    kernel = flax.shape(link.leaf)
    cut = dense_cut(kernel, width, height)
    if not cut:
        return None
    view = _turned(kernel[:cut], kernel[cut:])
    return make_pair(torch, flax, link, "linear.weight", view, {"column_maps": flatten})


def dense_cut(shape: Shape, n_in: int, n_out: int) -> int:
    """Finds where the input axes of a dense kernel end; 0 if its shape does not fit."""
    for cut in range(1, len(shape)):
        if math.prod(shape[:cut]) == n_in and math.prod(shape[cut:]) == n_out:
            return cut
    return 0


def map_size(maps: Maps) -> int:
    """Returns how many values there are up to the end of the last map."""
    start, channels, places = maps[-1]
    return start + channels * places


def _sides(torch: Layer) -> tuple[int, int]:
    """Returns the rows (of a share, if it is one) and the columns of a weight without space."""
    weight = torch.shape("weight")
    if len(weight) < 2 or math.prod(weight[2:]) != 1:
        return 0, 0
    height, width = weight[:2]
    if torch.share:
        height = height // torch.share[1] if height % torch.share[1] == 0 else 0
    return height, width


def _turned(ins: Shape, outs: Shape, order: Shape = ()) -> _View:
    """Sees (*outs, *ins) in torch as (*ins, *outs) in Flax.

    Args:
      ins: The axes of inputs in Flax.
      outs: The axes of outputs in Flax.
      order: The order of those in torch, if it is another.
    """
    order = order or tuple(range(len(outs)))
    rows = [outs[axis] for axis in order]
    axes = [len(outs) + k for k in range(len(ins))]
    axes += [order.index(k) for k in range(len(outs))]
    return _View((*rows, *ins), tuple(axes), len(outs))


def _rows_of(form: str) -> Shape:
    """Reads the order of packed outputs from a form; () of another form."""
    if not form.startswith(_ROWS):
        return ()
    return tuple(int(axis) for axis in form.removeprefix(_ROWS).split(","))


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _wide_order(shape: Shape, order: Iterable[int]) -> Shape:
    """Drops axes of one place from an order; they change nothing."""
    return tuple(axis for axis in order if shape[axis] != 1)


def _fitting_orders(shape: Shape, goal: Shape, orders: Iterable[Shape]) -> tuple[str, ...]:
    """Names those orders of the axes of a shape that make it another, each once."""
    names: list[str] = []
    for order in orders:
        name = axes_name(order)
        if tuple(shape[axis] for axis in order) == goal and name not in names:
            names.append(name)
    return tuple(names)


def _kernel_order(count: int) -> Shape:
    """Returns the order of axes that makes (out, in, *spatial) into (*spatial, in, out)."""
    if count < 2:
        return tuple(range(count))
    return (*range(2, count), 1, 0)


def axes_name(order: Shape) -> str:
    """Names an order of axes: as it is, turned (of a matrix), or the axes themselves."""
    if order == tuple(range(len(order))):
        return AS_IT_IS
    if order == (1, 0):
        return TURNED
    return f"axes {','.join(map(str, order))}"


def axes_of(form: str) -> Shape:
    """Reads what `axes_name` wrote; a form without axes is as it is."""
    if form == TURNED:
        return (1, 0)
    if form.startswith("axes "):
        return tuple(int(axis) for axis in form.removeprefix("axes ").split(","))
    return ()
