"""Two layers that belong together: which tensor becomes which leaf, and how.

References: ``torch.nn`` stores Linear as (out, in), Conv as (out, in / groups, *spatial) and
ConvTranspose as (in, out, *spatial). Flax stores (in, out), (*spatial, in / groups, out) and, with
``transpose_kernel=False``, (*spatial, in, out) reversed in space, because ``lax.conv_transpose``
does not turn the kernel as the gradient of a convolution does.
"""

from __future__ import annotations

import dataclasses
import math

from torch_bridge._pairing.layers import Layer, Shape
from torch_bridge._pairing.pairs import Pair

_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
# Gates in torch's order, by the number of them; a cell without gates has one unnamed one.
_GATES = {4: ("lstm", "ifgo"), 3: ("gru", "rzn"), 1: ("rnn", "")}
Rows = tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Hints:
    """What the names and shapes of two layers do not say.

    Attributes:
      flatten: The channels-first shape (C, *spatial) from which the input of a Linear or of a
        recurrent layer was flattened, or what a norm is of.
      unflatten: The channels-first shape that the output of a Linear (or of a norm) becomes.
      swapped: Whether a kernel that fits both is stored (in, out): as by transformers' Conv1D, or
        as that of a ConvTranspose.
    """

    flatten: Shape | None = None
    unflatten: Shape | None = None
    swapped: bool = False


_NO_HINTS = Hints()


class Build:
    """The pairs of two layers, and what stood in their way.

    Attributes:
      pairs: Of those tensors and leaves that agree.
      mis_shaped: A line for each two that belong together and do not agree.
    """

    def __init__(self, torch: Layer, flax: Layer, hints: Hints = _NO_HINTS) -> None:
        self.torch, self.flax, self.hints = torch, flax, hints
        self.pairs: list[Pair] = []
        self.mis_shaped: list[str] = []
        self._done: set[str] = set()  # tensors and leaves; no name is of both sides here
        if torch.kind == flax.kind:
            getattr(self, f"_{torch.kind}")()

    @property
    def swapped(self) -> bool:
        """Whether the kernel is stored (in, out)."""
        usual, swapped = orders(self.torch.shape("weight"), self.flax.shape("kernel"))
        return self.hints.swapped if usual == swapped else swapped

    @property
    def missing(self) -> list[str]:
        """Leaves that nothing fills."""
        parts = self.flax.parts.items()
        return [f"{'/'.join(p)} {s}" for key, (p, s) in parts if f"/{key}" not in self._done]

    @property
    def unexpected(self) -> list[str]:
        """Tensors that go nowhere."""
        return [f"{n} {s}" for key, (n, s) in self.torch.parts.items() if key not in self._done]

    @property
    def fits(self) -> bool:
        """Whether every leaf and every tensor found its place."""
        return not (self.missing or self.unexpected or self.mis_shaped)

    def _both(self, tensor: str, leaf: str) -> bool:
        return tensor in self.torch.parts and leaf in self.flax.parts

    def _add(
        self, tensor: str, leaf: str, kind: str, split: Shape, axes: Shape | None = None, **fields
    ) -> None:
        """Adds a pair, or a line to `mis_shaped` if the sizes do not agree."""
        (name, torch_shape), (path, shape) = self.torch.parts[tensor], self.flax.parts[leaf]
        axes = tuple(range(len(split))) if axes is None else axes
        pair = Pair(name, torch_shape, path, shape, kind, split, axes, **fields)
        self._done |= {tensor, f"/{leaf}"}
        start, stop = pair.row_range
        agrees = math.prod(split[: pair.row_axes]) == (stop - start if torch_shape else 1)
        agrees &= math.prod(split[pair.row_axes :]) == math.prod(torch_shape[1:])
        if agrees and math.prod(shape) == math.prod(split):
            self.pairs.append(pair)
        else:
            self._clash(tensor, leaf)

    def _clash(self, tensor: str, leaf: str) -> None:
        (name, torch_shape), (path, shape) = self.torch.parts[tensor], self.flax.parts[leaf]
        said = {o: m for o in ("flatten", "unflatten") if (m := getattr(self.hints, o))}
        why = "".join(f", with {option}={answer}" for option, answer in said.items())
        self._done |= {tensor, f"/{leaf}"}
        self.mis_shaped.append(f"{name} {torch_shape} <-> {'/'.join(path)} {shape}{why}")

    def _weight(self) -> None:
        moved, rows = None, self.torch.rows("weight")
        if self._both("weight", "embedding"):
            shape = self.torch.shape("weight")
            if shape == self.flax.shape("embedding"):
                self._add("weight", "embedding", "embedding", shape)
            else:
                self._clash("weight", "embedding")
        elif self._both("weight", "kernel"):
            if len(self.torch.shape("weight")) == 2:
                moved = self.hints.unflatten
                hints = dataclasses.replace(self.hints, swapped=self.swapped)
                kind = "conv1d.weight" if self.swapped else "linear.weight"
                self._linear("weight", "kernel", kind, rows, hints)
            else:
                self._conv()
        if self._both("bias", "bias"):
            self._vector("bias", "bias", rows=self.torch.rows("bias"), moved=moved)

    def _conv(self) -> None:
        shape = self.torch.shape("weight")
        spatial = tuple(range(2, len(shape)))
        if not any(orders(shape, self.flax.shape("kernel"))):
            self._clash("weight", "kernel")
        elif self.swapped:
            kind, flip = "conv_transpose.weight", tuple(range(len(spatial)))
            self._add("weight", "kernel", kind, shape, (*spatial, 0, 1), flip=flip)
        else:
            self._add("weight", "kernel", "conv.weight", shape, (*spatial, 1, 0))

    def _linear(
        self, tensor: str, leaf: str, kind: str, rows: Rows = None, hints: Hints = _NO_HINTS
    ) -> None:
        """(out, in) -> (*in, *out): a Dense, or a DenseGeneral with several axes of either."""
        height, width = self.torch.shape(tensor)
        height = rows[1] - rows[0] if rows else height
        n_in, n_out = (height, width) if hints.swapped else (width, height)
        shape = self.flax.shape(leaf)
        cut = dense_cut(shape, n_in, n_out)
        sizes = (math.prod(hints.flatten or (n_in,)), math.prod(hints.unflatten or (n_out,)))
        if not cut or sizes != (n_in, n_out) or (rows and hints.swapped):
            self._clash(tensor, leaf)
            return
        ins, order = _moved(shape[:cut], hints.flatten)
        outs, out_order = _moved(shape[cut:], hints.unflatten)
        if hints.swapped:
            axes = (*order, *(len(ins) + axis for axis in out_order))
            self._add(tensor, leaf, kind, (*ins, *outs), axes, row_axes=len(ins))
        else:
            axes = (*(len(outs) + axis for axis in order), *out_order)
            self._add(tensor, leaf, kind, (*outs, *ins), axes, row_axes=len(outs), rows=rows)

    def _vector(
        self,
        tensor: str,
        leaf: str,
        kind: str = "vector",
        rows: Rows = None,
        moved: Shape | None = None,
    ) -> None:
        """(n,) -> (n,), or (heads, n / heads); `moved` is the map of which it has a value each."""
        if self._both(tensor, leaf):
            shape, order = _moved(self.flax.shape(leaf), moved)
            self._add(tensor, leaf, kind, shape, order, row_axes=len(shape), rows=rows)

    def _norm(self) -> None:
        moved = self.hints.flatten or self.hints.unflatten
        for tensor, leaf in _NORM.items():
            kind = "buffer" if tensor.startswith("running") else "vector"
            self._vector(tensor, leaf, kind, moved=moved)
        self._vector("weight", "negative_slope", moved=moved)

    def _array(self) -> None:
        shape = self.torch.shape("")
        if shape != self.flax.shape(""):
            self._clash("", "")
        elif len(shape) == 1:
            moved = self.hints.flatten or self.hints.unflatten
            self._vector("", "", "array", moved=moved)
        else:
            self._add("", "", "array", shape, row_axes=min(1, len(shape)))

    def _attention(self) -> None:
        for place, (letter, name) in enumerate(zip("qkv", ("query", "key", "value"), strict=True)):
            if self._both("in_proj_weight", f"{name}.kernel"):
                rows = self._third("in_proj_weight", place)
                self._linear("in_proj_weight", f"{name}.kernel", "mha.in_proj", rows)
            elif self._both(f"{letter}_proj_weight", f"{name}.kernel"):
                self._linear(f"{letter}_proj_weight", f"{name}.kernel", "mha.separate_proj")
            if self._both("in_proj_bias", f"{name}.bias"):
                rows = self._third("in_proj_bias", place)
                self._vector("in_proj_bias", f"{name}.bias", "mha.in_proj_bias", rows)
        if self._both("out_proj.weight", "out.kernel"):
            self._linear("out_proj.weight", "out.kernel", "mha.out_proj")
        self._vector("out_proj.bias", "out.bias")

    def _third(self, tensor: str, place: int) -> tuple[int, int]:
        width = self.torch.shape(tensor)[0] // 3
        return (place * width, (place + 1) * width)

    def _recurrent(self) -> None:
        packed, hidden = self.torch.shape("weight_hh") or (1, 2)
        if packed % hidden or packed // hidden not in _GATES:
            return
        cell, letters = _GATES[packed // hidden]
        if "dense_i.kernel" in self.flax.parts:  # flax.nnx packs the gates as torch does
            gates: list[tuple[str, str, Rows]] = [("dense_i", "dense_h", None)]
        elif not letters:
            gates = [("i", "h", None)]
        else:
            ranges = ((k * hidden, (k + 1) * hidden) for k in range(len(letters)))
            gates = [(f"i{g}", f"h{g}", rows) for g, rows in zip(letters, ranges, strict=True)]
        of_inputs = Hints(flatten=self.hints.flatten)
        for ours, hidden_side, rows in gates:
            sides = (("weight_ih", ours, of_inputs), ("weight_hh", hidden_side, _NO_HINTS))
            for tensor, side, hints in sides:
                if self._both(tensor, f"{side}.kernel"):
                    self._linear(tensor, f"{side}.kernel", f"{cell}.{tensor}", rows, hints)
            # nnx.GRUCell adds no bias to the hidden side of gate n, inside torch's reset gate.
            zero = (2 * hidden, 3 * hidden) if cell == "gru" and rows is None else None
            self._gate_bias(f"{cell}.bias", f"{ours}.bias", f"{hidden_side}.bias", rows, zero)

    def _gate_bias(
        self, kind: str, input_leaf: str, hidden_leaf: str, rows: Rows, zero: Rows
    ) -> None:
        """Torch has two biases that are added at once; Flax has both, or one that is their sum."""
        leaves = [leaf for leaf in (input_leaf, hidden_leaf) if leaf in self.flax.parts]
        if not leaves or not {"bias_ih", "bias_hh"} <= self.torch.parts.keys():
            return
        terms = 3 - len(leaves)
        for tensor, own in (("bias_ih", input_leaf), ("bias_hh", hidden_leaf)):
            leaf = own if own in leaves else leaves[0]
            shape, carries = self.flax.shape(leaf), leaf == own
            must_be_zero = None if carries else zero
            self._add(
                tensor, leaf, kind, shape,
                rows=rows, terms=terms, carries=carries, must_be_zero=must_be_zero,
            )  # fmt: skip


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
