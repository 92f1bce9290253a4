"""One example through both models: torch's outputs are known, and the Flax model is run.

What is found out here is how far the outputs are apart for given leaves, in which order the Flax
model uses its leaves, and what it flattens.
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
from torch_bridge._pairing.pairs import Path

Apply: TypeAlias = Callable[..., Any]
Example: TypeAlias = tuple[Sequence[Any], Any]  # inputs and outputs of the torch module
# How far outputs may be apart at most, as a share of the largest: some 84 units of float32's
# rounding, and 16 of a narrower type, by a unit of which every layer rounds.
_MOST = 1e-5
_MOST_UNITS = 16
# Two right runs round in every operation, and a control only at its beginning. Conversions of 54
# kinds of models are at most 2 controls from torch, one wide convolution is 8. With a tenth of
# the eps of their norms 29 of them are 1 to 280 from it, and 23 of these more than 10.
_CONTROLS = 10
_COPIES = 8  # of the example's rows in a larger batch
_OTHER_AXIS = 1e-3  # outputs of the same rows differ by less, wherever axis 0 is the batch
_LEAST_UNITS = 8  # of rounding, of the largest output: so much is nothing, whatever a control shows
# Operations that hand a leaf on as it is.
_VIEWS = frozenset(
    {"reshape", "transpose", "convert_element_type", "broadcast_in_dim", "squeeze", "rev", "copy"}
)
_MAP_AXES = 3  # arrays of so many axes may have their channels second in torch, and last in Flax


class Apart(NamedTuple):
    """How far the outputs of the Flax model are from torch's.

    Attributes:
      largest: The largest difference, as a share of the largest output.
      mean: The norm of the differences, as a share of the norm of the outputs.
      control: How far the same run, moved by one rounding, is from itself; infinite where the
        outputs are too far from torch's to be equal.
      allowed: The share of the largest output by which equal outputs may differ.
    """

    largest: float
    mean: float
    control: float = math.inf
    allowed: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Tells whether rounding explains the difference."""
        return self.largest <= self.allowed


class Layout(NamedTuple):
    """The inputs in a layout with which the Flax model runs, and its operations if traced."""

    inputs: tuple[np.ndarray, ...]
    program: core.Jaxpr | None


class Evidence:
    """An example, ready to be run with any leaves.

    Attributes:
      layouts: The layouts of the inputs with which the Flax model runs, the likeliest first.
      order: Path of a leaf -> its place in the order in which the Flax model uses them.
      upward: Paths of the kernels that it uses in a ConvTranspose with a stride.
      maps: What it flattens or takes apart: how many values there are, and of how many channels.
      runs: How often the model was run, without controls.
    """

    def __init__(self, apply: Apply, example: Example, tree: Tree, tensors: Sequence[Any]) -> None:
        """Prepares the runs.

        Args:
          apply: ``apply(params, *inputs) -> outputs`` of the Flax model.
          example: Inputs and outputs of the torch module.
          tree: The flattened Flax tree.
          tensors: The torch parameters, whose type says how exact torch's outputs are.

        Raises:
          ValueError: The example has another form, or `apply` does not run with it.
        """
        self._tree = tree
        inputs, self._theirs = _read(example)
        dtypes = []
        for array in filter(_is_real, map(to_numpy, tensors)):
            # float64 becomes float32, where JAX computes in that.
            dtypes.append(jax.dtypes.canonicalize_dtype(array.dtype))
        dtypes = dtypes or [np.dtype(np.float32)]
        self._unit = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        self._leaves = {path: _filled(leaf) for path, leaf in tree.leaves.items()}
        for path, shape in tree.shapes.items():
            self._leaves[path] = np.zeros(shape, dtypes[0])
        self.layouts = self._running_layouts(apply, inputs)
        self.runs = 0
        traced = all(layout.program for layout in self.layouts)
        # What decides by values cannot be compiled.
        self._run: Callable[..., Any] = jax.jit(apply) if traced else apply
        self.use(self.layouts[0])

    def apart(self, leaves: Mapping[Path, Any]) -> Apart:
        """Runs the model with some leaves, and compares each output with torch's.

        What comes near is run again as a control: with leaves and inputs moved by one rounding.

        Args:
          leaves: Path -> leaf, of all that come from torch.
        """
        self.runs += 1
        outputs = self._outputs(leaves, self._inputs)
        apart = _furthest(outputs, self._theirs)
        most = max(_MOST, _MOST_UNITS * self._unit)
        if apart.largest > most:
            return apart._replace(allowed=most)
        random = np.random.default_rng(0)
        moved_leaves = {path: _moved(leaf, random) for path, leaf in leaves.items()}
        moved_inputs = [_moved(array, random) for array in self._inputs]
        moved = self._outputs(moved_leaves, moved_inputs)
        control = _furthest(moved, _numbers(outputs)).largest
        least = _LEAST_UNITS * self._unit
        if apart.largest > max(_CONTROLS * control, least):
            control = max(control, self._moved_by_batch(leaves, outputs))
        allowed = max(_CONTROLS * control, least)
        return apart._replace(control=control, allowed=min(allowed, most))

    def _moved_by_batch(self, leaves: Mapping[Path, Any], outputs: Any) -> float:
        """Tells how far the outputs of the same rows in a larger batch are, as a share.

        XLA adds up the products of one row one after the other, those of several in blocks, and a
        sum of many terms then differs by more than any control that only moves values.

        Returns:
          The share; 0 if the model takes no such batch, or axis 0 is another axis than its.
        """
        inputs = []
        for array in self._inputs:
            inputs.append(np.concatenate([array] * _COPIES) if array.ndim else array)
        try:
            repeated = self._outputs(leaves, inputs)
            rows = jax.tree.map(lambda output, more: more[: output.shape[0]], outputs, repeated)
            share = _furthest(rows, _numbers(outputs)).largest
        except Exception:  # it is the user's code, for another batch than his
            return 0.0
        return share if share < _OTHER_AXIS else 0.0

    def _outputs(self, leaves: Mapping[Path, Any], inputs: Sequence[np.ndarray]) -> Any:
        """Runs the model."""
        params = self._tree.with_leaves(self._leaves | dict(leaves))
        # On a GPU products of float32 are rounded to fewer bits unless this is said.
        with jax.default_matmul_precision("highest"):
            return self._run(params, *inputs)

    def _running_layouts(self, apply: Apply, inputs: Sequence[np.ndarray]) -> list[Layout]:
        """Finds the layouts of the inputs for which the model returns as many values as torch."""
        layouts = []
        errors = {}  # what is wrong -> shapes of the inputs
        params = self._tree.with_leaves(self._leaves)
        for layout in itertools.product(*map(_in_layouts, inputs)):
            try:
                program, outputs = jax.make_jaxpr(apply, return_shape=True)(params, *layout)
            except jax.errors.ConcretizationTypeError:
                layouts.append(Layout(layout, None))
                continue
            except Exception as raised:  # it is the user's code, so it may raise anything
                text = str(raised).strip().partition("\n")[0]
                error = f"{type(raised).__name__}: {text}"
            else:
                if _matched(outputs, self._theirs):
                    layouts.append(Layout(layout, program.jaxpr))
                    continue
                shown = _shapes(jax.tree.leaves(outputs)) or "nothing"
                error = f"the Flax model gives outputs of {shown}"
            errors.setdefault(error, []).append(_shapes(layout))
        if layouts:
            return layouts
        tried = []
        for error, shapes in errors.items():
            tried.append(f"with inputs of {' or '.join(shapes)}: {error}")
        raise ValueError(
            f"`apply` does not run on the example, neither with its inputs as they are nor with "
            f"their channels last: {'; '.join(tried)}. It must be apply(params, *inputs) and give "
            f"what torch gives, here arrays of {_shapes(self._theirs)}."
        )

    def use(self, layout: Layout) -> None:
        """Takes one of the layouts, and finds out what the model does with its leaves there."""
        self._inputs = layout.inputs
        self.order = dict.fromkeys(self._leaves, math.inf)  # of leaves without a use
        self.upward = set()
        self.maps = []
        if layout.program is None:
            return
        leaves = dict(zip(layout.program.invars, self._leaves, strict=False))
        for place, equation in enumerate(_operations(layout.program, leaves)):
            used = []
            for variable in filter(_is_variable, equation.invars):
                if variable in leaves:
                    used.append(leaves[variable])
            result = equation.outvars[0]
            leaves.pop(result, None)
            name = equation.primitive.name
            if used and name in _VIEWS:
                leaves[result] = used[0]
                continue
            for path in used:
                self.order[path] = min(self.order[path], place)
            if max(equation.params.get("lhs_dilation", ()), default=1) > 1:
                self.upward.update(used)
            if name == "reshape":
                before = equation.invars[0].aval.shape
                self.maps += _merged(before, result.aval.shape)
                self.maps += _merged(result.aval.shape, before)
            if name == "dot_general":  # a kernel with several axes of inputs or of outputs
                kernel = equation.invars[1].aval.shape
                contracted = equation.params["dimension_numbers"][0][1]
                for sizes in (np.take(kernel, contracted), np.delete(kernel, contracted)):
                    self.maps += _merged(sizes.tolist(), [math.prod(sizes.tolist())])
        self.maps = list(dict.fromkeys(self.maps))


def _operations(jaxpr: core.Jaxpr, leaves: dict[Any, Any]) -> Iterator[Any]:
    """Lists operations in their order, with those of all functions that are called.

    Args:
      jaxpr: What is looked through.
      leaves: Variable -> the leaf that it is; variables inside of functions are added.
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
    """Notes which variables are leaves where others are."""
    for one, other in zip(outer, inner, strict=False):
        leaves.pop(other, None)
        if _is_variable(one) and one in leaves:
            leaves[other] = leaves[one]


def _is_variable(value: Any) -> bool:
    return isinstance(value, core.Var)


def _in_layouts(array: np.ndarray) -> list[np.ndarray]:
    """Lists the layouts in which an input is tried, the likeliest first."""
    if array.ndim < _MAP_AXES or array.dtype.kind in "iub":
        return [array]
    channels_last = np.ascontiguousarray(np.moveaxis(array, 1, -1))
    # Pictures have their channels last in Flax; a sequence is the same in both.
    if array.ndim > _MAP_AXES:
        return [channels_last, array]
    return [array, channels_last]


def _moved(value: Any, random: np.random.Generator) -> Any:
    """Moves floating-point values to one of their neighbours, up or down; leaves others as is."""
    if not _is_real(value):
        return value
    array = np.asarray(jnp.asarray(value))
    upwards = random.integers(2, size=array.shape, dtype=bool)
    ends = np.where(upwards, np.inf, -np.inf).astype(array.dtype)
    return np.where(np.isfinite(array), np.nextafter(array, ends), array)


def _furthest(ours: Any, theirs: Iterable[np.ndarray]) -> Apart:
    """Tells how far outputs are from others, which are taken as they are or with channels last."""
    largest = 0.0
    mean = 0.0
    for mine, views in _matched(ours, theirs):
        value = np.asarray(mine).astype(np.float64)
        apart = [_apart(value, view) for view in views]
        nearest = min(apart, key=lambda one: one.mean)
        largest = max(largest, nearest.largest)
        mean = max(mean, nearest.mean)
    return Apart(largest, mean)


def _apart(mine: np.ndarray, other: np.ndarray) -> Apart:
    """Tells how far an output is from torch's of as many values."""
    error = np.abs(mine.reshape(other.shape) - other)
    if not np.all(np.isfinite(error)):
        return Apart(math.inf, math.inf)
    size = float(np.abs(other).max(initial=0.0)) or 1.0
    norm = float(np.linalg.norm(other)) or 1.0
    largest = float(error.max(initial=0.0))
    return Apart(largest / size, float(np.linalg.norm(error)) / norm)


def _read(example: Example) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Reads inputs as JAX takes them, and outputs that are numbers, as float64."""
    try:
        inputs, outputs = example
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`example` must be (inputs, outputs) of the torch module in evaluation mode: a tuple "
            "of arrays, and what the module gives for them."
        ) from error
    if not isinstance(inputs, list | tuple):
        inputs = (inputs,)
    # int64 becomes int32, as in JAX.
    arrays = [np.asarray(jnp.asarray(to_numpy(value))) for value in inputs]
    theirs = _numbers(outputs)
    if not all(np.isfinite(array).all() for array in theirs):
        raise ValueError("torch's outputs in `example` are not finite. Take other inputs.")
    if not theirs:
        raise ValueError("`example` has no outputs of floating point to compare with.")
    return arrays, theirs


def _numbers(outputs: Any) -> list[np.ndarray]:
    """Lists the outputs of floating point, as float64."""
    arrays = filter(_is_real, map(to_numpy, jax.tree.leaves(outputs)))
    return [np.asarray(array).astype(np.float64) for array in arrays]


def _is_real(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _merged(wide: Sequence[int], narrow: Sequence[int]) -> list[tuple[int, int]]:
    """Finds how many values, of how many channels, become the last axis; in a list, or none."""
    sizes = without_ones(wide)
    last = (without_ones(narrow) or (0,))[-1]
    for cut in range(len(sizes) - 1):
        if math.prod(sizes[cut:]) == last:
            return [(last, sizes[-1])]
    return []


def _matched(ours: Any, theirs: Iterable[np.ndarray]) -> list[tuple[Any, list[np.ndarray]]]:
    """Pairs outputs in order; where Flax gives fewer, each with torch's next of its shape.

    Returns:
      Each output with torch's, as that is or with its channels last, whichever is of its shape;
      none if one has no other.
    """
    matched = []
    rest = iter(theirs)
    for mine in filter(_is_real, jax.tree.leaves(ours)):
        shape = without_ones(shape_of(mine))
        views = []
        while not views:
            other = next(rest, None)
            if other is None:
                return []
            views = [other]
            if other.ndim >= _MAP_AXES:
                views.append(np.moveaxis(other, 1, -1))
            views = [view for view in views if without_ones(view.shape) == shape]
        matched.append((mine, views))
    return matched


def _shapes(arrays: Iterable[Any]) -> str:
    return ", ".join(str(array.shape) for array in arrays)


def _filled(leaf: Any) -> Any:
    """Gives a leaf of which only the shape is known a value."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return np.zeros(leaf.shape, leaf.dtype)
