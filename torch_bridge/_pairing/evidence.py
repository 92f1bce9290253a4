"""Runs the Flax model on an example, for which torch's outputs are known.

A run shows how much the outputs differ with some leaves. A trace shows in which order the Flax
model uses its leaves, and which maps it flattens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from torch_bridge._base.tensors import shape_of, to_numpy
from torch_bridge._pairing.kinds import without_ones
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.pairs import Path, Shape

Apply: TypeAlias = Callable[..., Any]
Example: TypeAlias = tuple[Sequence[Any], Any]  # inputs and outputs of the torch module
TRIES = 500  # the most runs of the Flax model until one gives torch's outputs
# The largest difference that is allowed, relative to the largest output: about 84 units of
# rounding in float32, and 16 units in a narrower dtype, since every layer rounds by such a unit.
_MOST = 1e-5
_MOST_UNITS = 16
# Two correct runs round in every operation, but a control rounds only once, at its beginning.
# Correct conversions of 54 kinds of models differ from torch by at most 2 controls, and one wide
# convolution by 8. With a tenth of the eps in their norms 29 of them differ by 1 to 280 controls,
# 23 of these by more than 10.
_CONTROLS = 10
_COPIES = 8  # how often a larger batch repeats the example's rows
_OTHER_AXIS = 1e-3  # a larger difference of the same rows shows that axis 0 is not the batch
_LEAST_UNITS = 8  # units of rounding of the largest output that are always allowed
# Operations whose result is still the same leaf.
_VIEWS = frozenset(
    {"reshape", "transpose", "convert_element_type", "broadcast_in_dim", "squeeze", "rev", "copy"}
)
_MAP_AXES = 3  # from 3 axes on, channels may be the second axis in torch and the last in Flax
_PARTS = (2, 3)  # numbers of parts of a packed layer: (gate, value), (query, key, value)
_MOST_PARTS = 5  # the same if the model cuts its outputs, as for the gates of a cell, or in Mamba


class Difference(NamedTuple):
    """The difference between the outputs of the Flax model and torch's.

    Attributes:
      largest: The largest difference, relative to the largest output.
      mean: The norm of the difference, relative to the norm of the outputs.
      control: The largest difference between two runs of the Flax model, where the second run has
        leaves and inputs changed by one rounding. If the outputs differ too much from torch's, no
        control is run and this is infinite.
      allowed: The largest difference that rounding explains, relative to the largest output.
    """

    largest: float
    mean: float
    control: float = math.inf
    allowed: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Returns whether rounding explains the difference."""
        return self.largest <= self.allowed

    def __str__(self) -> str:
        """Returns the part of a sentence that says how far the outputs are off."""
        return f"{self.largest:.1e} of the largest output off, where {self.allowed:.1e} is rounding"


class InputOrder(NamedTuple):
    """The inputs in an order of their axes with which the Flax model runs.

    Attributes:
      inputs: The inputs.
      program: The traced program of the model; None if the model cannot be traced.
    """

    inputs: tuple[np.ndarray, ...]
    program: core.Jaxpr | None


class Evidence:
    """An example, on which the Flax model can be run with any leaves.

    Attributes:
      input_orders: The inputs, in each order of their axes with which the Flax model runs, the
        likeliest first.
      positions: Path of a leaf -> its position in the order in which the Flax model uses leaves.
      upward: Paths of the kernels that the model uses in a ConvTranspose with a stride.
      feature_maps: (number of values, number of channels) of each map that the model flattens or
        unflattens.
      splits: The axes that the model divides into a few parts: (length, ratio of the parts).
      runs: The number of runs so far, not counting controls.
    """

    def __init__(self, apply: Apply, example: Example, tree: Tree, tensors: Sequence[Any]) -> None:
        """Prepares the runs.

        Args:
          apply: ``apply(params, *inputs) -> outputs`` of the Flax model.
          example: Inputs and outputs of the torch module.
          tree: The flattened Flax tree.
          tensors: The torch parameters, whose dtype shows how exact torch's outputs are.

        Raises:
          ValueError: The example has another form, or `apply` does not run on it.
        """
        self._tree = tree
        inputs, self._theirs = _read(example)
        dtypes = []
        for array in filter(_is_real, map(to_numpy, tensors)):
            # JAX computes in float32 instead of float64, unless x64 is enabled.
            dtypes.append(jax.dtypes.canonicalize_dtype(array.dtype))
        dtypes = dtypes or [np.dtype(np.float32)]
        self._unit = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        self._leaves = {}
        for path, leaf in tree.leaves.items():
            self._leaves[path] = _filled(leaf)
        for path, shape in tree.shapes.items():
            self._leaves[path] = np.zeros(shape, dtypes[0])
        self.input_orders = self._running_orders(apply, inputs)
        self.runs = 0
        traced = all(order.program for order in self.input_orders)
        # A model that branches on values cannot be compiled.
        self._run: Callable[..., Any] = jax.jit(apply) if traced else apply
        self.use(self.input_orders[0])

    @classmethod
    def of(
        cls, apply: Apply | None, example: Example | None, tree: Tree, tensors: Sequence[Any]
    ) -> Evidence | None:
        """Prepares the runs; returns None if neither `apply` nor `example` is passed.

        Raises:
          ValueError: Only one of the two is passed, or as for `Evidence`.
        """
        if apply is not None and example is not None:
            return cls(apply, example, tree, tensors)
        if apply is None and example is None:
            return None
        missing = "apply" if apply is None else "example"
        raise ValueError(
            f"`apply` and `example` belong together, and `{missing}` is missing. Files of "
            "save_checkpoint(..., example=inputs) have an example; for other files pass "
            "example=(inputs, outputs) of the torch module, the inputs as a tuple."
        )

    def nearest(self, leaves: Mapping[Path, Any]) -> Difference:
        """Runs the model on the inputs in each order, and returns the smallest difference."""
        compared = []
        for order in self.input_orders:
            self.use(order)
            compared.append(self.compare(leaves))
        return min(compared, key=lambda difference: difference.largest)

    def compare(self, leaves: Mapping[Path, Any]) -> Difference:
        """Runs the model with some leaves, and compares each output with torch's.

        If the outputs are nearly equal, a control is run, with leaves and inputs changed by one
        rounding.

        Args:
          leaves: Path -> leaf, for all leaves that come from torch.
        """
        self.runs += 1
        outputs = self._outputs(leaves, self._inputs)
        difference = _difference(outputs, self._theirs)
        most = max(_MOST, _MOST_UNITS * self._unit)
        if difference.largest > most:
            return difference._replace(allowed=most)
        random = np.random.default_rng(0)
        arguments = (dict(leaves), self._inputs)
        moved = jax.tree.map(lambda value: _moved(value, random), arguments)
        control = _difference(self._outputs(*moved), _numbers(outputs)).largest
        least = _LEAST_UNITS * self._unit
        if difference.largest > max(_CONTROLS * control, least):
            control = max(control, self._moved_by_batch(leaves, outputs))
        allowed = max(_CONTROLS * control, least)
        return difference._replace(control=control, allowed=min(allowed, most))

    def _moved_by_batch(self, leaves: Mapping[Path, Any], outputs: Any) -> float:
        """Returns the largest difference between the same rows alone and in a larger batch.

        XLA adds up the products of one row one after the other, but those of several rows in
        blocks. So long sums round differently, by more than a control shows.

        Returns:
          The difference relative to the largest output; 0 if the model does not run with such a
          batch, or if axis 0 is not the batch.
        """
        inputs = []
        for array in self._inputs:
            inputs.append(np.concatenate([array] * _COPIES) if array.ndim else array)
        try:
            repeated = self._outputs(leaves, inputs)
            rows = jax.tree.map(lambda output, more: more[: output.shape[0]], outputs, repeated)
            share = _difference(rows, _numbers(outputs)).largest
        except Exception:  # the user's code need not run with a larger batch
            return 0.0
        return share if share < _OTHER_AXIS else 0.0

    def _outputs(self, leaves: Mapping[Path, Any], inputs: Sequence[np.ndarray]) -> Any:
        """Runs the model and returns its outputs."""
        params = self._tree.with_leaves(self._leaves | dict(leaves))
        # By default a GPU rounds products of float32 to fewer bits.
        with jax.default_matmul_precision("highest"):
            return self._run(params, *inputs)

    def _running_orders(self, apply: Apply, inputs: Sequence[np.ndarray]) -> list[InputOrder]:
        """Returns the inputs in each order of axes for which the outputs have torch's shapes.

        Raises:
          ValueError: The model runs with none of the orders.
        """
        orders = []
        errors = {}  # text of an error -> shapes of the inputs
        params = self._tree.with_leaves(self._leaves)
        for arrays in itertools.product(*map(_in_orders, inputs)):
            try:
                program, outputs = jax.make_jaxpr(apply, return_shape=True)(params, *arrays)
            except jax.errors.ConcretizationTypeError:
                orders.append(InputOrder(arrays, None))
                continue
            except Exception as raised:  # it is the user's code, so it may raise anything
                text = str(raised).strip().partition("\n")[0]
                error = f"{type(raised).__name__}: {text}"
            else:
                if _matched(outputs, self._theirs):
                    orders.append(InputOrder(arrays, program.jaxpr))
                    continue
                shown = _shapes(jax.tree.leaves(outputs)) or "nothing"
                error = f"the Flax model gives outputs of {shown}"
            errors.setdefault(error, []).append(_shapes(arrays))
        if orders:
            return orders
        tried = []
        for error, shapes in errors.items():
            tried.append(f"with inputs of {' or '.join(shapes)}: {error}")
        raise ValueError(
            f"`apply` does not run on the example, neither with its inputs as they are nor with "
            f"their channels last: {'; '.join(tried)}. It must be apply(params, *inputs) and "
            f"return outputs of torch's shapes, here {_shapes(self._theirs)}."
        )

    def use(self, order: InputOrder) -> None:
        """Chooses one of the orders of the inputs, and reads what the traced program shows.

        These are `positions`, `upward`, `feature_maps` and `splits`.
        """
        self._inputs = order.inputs
        self.positions = dict.fromkeys(self._leaves, math.inf)  # unused leaves come last
        self.upward = set()
        self.feature_maps = []
        self.splits = set()
        if order.program is None:
            return
        leaves = dict(zip(order.program.invars, self._leaves, strict=False))
        cuts = {}  # (array, axis) -> where the parts that the model takes start and end
        for place, equation in enumerate(_operations(order.program, leaves)):
            name = equation.primitive.name
            options = equation.params
            result = equation.outvars[0]
            used = list(filter(None, map(leaves.get, filter(_is_variable, equation.invars))))
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
        self.feature_maps = list(dict.fromkeys(self.feature_maps))
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
                self.feature_maps.append((last, sizes[-1]))
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


def _operations(jaxpr: core.Jaxpr, leaves: dict[Any, Any]) -> Iterator[Any]:
    """Yields the operations of a program in order, with those of all functions that it calls.

    Args:
      jaxpr: The program.
      leaves: Variable -> path of the leaf that it holds; variables of called functions are added.
    """
    for equation in jaxpr.eqns:
        called = []
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if isinstance(inner, core.Jaxpr):
                called.append(inner)
        for inner in called:
            arguments = equation.invars[len(equation.invars) - len(inner.invars) :]
            _hand_on(leaves, arguments, inner.invars)
            yield from _operations(inner, leaves)
            _hand_on(leaves, inner.outvars, equation.outvars)
        if not called:
            yield equation


def _hand_on(leaves: dict[Any, Any], outer: Sequence[Any], inner: Sequence[Any]) -> None:
    """Records each variable of `inner` as the leaf that its variable of `outer` holds."""
    for one, other in zip(outer, inner, strict=False):
        leaves.pop(other, None)
        if _is_variable(one) and one in leaves:
            leaves[other] = leaves[one]


def _is_variable(value: Any) -> bool:
    return isinstance(value, core.Var)


def _in_orders(array: np.ndarray) -> list[np.ndarray]:
    """Returns an input in the orders of axes that are tried, the likeliest first."""
    if array.ndim < _MAP_AXES or array.dtype.kind in "iub":
        return [array]
    channels_last = np.ascontiguousarray(np.moveaxis(array, 1, -1))
    # Flax has the channels of pictures last; sequences have the same order in torch and Flax.
    if array.ndim > _MAP_AXES:
        return [channels_last, array]
    return [array, channels_last]


def _moved(value: Any, random: np.random.Generator) -> Any:
    """Changes each floating-point value to the next larger or smaller one, at random."""
    if not _is_real(value):
        return value
    array = np.asarray(jnp.asarray(value))
    upwards = random.integers(2, size=array.shape, dtype=bool)
    ends = np.where(upwards, np.inf, -np.inf).astype(array.dtype)
    return np.where(np.isfinite(array), np.nextafter(array, ends), array)


def _difference(ours: Any, theirs: Iterable[np.ndarray]) -> Difference:
    """Returns the difference between outputs and torch's, as they are or with channels last."""
    largest = 0.0
    means = []
    for mine, views in _matched(ours, theirs):
        differences = [_difference_of_one(np.asarray(mine), view) for view in views]
        nearest = min(differences, key=lambda one: one.mean)
        largest = max(largest, nearest.largest)
        means.append(nearest.mean)
    # The mean is over all outputs, so that it falls when any output comes nearer.
    return Difference(largest, float(np.sqrt(np.mean(np.square(means)))))


def _difference_of_one(mine: np.ndarray, other: np.ndarray) -> Difference:
    """Returns the difference between one output and torch's, which has as many values."""
    error = np.abs(mine.astype(np.float64).reshape(other.shape) - other)
    if not np.all(np.isfinite(error)):
        return Difference(math.inf, math.inf)
    largest = error.max(initial=0.0) / (np.abs(other).max(initial=0.0) or 1.0)
    mean = np.linalg.norm(error) / (np.linalg.norm(other) or 1.0)
    return Difference(float(largest), float(mean))


def _read(example: Example) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the inputs in JAX's dtypes, and the floating-point outputs as float64.

    Raises:
      ValueError: The example has another form, or no finite floating-point outputs.
    """
    try:
        inputs, outputs = example
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`example` must be (inputs, outputs) of the torch module in evaluation mode: a tuple "
            "of arrays, and the module's outputs for them."
        ) from error
    if not isinstance(inputs, list | tuple):
        inputs = (inputs,)
    # jnp.asarray converts int64 to int32, unless x64 is enabled.
    arrays = []
    for value in inputs:
        arrays.append(np.asarray(jnp.asarray(to_numpy(value))))
    theirs = _numbers(outputs)
    for array in theirs:
        if not np.isfinite(array).all():
            raise ValueError("torch's outputs in `example` are not finite. Take other inputs.")
    if not theirs:
        raise ValueError("`example` has no floating-point outputs to compare with.")
    return arrays, theirs


def _numbers(outputs: Any) -> list[np.ndarray]:
    """Returns the floating-point outputs as a list of float64 arrays."""
    arrays = []
    for array in filter(_is_real, map(to_numpy, jax.tree.leaves(outputs))):
        arrays.append(np.asarray(array).astype(np.float64))
    return arrays


def _is_real(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _matched(ours: Any, theirs: Iterable[np.ndarray]) -> list[tuple[Any, list[np.ndarray]]]:
    """Pairs each Flax output with a torch output of the same shape.

    Both lists are in order, and torch may have more outputs. The torch output may have the same
    shape as it is, or with its channels last.

    Returns:
      Each Flax output with the one or two views of the torch output that have its shape. The list
      is empty if a Flax output has no partner.
    """
    matched = []
    rest = iter(theirs)
    for mine in filter(_is_real, jax.tree.leaves(ours)):
        views = []
        while not views:
            other = next(rest, None)
            if other is None:
                return []
            views = [other]
            if other.ndim >= _MAP_AXES:
                views.append(np.moveaxis(other, 1, -1))
            shape = without_ones(shape_of(mine))
            views = [view for view in views if without_ones(view.shape) == shape]
        matched.append((mine, views))
    return matched


def _shapes(arrays: Iterable[Any]) -> str:
    return ", ".join(str(array.shape) for array in arrays)


def _filled(leaf: Any) -> Any:
    """Returns zeros (or a random key) for a leaf with a shape only; other leaves stay."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return np.zeros(leaf.shape, leaf.dtype)
