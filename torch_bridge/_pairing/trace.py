"""Reads from the traced program of a Flax model what it does with its leaves and inputs.

The program shows in which order the model uses its leaves, which maps it flattens, and which axes
it divides into parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jax.extend import core

from torch_bridge._pairing.kinds import without_ones
from torch_bridge._pairing.pairs import Path, Shape
from torch_bridge._pairing.watch import Watch, is_variable, operations

# Operations whose result is still the same leaf.
_VIEWS = frozenset(
    {"reshape", "transpose", "convert_element_type", "broadcast_in_dim", "squeeze", "rev", "copy"}
)
_PARTS = (2, 3)  # numbers of parts of a packed layer: (gate, value), (query, key, value)
_MOST_PARTS = 5  # the same if the model cuts its outputs, as for the gates of a cell, or in Mamba


class Trace:
    """What a Flax model does with inputs in one order of their axes.

    Attributes:
      inputs: The inputs.
      positions: Path of a leaf -> its position in the order in which the model uses leaves.
      upward: Paths of the kernels that the model uses in a ConvTranspose with a stride.
      feature_maps: (number of values, number of channels) of each map that the model flattens or
        unflattens.
      watch: The program, to run it and watch what it applies its leaves to; None without a program.
      splits: The axes that the model divides into a few parts: (length, ratio of the parts).
    """

    def __init__(
        self,
        inputs: tuple[np.ndarray, ...],
        program: core.ClosedJaxpr | None,
        paths: Iterable[Path],
    ) -> None:
        """Reads the traced program of a model.

        Args:
          inputs: The inputs with which the model was traced.
          program: The program; None if the model cannot be traced, which then shows nothing.
          paths: The paths of all leaves, in the order of the program's arguments.
        """
        self.inputs = inputs
        self.watch: Watch | None = None
        self.positions = dict.fromkeys(paths, math.inf)  # unused leaves come last
        self.upward: set[Path] = set()
        self.feature_maps: dict[tuple[int, int], None] = {}  # a set that keeps its order
        self.splits = set()
        if program is None:
            return
        self.watch = Watch(program, self.positions)
        leaves = dict(zip(program.jaxpr.invars, self.positions, strict=False))
        cuts = {}  # (array, axis) -> where the parts that the model takes start and end
        for place, equation in enumerate(operations(program.jaxpr, leaves)):
            name = equation.primitive.name
            options = equation.params
            result = equation.outvars[0]
            used = list(filter(None, map(leaves.get, filter(is_variable, equation.invars))))
            leaves.pop(result, None)
            if used and name in _VIEWS:
                leaves[result] = used[0]
                continue
            for path in used:
                self.positions[path] = min(self.positions[path], place)
            if max(options.get("lhs_dilation", ()), default=1) > 1:
                self.upward.update(used)
            if name == "reshape":
                before = equation.invars[0].aval.shape
                self._add_merged(before, result.aval.shape)
                self._add_divided(before, result.aval.shape)
            elif name == "split":
                length = equation.invars[0].aval.shape[options["axis"]]
                self._add_split(length, options["sizes"])
            elif name == "slice":
                whole = equation.invars[0]
                ends = zip(options["start_indices"], options["limit_indices"], strict=True)
                for axis, (start, stop) in enumerate(ends):
                    cuts.setdefault((whole, axis), set()).update((start, stop))
            elif name == "dot_general":  # the kernel may have several input or output axes
                kernel = equation.invars[1].aval.shape
                contracted = options["dimension_numbers"][0][1]
                for sizes in (np.take(kernel, contracted), np.delete(kernel, contracted)):
                    self._add_divided([math.prod(sizes.tolist())], sizes.tolist())
        for (whole, axis), places in cuts.items():
            length = whole.aval.shape[axis]
            sizes = np.diff(sorted({0, *places, length})).tolist()
            self._add_split(length, sizes)
            for size in sizes:  # the model may cut the rest of the axis later
                if length % size == 0 and length // size in _PARTS:
                    self._add_split(length, [size] * (length // size))

    def _add_merged(self, wide: Sequence[int], narrow: Sequence[int]) -> Shape:
        """Adds the map whose axes become the last axis; returns their lengths, or ()."""
        sizes = without_ones(wide)
        last = (without_ones(narrow) or (0,))[-1]
        for cut in range(len(sizes) - 1):
            if math.prod(sizes[cut:]) == last:
                self.feature_maps[last, sizes[-1]] = None
                return sizes[cut:]
        return ()

    def _add_divided(self, narrow: Sequence[int], wide: Sequence[int]) -> None:
        """Adds the map into which the last axis is divided, and each axis of a few parts."""
        sizes = self._add_merged(wide, narrow)
        for size in sizes:
            if size in _PARTS:
                self.splits.add((math.prod(sizes), (1,) * size))

    def _add_split(self, length: int, sizes: Sequence[int]) -> None:
        """Adds an axis that the model divides into a few parts."""
        if 1 < len(sizes) <= _MOST_PARTS and min(sizes) > 0:
            unit = math.gcd(*sizes)
            self.splits.add((length, tuple(size // unit for size in sizes)))
