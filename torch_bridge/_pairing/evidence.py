"""One example through both models: torch's outputs are known, and the Flax model is run.

What is found out here is how far the outputs are apart for given leaves, in which order the Flax
model uses its leaves, and what it flattens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from torch_bridge._base.tensors import shape_of, to_numpy
from torch_bridge._pairing.kinds import without_ones
from torch_bridge._pairing.leaves import Tree

Apply: TypeAlias = Callable[..., Any]
Example: TypeAlias = tuple[Sequence[Any], Any]  # inputs and outputs of the torch module
# Of the largest output, in float32; some 84 units of its rounding.
TOLERANCE = 1e-5
# Of a narrower type every layer rounds by a unit, and few layers round the same way.
_UNITS = 16
# Operations that hand a leaf on as it is.
_VIEWS = frozenset(
    {"reshape", "transpose", "convert_element_type", "broadcast_in_dim", "squeeze", "rev", "copy"}
)
_MAP_AXES = 3  # arrays of so many axes may have their channels second in torch, and last in Flax


class Apart(NamedTuple):
    """How far outputs are apart, relative to the largest output and to their norm."""

    largest: float
    mean: float


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
      tolerance: How far outputs may be apart that are equal but for rounding.
      runs: How often the model was run.
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
        first_dtype = None
        self.tolerance = TOLERANCE
        for tensor in tensors:
            dtype = to_numpy(tensor).dtype if hasattr(tensor, "dtype") else None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                continue
            if first_dtype is None:
                first_dtype = dtype
            unit = float(jnp.finfo(dtype).eps)
            if unit > float(jnp.finfo(jnp.float32).eps):
                self.tolerance = max(self.tolerance, _UNITS * unit)
        self._leaves: dict[tuple[str, ...], Any] = {}
        for path, leaf in tree.leaves.items():
            self._leaves[path] = _filled(leaf, first_dtype if path in tree.shapes else None)
        self.layouts = self._running_layouts(apply, inputs)
        self.runs = 0
        traced = all(layout.program for layout in self.layouts)
        # What decides by values cannot be compiled.
        self._run: Callable[..., Any] = jax.jit(apply) if traced else apply
        self.use(self.layouts[0])

    def apart(self, leaves: Mapping[tuple[str, ...], Any]) -> Apart:
        """Runs the model with some leaves and compares.

        Args:
          leaves: Path -> leaf, of all that come from torch.
        """
        self.runs += 1
        params = self._tree.with_leaves(self._leaves | dict(leaves))
        # On a GPU products of float32 are rounded to fewer bits unless this is said.
        with jax.default_matmul_precision("highest"):
            return compare(self._run(params, *self._inputs), self._theirs)

    def _running_layouts(self, apply: Apply, inputs: Sequence[np.ndarray]) -> list[Layout]:
        """Finds the layouts of the inputs with which the model runs and gives as many values."""
        choices: list[list[np.ndarray]] = []
        for array in inputs:
            choices.append([array])
            if array.ndim >= _MAP_AXES and array.dtype.kind not in "iub":
                moved = np.ascontiguousarray(np.moveaxis(array, 1, -1))
                choices[-1].append(moved)
                if array.ndim > _MAP_AXES:
                    # Pictures have their channels last in Flax; a sequence is the same in both.
                    choices[-1].reverse()
        layouts: list[Layout] = []
        errors: dict[str, list[str]] = {}  # what is wrong -> shapes of the inputs
        params = self._tree.with_leaves(self._leaves)
        for layout in itertools.product(*choices):
            shapes = ", ".join(str(array.shape) for array in layout)
            try:
                program, outputs = jax.make_jaxpr(apply, return_shape=True)(params, *layout)
            except jax.errors.ConcretizationTypeError:
                layouts.append(Layout(layout, None))
                continue
            except Exception as error:  # it is the user's code, so it may raise anything
                text = str(error).strip().partition("\n")[0]
                errors.setdefault(f"{type(error).__name__}: {text}", []).append(shapes)
                continue
            ours = list(filter(_is_real, jax.tree.leaves(outputs)))
            if _matched(ours, self._theirs):
                layouts.append(Layout(layout, program.jaxpr))
            else:
                shown = ", ".join(str(leaf.shape) for leaf in ours) or "nothing"
                errors.setdefault(f"the Flax model gives outputs of {shown}", []).append(shapes)
        if layouts:
            return layouts
        torch_shapes = ", ".join(str(array.shape) for array in self._theirs)
        tried: list[str] = []
        for text, inputs_of in errors.items():
            tried.append(f"with inputs of {' or '.join(inputs_of)}: {text}")
        raise ValueError(
            f"`apply` does not run on the example, neither with its inputs as they are nor with "
            f"their channels last: {'; '.join(tried)}. It must be apply(params, *inputs) and give "
            f"what torch gives, here arrays of {torch_shapes}."
        )

    def use(self, layout: Layout) -> None:
        """Takes one of the layouts, and finds out what the model does with its leaves there."""
        self._inputs = layout.inputs
        self.order = dict.fromkeys(self._leaves, math.inf)  # of leaves without a use
        self.upward: set[tuple[str, ...]] = set()
        self.maps: list[tuple[int, int]] = []
        if layout.program is None:
            return
        leaves = dict(zip(layout.program.invars, self._leaves, strict=False))
        for place, equation in enumerate(_operations(layout.program, leaves)):
            variables = itertools.filterfalse(_is_literal, equation.invars)
            met = [leaves[value] for value in variables if value in leaves]
            result = equation.outvars[0]
            leaves.pop(result, None)
            name = equation.primitive.name
            if met and name in _VIEWS:
                leaves[result] = met[0]
                continue
            for path in met:
                self.order[path] = min(self.order[path], place)
            if max(equation.params.get("lhs_dilation", ()), default=1) > 1:
                self.upward.update(met)
            if name == "reshape":
                before = equation.invars[0].aval.shape
                self.maps += _merged(before, result.aval.shape)
                self.maps += _merged(result.aval.shape, before)
            if name == "dot_general":  # a kernel with several axes of inputs or of outputs
                kernel = equation.invars[1].aval.shape
                contracted = equation.params["dimension_numbers"][0][1]
                inputs = [kernel[axis] for axis in contracted]
                outputs = np.delete(kernel, contracted).tolist()
                for sizes in (inputs, outputs):
                    self.maps += _merged(sizes, [math.prod(sizes)])
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


def _hand_on(leaves: dict[Any, Any], given: Sequence[Any], taken: Sequence[Any]) -> None:
    """Notes which variables are leaves where others are."""
    for one, other in zip(given, taken, strict=False):
        leaves.pop(other, None)
        if not _is_literal(one) and one in leaves:
            leaves[other] = leaves[one]


def _is_literal(value: Any) -> bool:
    return isinstance(value, core.Literal)


def compare(ours: Any, theirs: Sequence[np.ndarray]) -> Apart:
    """Compares outputs, each as it is and with torch's channels last, and takes the nearer."""
    real = list(filter(_is_real, jax.tree.leaves(ours)))
    largest = 0.0
    mean = 0.0
    for mine, other in _matched(real, theirs):
        value = np.asarray(mine).astype(np.float64)
        scale = float(np.abs(other).max(initial=0.0)) or 1.0
        norm = float(np.sqrt(np.mean(np.square(other)))) or 1.0
        nearest = Apart(math.inf, math.inf)
        for view in _views(other):
            if without_ones(view.shape) != without_ones(value.shape):
                continue
            error = np.abs(value.reshape(view.shape) - view)
            if np.all(np.isfinite(error)):
                root = float(np.sqrt(np.mean(np.square(error))))
                apart = Apart(float(error.max(initial=0.0)) / scale, root / norm)
                nearest = min(nearest, apart, key=lambda one: one.mean)
        largest = max(largest, nearest.largest)
        mean = max(mean, nearest.mean)
    return Apart(largest, mean)


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
    theirs: list[np.ndarray] = []
    for value in filter(_is_real, map(to_numpy, jax.tree.leaves(outputs))):
        array = np.asarray(value).astype(np.float64)
        if not np.all(np.isfinite(array)):
            raise ValueError("torch's outputs in `example` are not finite. Take other inputs.")
        theirs.append(array)
    if not theirs:
        raise ValueError("`example` has no outputs of floating point to compare with.")
    return arrays, theirs


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


def _matched(ours: Sequence[Any], theirs: Sequence[np.ndarray]) -> list[tuple[Any, np.ndarray]]:
    """Pairs outputs in order; where Flax gives fewer, each with torch's next of its shape."""
    matched: list[tuple[Any, np.ndarray]] = []
    rest = iter(theirs)
    for mine in ours:
        shape = without_ones(shape_of(mine))
        for other in rest:
            if shape in [without_ones(view.shape) for view in _views(other)]:
                matched.append((mine, other))
                break
        else:
            return []
    return matched


def _views(output: np.ndarray) -> Iterator[np.ndarray]:
    yield output
    if output.ndim >= _MAP_AXES:
        yield np.moveaxis(output, 1, -1)


def _filled(leaf: Any, dtype: Any) -> Any:
    """Gives a leaf of which only the shape is known a value; what comes from torch replaces it.

    Args:
      leaf: It.
      dtype: The type of what comes from torch; None of a leaf that does not.
    """
    if dtype is not None:
        return np.zeros(shape_of(leaf), dtype)
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return np.zeros(leaf.shape, leaf.dtype)
