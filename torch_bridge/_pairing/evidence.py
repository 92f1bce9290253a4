"""Runs the Flax model on an example, for which torch's outputs are known.

A run shows how much the outputs differ with some leaves. What the model does with its inputs is in
`trace`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge._base.tensors import in_model, shape_of, to_numpy
from torch_bridge._pairing.kinds import without_ones
from torch_bridge._pairing.leaves import Tree
from torch_bridge._pairing.pairs import Path
from torch_bridge._pairing.trace import Trace, Use

Apply: TypeAlias = Callable[..., Any]
Calls: TypeAlias = Mapping[str, np.ndarray]  # as in `Checkpoint`
# Inputs and outputs of the torch module and, from `run_example`, its calls.
Example: TypeAlias = tuple[Sequence[Any], Any] | tuple[Sequence[Any], Any, Calls]
TRIES = 500  # the most runs of the Flax model until one gives torch's outputs
# The largest difference that is allowed, relative to the largest output: about 84 units of
# rounding in float32, and 16 units in a narrower dtype, since every layer rounds by such a unit.
_MOST = 1e-5
_MOST_UNITS = 16
_MOST_OF_INPUTS = 1e-4  # the same for the extremes of a layer's inputs
# Two correct runs round in every operation, but a control rounds only once, at its beginning.
# Correct conversions of 54 kinds of models differ from torch by at most 2 controls, and one wide
# convolution by 8. With a tenth of the eps in their norms 29 of them differ by 1 to 280 controls,
# 23 of these by more than 10.
_CONTROLS = 10
_COPIES = 8  # how often a larger batch repeats the example's rows
_OTHER_AXIS = 1e-3  # a larger difference of the same rows shows that axis 0 is not the batch
_LEAST_UNITS = 8  # units of rounding of the largest output that are always allowed
_MAP_AXES = 3  # from 3 axes on, channels may be the second axis in torch and the last in Flax


class ExampleRun(NamedTuple):
    """What the user's example says about one run of the torch module.

    Attributes:
      inputs: The arguments of the module.
      outputs: What the module returned.
      calls: Torch's calls; empty if the example has none.
    """

    inputs: tuple[np.ndarray, ...]
    outputs: Any
    calls: Calls

    @classmethod
    def of(cls, example: Example) -> ExampleRun:
        """Reads an example.

        Raises:
          ValueError: The example has another form.
        """
        try:
            inputs, outputs, *rest = example
            calls: Any = {}
            if rest:
                (calls,) = rest
            calls = dict(calls)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "`example` must be what torch_bridge.run_example returns, or (inputs, outputs) of "
                "the torch module in evaluation mode: a tuple of arrays, and the module's outputs "
                "for them."
            ) from error
        if not isinstance(inputs, list | tuple):
            inputs = (inputs,)
        return cls(tuple(map(to_numpy, inputs)), outputs, calls)


class Difference(NamedTuple):
    """The difference between the outputs of the Flax model and torch's.

    Attributes:
      largest: The largest difference, relative to the largest output.
      mean: The norm of the difference, relative to the norm of the outputs.
      control: The largest difference between two runs of the Flax model, where the second run has
        leaves and inputs changed by one rounding. If the outputs differ too much from torch's, no
        control is run and this is infinite.
      allowed: The largest difference that rounding explains, relative to the largest output.
      uses: Path of a leaf -> its first use in the Flax model; None without torch's calls.
    """

    largest: float
    mean: float
    control: float = math.inf
    allowed: float = 0.0
    uses: Mapping[Path, Use] | None = None

    @property
    def is_rounding(self) -> bool:
        """Returns whether rounding explains the difference."""
        return self.largest <= self.allowed

    def __str__(self) -> str:
        """Returns the part of a sentence that says how far the outputs are off."""
        return f"{self.largest:.1e} of the largest output off, where {self.allowed:.1e} is rounding"


class Evidence:
    """An example, on which the Flax model can be run with any leaves.

    Attributes:
      traces: The inputs, in each order of their axes with which the Flax model runs, the likeliest
        first, with what the model does with them.
      trace: The one of them with which the model runs now.
      runs: The number of runs so far, not counting controls.
      calls: Torch's calls; {} if the example has none, or the Flax model cannot be followed.
      is_recorded: Whether the example has torch's calls.
    """

    def __init__(
        self, apply: Apply, example: Example, tree: Tree, tensors: Mapping[str, Any]
    ) -> None:
        """Prepares the runs.

        Args:
          apply: ``apply(params, *inputs) -> outputs`` of the Flax model.
          example: Inputs and outputs of the torch module.
          tree: The flattened Flax tree.
          tensors: The torch tensors, by name. Their dtype shows how exact torch's outputs are.

        Raises:
          ValueError: The example has another form, or no finite floating-point outputs. Or `apply`
            does not run on it.
        """
        self._tree = tree
        ran = ExampleRun.of(example)
        self._theirs = _numbers(ran.outputs)
        if not self._theirs:
            raise ValueError("`example` has no floating-point outputs to compare with.")
        if not all(np.isfinite(array).all() for array in self._theirs):
            raise ValueError("torch's outputs in `example` are not finite. Take other inputs.")
        # jnp.asarray converts int64 to int32, unless x64 is enabled.
        inputs = [np.asarray(jnp.asarray(value)) for value in ran.inputs]
        # The module that ran may have been wrapped otherwise than the one that was saved.
        self.calls = in_model(ran.calls, tensors)
        self.is_recorded = bool(ran.calls)
        dtypes = []
        for array in filter(_is_real, map(to_numpy, tensors.values())):
            # JAX computes in float32 instead of float64, unless x64 is enabled.
            dtypes.append(jax.dtypes.canonicalize_dtype(array.dtype))
        dtypes = dtypes or [np.dtype(np.float32)]
        self._unit = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        self.rounding = max(_MOST_OF_INPUTS, _MOST_UNITS * self._unit)
        self._leaves = {}
        for path, leaf in tree.leaves.items():
            self._leaves[path] = _filled(leaf)
        for path, shape in tree.shapes.items():
            self._leaves[path] = np.zeros(shape, dtypes[0])
        self.runs = 0
        self._run: Callable[..., Any] = jax.jit(apply)
        self.traces = self._traced(apply, inputs)
        self.trace = self.traces[0]
        if self.calls and not all(trace.can_run() for trace in self.traces):
            self.calls = {}

    @classmethod
    def of(
        cls, apply: Apply | None, example: Example | None, tree: Tree, tensors: Mapping[str, Any]
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
            "example=torch_bridge.run_example(module, inputs), or (inputs, outputs) of the torch "
            "module."
        )

    def nearest(self, leaves: Mapping[Path, Any]) -> Difference:
        """Runs the model on the inputs in each order, and returns the smallest difference."""
        compared = []
        for trace in self.traces:
            self.trace = trace
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
        uses = None
        if self.calls:
            outputs, uses = self.trace.run(self._params(leaves))
        else:
            outputs = self._outputs(leaves, self.trace.inputs)
        difference = _difference(outputs, self._theirs)._replace(uses=uses)
        most = max(_MOST, _MOST_UNITS * self._unit)
        if difference.largest > most:
            return difference._replace(allowed=most)
        random = np.random.default_rng(0)
        arguments = (dict(leaves), self.trace.inputs)
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
        for array in self.trace.inputs:
            inputs.append(np.concatenate([array] * _COPIES) if array.ndim else array)
        try:
            repeated = self._outputs(leaves, inputs)
            rows = jax.tree.map(lambda output, more: more[: output.shape[0]], outputs, repeated)
            share = _difference(rows, _numbers(outputs)).largest
        except Exception:  # the user's code need not run with a larger batch
            return 0.0
        return share if share < _OTHER_AXIS else 0.0

    def _params(self, leaves: Mapping[Path, Any]) -> Any:
        """Returns the tree of the model with these leaves; others have the values of `like`."""
        return self._tree.with_leaves(self._leaves | dict(leaves))

    def _outputs(self, leaves: Mapping[Path, Any], inputs: Sequence[np.ndarray]) -> Any:
        """Runs the model and returns its outputs."""
        # By default a GPU rounds products of float32 to fewer bits.
        with jax.default_matmul_precision("highest"):
            return self._run(self._params(leaves), *inputs)

    def _traced(self, apply: Apply, inputs: Sequence[np.ndarray]) -> list[Trace]:
        """Returns the inputs in each order of axes for which the outputs have torch's shapes.

        Raises:
          ValueError: The model runs with none of the orders.
        """
        traces = []
        errors = {}  # text of an error -> shapes of the inputs
        params = self._params({})
        for arrays in itertools.product(*map(_in_orders, inputs)):
            try:
                with jax.default_matmul_precision("highest"):
                    program, outputs = jax.make_jaxpr(apply, return_shape=True)(params, *arrays)
            except jax.errors.ConcretizationTypeError:
                self._run = apply  # a model that branches on values cannot be compiled
                traces.append(Trace(arrays, None, self._leaves))
                continue
            except Exception as raised:  # it is the user's code, so it may raise anything
                text = str(raised).strip().partition("\n")[0]
                error = f"{type(raised).__name__}: {text}"
            else:
                if _matched(outputs, self._theirs):
                    traces.append(Trace(arrays, program, self._leaves))
                    continue
                shown = _shapes(jax.tree.leaves(outputs)) or "nothing"
                error = f"the Flax model gives outputs of {shown}"
            errors.setdefault(error, []).append(_shapes(arrays))
        if traces:
            return traces
        tried = []
        for error, shapes in errors.items():
            tried.append(f"with inputs of {' or '.join(shapes)}: {error}")
        raise ValueError(
            f"`apply` does not run on the example, neither with its inputs as they are nor with "
            f"their channels last: {'; '.join(tried)}. It must be apply(params, *inputs) and "
            f"return outputs of torch's shapes, here {_shapes(self._theirs)}."
        )


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
