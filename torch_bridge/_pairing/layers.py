"""The layers themselves: which tensor of a torch unit goes where in a Flax unit, and how.

References: ``torch.nn`` stores Linear as (out, in), Conv as (out, in / groups, *spatial) and
ConvTranspose as (in, out, *spatial). Flax stores (in, out), (*spatial, in / groups, out) and, with
``transpose_kernel=False``, (*spatial, in, out) reversed in space, because ``lax.conv_transpose``
does not turn the kernel as the gradient of a convolution does.
"""

from __future__ import annotations

import dataclasses
import math

from torch_bridge._pairing.pairing import Pairing
from torch_bridge._pairing.units import FlaxUnit, TorchUnit

Shape = tuple[int, ...]
_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
# Gates in torch's order, by the number of them; a cell without gates has one unnamed one.
_GATES = {4: ("lstm", "ifgo"), 3: ("gru", "rzn"), 1: ("rnn", "")}


@dataclasses.dataclass(frozen=True)
class Hints:
    """What the names and shapes of one pair of units do not say.

    Attributes:
      flattened: The channels-first shape (C, *spatial) from which the input of a Linear or of a
        recurrent layer was flattened, or what a norm is of.
      unflattened: The channels-first shape that the output of a Linear (or of a norm) becomes.
      transposed: Whether a kernel that fits both is that of a ConvTranspose.
      straight: Whether a matrix is stored (in, out), as by transformers' Conv1D.
    """

    flattened: Shape | None = None
    unflattened: Shape | None = None
    transposed: bool = False
    straight: bool = False


_NO_HINTS = Hints()


@dataclasses.dataclass
class Built:
    """The pairings of one pair of units, and what stood in their way."""

    pairings: list[Pairing] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mis_shaped: list[str] = dataclasses.field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether every leaf and every tensor found its place."""
        return not (self.missing or self.unexpected or self.mis_shaped)


class _Draft:
    """Collects the pairings of one pair of units and remembers what was used."""

    def __init__(self, torch_unit: TorchUnit, flax_unit: FlaxUnit) -> None:
        self.torch, self.flax = torch_unit, flax_unit
        self.built = Built()
        self.used: set[str] = set()
        self.filled: set[str] = set()

    def both(self, tensor: str, leaf: str) -> bool:
        return tensor in self.torch.entries and leaf in self.flax.entries

    def add(
        self,
        tensor: str,
        leaf: str,
        kind: str,
        split: Shape,
        axes: Shape | None = None,
        **fields,
    ) -> None:
        """Adds a pairing, or a line to `mis_shaped` if the sizes do not agree."""
        torch_name, torch_shape = self.torch.entries[tensor]
        path, shape = self.flax.entries[leaf]
        axes = tuple(range(len(split))) if axes is None else axes
        pairing = Pairing(torch_name, torch_shape, path, shape, kind, split, axes, **fields)
        self.used.add(tensor)
        self.filled.add(leaf)
        start, stop = pairing.row_range
        rows = (stop - start,) if torch_shape else ()
        agrees = math.prod(split[: pairing.row_axes]) == math.prod(rows)
        agrees &= math.prod(split[pairing.row_axes :]) == math.prod(torch_shape[1:])
        if agrees and math.prod(pairing.part_shape) == math.prod(split):
            self.built.pairings.append(pairing)
        else:
            self.clash(tensor, leaf)

    def clash(self, tensor: str, leaf: str, why: str = "") -> None:
        """Notes that tensor and leaf belong together and differ in shape."""
        name, torch_shape = self.torch.entries[tensor]
        path, shape = self.flax.entries[leaf]
        self.used.add(tensor)
        self.filled.add(leaf)
        self.built.mis_shaped.append(f"{name} {torch_shape} <-> {'/'.join(path)} {shape}{why}")

    def finish(self) -> Built:
        for key, (name, shape) in self.torch.entries.items():
            if key not in self.used:
                self.built.unexpected.append(f"{name} {shape}")
        for key, (path, shape) in self.flax.entries.items():
            if key not in self.filled:
                self.built.missing.append(f"{'/'.join(path)} {shape}")
        return self.built


def build(torch_unit: TorchUnit, flax_unit: FlaxUnit, hints: Hints) -> Built:
    """Pairs the tensors of one torch layer with the leaves of one Flax layer of the same family."""
    draft = _Draft(torch_unit, flax_unit)
    if torch_unit.family == flax_unit.family:
        _BUILDERS[torch_unit.family](draft, hints)
    return draft.finish()


def orientation(torch_shape: Shape, shape: Shape) -> str:
    """What a kernel can be by its shape: ``conv``, ``transposed``, ``both`` or ``none``.

    ``conv`` is (*spatial, b, a) for torch's (a, b, *spatial). A Flax ConvTranspose with
    ``transpose_kernel=True`` has this form too, and needs nothing reversed.
    """
    a, b, *spatial = torch_shape
    straight = shape == (*spatial, b, a)
    swapped = shape == (*spatial, a, b)
    return {(1, 1): "both", (1, 0): "conv", (0, 1): "transposed"}.get((straight, swapped), "none")


def _weight(draft: _Draft, hints: Hints) -> None:
    moved = None
    if draft.both("weight", "embedding"):
        shape = draft.torch.entries["weight"][1]
        if shape == draft.flax.entries["embedding"][1]:
            draft.add("weight", "embedding", "embedding", shape)
        else:
            draft.clash("weight", "embedding")
    elif draft.both("weight", "kernel"):
        if len(draft.torch.entries["weight"][1]) == 2:
            moved = hints.unflattened
            rows = draft.torch.rows("weight")
            kind = "conv1d.weight" if hints.straight else "linear.weight"
            _linear(draft, "weight", "kernel", kind, rows, hints)
        else:
            _conv(draft, hints)
    if draft.both("bias", "bias"):
        _vector(draft, "bias", "bias", rows=draft.torch.rows("bias"), moved=moved)


def _conv(draft: _Draft, hints: Hints) -> None:
    torch_shape = draft.torch.entries["weight"][1]
    form = orientation(torch_shape, draft.flax.entries["kernel"][1])
    spatial = tuple(range(2, len(torch_shape)))
    if form == "none":
        draft.clash("weight", "kernel")
    elif form == "transposed" or (form == "both" and hints.transposed):
        flip = tuple(range(len(spatial)))
        kind = "conv_transpose.weight"
        draft.add("weight", "kernel", kind, torch_shape, (*spatial, 0, 1), flip=flip)
    else:
        draft.add("weight", "kernel", "conv.weight", torch_shape, (*spatial, 1, 0))


def _linear(
    draft: _Draft,
    tensor: str,
    leaf: str,
    kind: str,
    rows: tuple[int, int] | None = None,
    hints: Hints = _NO_HINTS,
) -> None:
    """(out, in) -> (*in, *out): a Dense, or a DenseGeneral with several input or output axes."""
    height, width = draft.torch.entries[tensor][1]
    height = rows[1] - rows[0] if rows else height
    n_in, n_out = (height, width) if hints.straight else (width, height)
    shape = draft.flax.entries[leaf][1]
    cut = dense_cut(shape, n_in, n_out)
    sizes = (math.prod(hints.flattened or (n_in,)), math.prod(hints.unflattened or (n_out,)))
    if not cut or sizes != (n_in, n_out) or (rows and hints.straight):
        draft.clash(tensor, leaf, _packed_columns(draft, tensor, leaf))
        return
    ins, order = _moved(shape[:cut], hints.flattened)
    outs, out_order = _moved(shape[cut:], hints.unflattened)
    if hints.straight:
        axes = (*order, *(len(ins) + axis for axis in out_order))
        draft.add(tensor, leaf, kind, (*ins, *outs), axes, row_axes=len(ins))
    else:
        axes = (*(len(outs) + axis for axis in order), *out_order)
        draft.add(tensor, leaf, kind, (*outs, *ins), axes, row_axes=len(outs), rows=rows)


def _moved(shape: Shape, channels_first: Shape | None) -> tuple[Shape, Shape]:
    """How torch has these axes, and their order in Flax, which flattens (*spatial, C)."""
    if channels_first is None:
        return shape, tuple(range(len(shape)))
    return channels_first, (*range(1, len(channels_first)), 0)


def _packed_columns(draft: _Draft, tensor: str, leaf: str) -> str:
    """What to do with a packed matrix that is stored (in, out), of which rules take rows apart."""
    shape, parts = draft.torch.entries[tensor][1], draft.torch.part
    if parts is None or not dense_cut(draft.flax.entries[leaf][1], shape[0], shape[1] // parts[1]):
        return ""
    return (
        f": stored (in, out), it has {parts[1]} layers side by side, which no rule takes apart. "
        f"Give the Flax model one kernel of shape {shape}, as torch's PowerSGD state is one, too; "
        f"for parameters alone, put numpy.split(weight, {parts[1]}, axis=1) into the state dict"
    )


def dense_cut(shape: Shape, n_in: int, n_out: int) -> int:
    """Where the input axes of a dense kernel end; 0 if its shape does not fit."""
    cuts = range(1, len(shape))
    sizes = ((cut, math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts)
    return next((cut for cut, before, after in sizes if (before, after) == (n_in, n_out)), 0)


def _vector(
    draft: _Draft,
    tensor: str,
    leaf: str,
    kind: str = "vector",
    rows: tuple[int, int] | None = None,
    moved: Shape | None = None,
) -> None:
    """(n,) -> (n,), or (heads, n / heads); `moved` is the map of which it has one value each."""
    if draft.both(tensor, leaf):
        shape, order = _moved(draft.flax.entries[leaf][1], moved)
        draft.add(tensor, leaf, kind, shape, order, row_axes=len(shape), rows=rows)


def _norm(draft: _Draft, hints: Hints) -> None:
    moved = hints.flattened or hints.unflattened
    for tensor, leaf in _NORM.items():
        kind = "buffer" if tensor.startswith("running") else "vector"
        _vector(draft, tensor, leaf, kind, moved=moved)
    _vector(draft, "weight", "negative_slope", moved=moved)


def _array(draft: _Draft, hints: Hints) -> None:
    del hints
    shape = draft.torch.entries[""][1]
    if shape == draft.flax.entries[""][1]:
        draft.add("", "", "array", shape, row_axes=min(1, len(shape)))
    else:
        draft.clash("", "")


def _attention(draft: _Draft, hints: Hints) -> None:
    del hints
    for position, (letter, name) in enumerate(zip("qkv", ("query", "key", "value"), strict=True)):
        if draft.both("in_proj_weight", f"{name}.kernel"):
            rows = _third(draft, "in_proj_weight", position)
            _linear(draft, "in_proj_weight", f"{name}.kernel", "mha.in_proj", rows)
        elif draft.both(f"{letter}_proj_weight", f"{name}.kernel"):
            _linear(draft, f"{letter}_proj_weight", f"{name}.kernel", "mha.separate_proj")
        if draft.both("in_proj_bias", f"{name}.bias"):
            rows = _third(draft, "in_proj_bias", position)
            _vector(draft, "in_proj_bias", f"{name}.bias", "mha.in_proj_bias", rows)
    if draft.both("out_proj.weight", "out.kernel"):
        _linear(draft, "out_proj.weight", "out.kernel", "mha.out_proj")
    _vector(draft, "out_proj.bias", "out.bias")


def _third(draft: _Draft, tensor: str, position: int) -> tuple[int, int]:
    width = draft.torch.entries[tensor][1][0] // 3
    return (position * width, (position + 1) * width)


def _recurrent(draft: _Draft, hints: Hints) -> None:
    of_inputs = Hints(flattened=hints.flattened)
    if "weight_hh" not in draft.torch.entries:
        return
    packed, hidden = draft.torch.entries["weight_hh"][1]
    if packed % hidden or packed // hidden not in _GATES:
        return
    cell, letters = _GATES[packed // hidden]
    if "dense_i.kernel" in draft.flax.entries:  # flax.nnx packs the gates as torch does
        gates: list[tuple[str, str, tuple[int, int] | None]] = [("dense_i", "dense_h", None)]
    elif not letters:
        gates = [("i", "h", None)]
    else:
        ranges = ((k * hidden, (k + 1) * hidden) for k in range(len(letters)))
        gates = [(f"i{g}", f"h{g}", rows) for g, rows in zip(letters, ranges, strict=True)]
    for input_side, hidden_side, rows in gates:
        sides = (("weight_ih", input_side, of_inputs), ("weight_hh", hidden_side, _NO_HINTS))
        for tensor, side, hint in sides:
            if draft.both(tensor, f"{side}.kernel"):
                _linear(draft, tensor, f"{side}.kernel", f"{cell}.{tensor}", rows, hint)
        if cell == "gru" and rows is None:
            _packed_gru_bias(draft, hidden)
        else:
            _gate_bias(draft, f"{cell}.bias", f"{input_side}.bias", f"{hidden_side}.bias", rows)


def _gate_bias(
    draft: _Draft, kind: str, input_leaf: str, hidden_leaf: str, rows: tuple[int, int] | None
) -> None:
    """Torch has two biases that are added at once; Flax has both, or one that is their sum."""
    leaves = [leaf for leaf in (input_leaf, hidden_leaf) if leaf in draft.flax.entries]
    if not leaves or not {"bias_ih", "bias_hh"} <= draft.torch.entries.keys():
        return
    for tensor, own in (("bias_ih", input_leaf), ("bias_hh", hidden_leaf)):
        leaf = own if own in leaves else leaves[0]
        shape = draft.flax.entries[leaf][1]
        draft.add(tensor, leaf, kind, shape, rows=rows, terms=3 - len(leaves), carries=leaf == own)


def _packed_gru_bias(draft: _Draft, hidden: int) -> None:
    """``nnx.GRUCell`` adds no bias to the hidden side: r and z can merge theirs, n cannot."""
    tensors = {"bias_ih": True, "bias_hh": False}
    if not all(draft.both(tensor, "dense_i.bias") for tensor in tensors):
        return
    for rows in ((0, 2 * hidden), (2 * hidden, 3 * hidden)):
        for tensor, carries in tensors.items():
            draft.add(
                tensor,
                "dense_i.bias",
                "gru.bias",
                (rows[1] - rows[0],),
                rows=rows,
                slot=rows,
                terms=2,
                carries=carries,
                must_be_zero=rows[0] > 0 and not carries,
            )


_BUILDERS = {
    "weight": _weight,
    "norm": _norm,
    "array": _array,
    "attention": _attention,
    "recurrent": _recurrent,
}
