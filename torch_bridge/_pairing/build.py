"""Two layers that belong together: which tensor becomes which leaf, and how.

References: ``torch.nn`` stores Linear as (out, in), Conv as (out, in / groups, *spatial) and
ConvTranspose as (in, out, *spatial). Flax stores (in, out), (*spatial, in / groups, out) and, with
``transpose_kernel=False``, (*spatial, in, out) reversed in space, because ``lax.conv_transpose``
does not turn the kernel as the gradient of a convolution does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch_bridge._pairing.layers import Layer, Shape
from torch_bridge._pairing.pairs import Pair

# What torch's tensors can be in Flax, where one is one.
_LEAVES = {
    "weight": ("kernel", "embedding", "scale", "negative_slope"),
    "running_mean": ("mean",),
    "running_var": ("var",),
}
# Gates in torch's order, by the number of them; a cell without gates has one unnamed one.
_GATES = {4: "ifgo", 3: "rzn", 1: ""}


class Answer(NamedTuple):
    """What the names and shapes of two layers do not say."""

    flatten: Shape | None = None  # the map (C, *spatial) that the inputs are, or a norm is of
    unflatten: Shape | None = None  # the map that the outputs (or a norm's) become
    swapped: bool = False  # whether a kernel that fits both ways is stored (in, out)


_UNKNOWN = Answer()


class Built(NamedTuple):
    """The pairs of two layers, and a line for each tensor and leaf without one."""

    pairs: list[Pair]
    problems: dict[str, list[str]]  # missing, unexpected and mis_shaped, as `CheckpointMismatch`

    @property
    def fits(self) -> bool:
        """Whether every leaf and every tensor found its place."""
        return not any(self.problems.values())


class _Link(NamedTuple):
    """One tensor of a layer and its leaf, by what the layers call them."""

    tensor: str
    leaf: str
    share: tuple[int, int] | None = None  # (k, n): the leaf is the k-th of n parts of the rows
    answer: Answer = _UNKNOWN
    fields: Mapping[str, Any] = {}  # of the pair


def build(torch: Layer, flax: Layer, answer: Answer = _UNKNOWN) -> Built:
    """Pairs the tensors of a torch layer and the leaves of a Flax layer.

    Args:
      torch: The one.
      flax: The other. Of another kind, it has nothing in common with the first.
      answer: What is known about them.
    """
    links = [*_links(torch, flax, answer)] if torch.kind == flax.kind else []
    links = [link for link in links if link.tensor in torch.parts]
    placed = [link for link in links if link.leaf in flax.parts]
    # Of a packed tensor all parts have a leaf, or some values would be lost.
    lost = {*torch.parts} - {a.tensor for a in placed} | {
        a.tensor for a in links if a not in placed
    }
    pairs: list[Pair] = []
    mis_shaped: list[str] = []
    for link in placed:
        if pair := _pair(torch, flax, link):
            pairs.append(pair)
            continue
        maps = {"flatten": answer.flatten, "unflatten": answer.unflatten}
        why = "".join(f", with {option}={said}" for option, said in maps.items() if said)
        mis_shaped.append(f"{torch.line(link.tensor)} <-> {flax.line(link.leaf)}{why}")
    leaves = {link.leaf for link in placed}
    problems = {
        "missing": [flax.line(leaf) for leaf in flax.parts if leaf not in leaves],
        "unexpected": [torch.line(tensor) for tensor in torch.parts if tensor in lost],
        "mis_shaped": mis_shaped,
    }
    return Built(pairs, problems)


def _links(torch: Layer, flax: Layer, answer: Answer) -> Iterator[_Link]:
    """Which tensor belongs to which leaf; some of them may not be there."""
    if torch.kind == "attention":
        for place, name in enumerate(("query", "key", "value")):
            yield _Link("in_proj_weight", f"{name}.kernel", (place, 3))
            yield _Link(f"{name[0]}_proj_weight", f"{name}.kernel")
            yield _Link("in_proj_bias", f"{name}.bias", (place, 3))
        yield _Link("out_proj.weight", "out.kernel")
        yield _Link("out_proj.bias", "out.bias")
    elif torch.kind == "recurrent":
        yield from _recurrent(torch, flax, answer)
    else:
        for tensor in torch.parts:
            leaves = (leaf for leaf in _LEAVES.get(tensor, (tensor,)) if leaf in flax.parts)
            yield _Link(tensor, next(leaves, ""), torch.share, answer)


def _recurrent(torch: Layer, flax: Layer, answer: Answer) -> Iterator[_Link]:
    packed, hidden = torch.shape("weight_hh") or (1, 2)
    letters = None if packed % hidden else _GATES.get(packed // hidden)
    if letters is None:
        return
    gates: list[tuple[str, str, tuple[int, int] | None]] = [
        (f"i{letter}", f"h{letter}", (k, len(letters))) for k, letter in enumerate(letters)
    ]
    if "dense_i.kernel" in flax.parts:  # flax.nnx packs the gates as torch does
        gates = [("dense_i", "dense_h", None)]
    for of_input, of_hidden, share in gates or [("i", "h", None)]:
        yield _Link("weight_ih", f"{of_input}.kernel", share, Answer(answer.flatten))
        yield _Link("weight_hh", f"{of_hidden}.kernel", share)
        # Torch has two biases that are added at once; Flax has both, or one that is their sum.
        biases = {"bias_ih": f"{of_input}.bias", "bias_hh": f"{of_hidden}.bias"}
        leaves = [leaf for leaf in biases.values() if leaf in flax.parts]
        if not biases.keys() <= torch.parts.keys():
            continue
        for tensor, own in sorted(biases.items(), key=lambda item: item[1] not in leaves):
            leaf = leaves[0] if leaves and own not in leaves else own
            # nnx.GRUCell adds no bias to the hidden side of gate n, inside torch's reset gate.
            lost = letters == "rzn" and share is None and leaf != own
            fields = {
                "terms": 3 - len(leaves),
                "must_be_zero": (2 * hidden, 3 * hidden) if lost else None,
            }
            yield _Link(tensor, leaf, share, fields=fields)


def _pair(torch: Layer, flax: Layer, link: _Link) -> Pair | None:
    """How a tensor becomes a leaf; None where their shapes do not agree."""
    (name, torch_shape), (path, shape) = torch.parts[link.tensor], flax.parts[link.leaf]
    rows, height, width = None, math.prod(torch_shape[:1]), math.prod(torch_shape[1:])
    fits, flip = True, ()
    if link.share:
        place, count = link.share
        height //= count
        rows = (place * height, (place + 1) * height)
    flatten, unflatten, swapped = link.answer
    usual, other = orders(torch_shape, shape)
    if torch.kind != "weight" or usual != other:  # else it is as was answered
        swapped = torch.kind == "weight" and other
    space = tuple(range(len(torch_shape) - 2))
    if len(torch_shape) == 1:
        kind = "buffer" if link.tensor.startswith("running") else "vector"
        moved = unflatten if torch.kind == "weight" else flatten or unflatten
        split, axes, row_axes = _split((), shape, None, moved)
    elif not link.leaf.endswith("kernel"):
        kind, fits = link.leaf or "array", torch_shape == shape
        split, axes, row_axes = _split(shape[:1], shape[1:], swapped=True)
    elif len(torch_shape) == 2:
        kind = "conv1d.weight" if swapped else "linear.weight"
        cut = dense_cut(shape, *((height, width) if swapped else (width, height)))
        fits = cut > 0 and not (swapped and rows)
        split, axes, row_axes = _split(shape[:cut], shape[cut:], flatten, unflatten, swapped)
    elif swapped:
        kind, fits, flip = "conv_transpose.weight", other, space
        split, axes, row_axes = torch_shape, (*(k + 2 for k in space), 0, 1), 1
    else:  # the inputs are a map, which Flax has channels-last
        kind, fits = "conv.weight", usual
        split, axes, row_axes = _split(shape[:-1], shape[-1:], torch_shape[1:])
    sides = split[:row_axes], split[row_axes:], shape
    if not fits or [*map(math.prod, sides)] != [height, width, height * width]:
        return None
    return Pair(
        name, torch_shape, path, shape, kind, split, axes, row_axes, flip, rows, **link.fields
    )


def _split(
    ins: Shape,
    outs: Shape,
    flatten: Shape | None = None,
    unflatten: Shape | None = None,
    swapped: bool = False,
) -> tuple[Shape, Shape, int]:
    """Of (*outs, *ins) in torch, (*ins, *outs) in Flax, the first three: shape, axes, row axes.

    Swapped, torch has (*ins, *outs) too.
    """
    ins, order = _moved(ins, flatten)
    outs, out_order = _moved(outs, unflatten)
    if swapped:
        return (*ins, *outs), (*order, *(len(ins) + k for k in out_order)), len(ins)
    return (*outs, *ins), (*(len(outs) + k for k in order), *out_order), len(outs)


def orders(torch_shape: Shape, shape: Shape) -> tuple[bool, bool]:
    """Whether a torch kernel can be (out, in, *spatial) by its shape, and whether (in, out, ...).

    The first becomes (*spatial, in, out). A Flax ConvTranspose with ``transpose_kernel=True`` has
    this form too, and needs nothing reversed.
    """
    if len(torch_shape) < 2 or not shape:
        return False, False
    a, b, *spatial = torch_shape
    if not spatial:
        return bool(dense_cut(shape, b, a)), bool(dense_cut(shape, a, b))
    return shape == (*spatial, b, a), shape == (*spatial, a, b)


def dense_cut(shape: Shape, n_in: int, n_out: int) -> int:
    """Where the input axes of a dense kernel end; 0 if its shape does not fit."""
    cuts = range(1, len(shape))
    sizes = ((cut, math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts)
    return next((cut for cut, before, after in sizes if (before, after) == (n_in, n_out)), 0)


def _moved(shape: Shape, channels_first: Shape | None) -> tuple[Shape, Shape]:
    """How torch has these axes, and their order in Flax, which flattens (*spatial, C)."""
    if channels_first is None:
        return shape, tuple(range(len(shape)))
    return channels_first, (*range(1, len(channels_first)), 0)
