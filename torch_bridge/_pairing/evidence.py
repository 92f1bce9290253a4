"""One example through both models: torch's outputs are known, and the Flax model is run.

What is found out here is how far the outputs are apart for given leaves, and in which order the
Flax model uses its leaves.
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

from torch_bridge._base.tensors import is_tensor, shape_of, to_numpy
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


class Evidence:
    """An example, ready to be run with any leaves.

    Attributes:
      layouts: The layouts of the inputs with which the Flax model runs, the likeliest first.
      layout: The one with which it is run.
      order: Path of a leaf -> its place in the order in which the Flax model uses them.
      upward: Paths of the kernels that it uses in a ConvTranspose.
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
        self._apply = apply
        self._tree = tree
        inputs, self._theirs = _read(example)
        self._leaves: dict[tuple[str, ...], Any] = {}
        dtype = _first_dtype(tensors)
        for path, leaf in tree.leaves.items():
            comes_from_torch = path in tree.shapes
            self._leaves[path] = _filled(leaf, dtype if comes_from_torch else None)
        self.layouts = self._running_layouts(inputs)
        self.layout = self.layouts[0]
        self._run: Callable[..., Any] = jax.jit(apply)
        self.order: dict[tuple[str, ...], int] = {}
        self.upward: set[tuple[str, ...]] = set()
        self._trace()
        self.tolerance = _tolerance([*tensors, *self._theirs])
        self.inputs = inputs
        self.runs = 0

    @property
    def outputs(self) -> list[np.ndarray]:
        """Torch's outputs."""
        return self._theirs

    def apart(self, leaves: Mapping[tuple[str, ...], Any]) -> Apart:
        """Runs the model with some leaves and compares.

        Args:
          leaves: Path -> leaf, of all that come from torch.
        """
        self.runs += 1
        params = self._params({**self._leaves, **leaves})
        # On a GPU products of float32 are rounded to fewer bits unless this is said.
        with jax.default_matmul_precision("highest"):
            outputs = self._outputs(params, self.layout)
        return compare(outputs, self._theirs)

    def _outputs(self, params: Any, inputs: Sequence[Any]) -> Any:
        try:
            return self._run(params, *inputs)
        except jax.errors.ConcretizationTypeError:  # it decides by values: run it as it is
            self._run = self._apply
            return self._run(params, *inputs)

    def _params(self, leaves: Mapping[tuple[str, ...], Any]) -> Any:
        return self._tree.with_leaves(leaves)

    def _running_layouts(self, inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Finds the layouts of the inputs with which the model runs and gives as many values."""
        choices: list[list[np.ndarray]] = []
        for array in inputs:
            choices.append([array])
            if array.ndim >= _MAP_AXES and array.dtype.kind not in "iub":
                moved = np.ascontiguousarray(np.moveaxis(array, 1, -1))
                # Pictures have their channels last in Flax; a sequence is the same in both.
                choices[-1].insert(0 if array.ndim > _MAP_AXES else 1, moved)
        layouts: list[list[np.ndarray]] = []
        errors: list[str] = []
        params = self._params(self._leaves)
        for chosen in itertools.product(*choices):
            try:
                shapes = jax.eval_shape(self._apply, params, *chosen)
            except jax.errors.ConcretizationTypeError:
                layouts.append(list(chosen))
                continue
            except Exception as error:  # it is the user's code, so it may raise anything
                shown = ", ".join(str(array.shape) for array in chosen)
                text = str(error).strip().partition("\n")[0]
                errors.append(f"with inputs of {shown}: {type(error).__name__}: {text}")
                continue
            ours = [leaf for leaf in jax.tree.leaves(shapes) if _is_real(leaf)]
            if _matched(ours, self._theirs):
                layouts.append(list(chosen))
            else:
                shown = ", ".join(str(shape_of(leaf)) for leaf in ours) or "nothing"
                errors.append(f"the Flax model gives outputs of {shown}")
        if layouts:
            return layouts
        torch_shapes = ", ".join(str(array.shape) for array in self._theirs)
        tried = "; ".join(dict.fromkeys(errors))
        raise ValueError(
            f"`apply` does not run on the example, neither with its inputs as they are nor with "
            f"their channels last: {tried}. It must be apply(params, *inputs) and give what torch "
            f"gives, here arrays of {torch_shapes}."
        )

    def _trace(self) -> None:
        """Finds out in which order the model uses its leaves, unused ones last, and how."""
        params = self._params(self._leaves)
        try:
            traced = jax.make_jaxpr(self._apply)(params, *self.layout)
        except jax.errors.ConcretizationTypeError:
            self.order = {path: place for place, path in enumerate(self._leaves)}
            return
        paths = list(self._leaves)
        sources: dict[Any, int] = {}
        for place, variable in enumerate(traced.jaxpr.invars[: len(paths)]):
            sources[variable] = place
        used: dict[int, int] = {}
        upward: set[int] = set()
        _follow(traced.jaxpr, sources, used, upward)
        self.upward = {paths[place] for place in upward}
        for place, path in enumerate(paths):
            self.order[path] = used.get(place, len(paths))


def compare(ours: Any, theirs: Sequence[np.ndarray]) -> Apart:
    """Compares outputs, each as it is and with torch's channels last, and takes the nearer."""
    real = [leaf for leaf in jax.tree.leaves(ours) if _is_real(leaf)]
    largest = 0.0
    mean = 0.0
    for mine, other in _matched(real, theirs):
        value = np.asarray(mine).astype(np.float64)
        scale = float(np.abs(other).max(initial=0.0)) or 1.0
        norm = float(np.sqrt(np.mean(np.square(other)))) or 1.0
        nearest = Apart(math.inf, math.inf)
        for view in _views(other):
            if _squeezed(view.shape) != _squeezed(value.shape):
                continue
            error = value.reshape(view.shape) - view
            if np.all(np.isfinite(error)):
                apart = Apart(
                    float(np.abs(error).max(initial=0.0)) / scale,
                    float(np.sqrt(np.mean(np.square(error)))) / norm,
                )
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
    arrays: list[np.ndarray] = []
    for value in inputs:
        array = to_numpy(value)
        arrays.append(np.asarray(jnp.asarray(array)))  # int64 becomes int32, as in JAX
    theirs: list[np.ndarray] = []
    for leaf in jax.tree.leaves(outputs):
        value = to_numpy(leaf)
        if _is_real(value):
            theirs.append(np.asarray(value).astype(np.float64))
    if not theirs:
        raise ValueError("`example` has no outputs of floating point to compare with.")
    for array in theirs:
        if not np.all(np.isfinite(array)):
            raise ValueError("torch's outputs in `example` are not finite. Take other inputs.")
    return arrays, theirs


def _is_real(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _tolerance(values: Sequence[Any]) -> float:
    """Returns the tolerance for the narrowest type among some arrays."""
    widest = 0.0
    for value in values:
        dtype = getattr(value, "dtype", None)
        name = str(dtype).removeprefix("torch.")
        if name in ("float16", "bfloat16"):
            widest = max(widest, _UNITS * float(jnp.finfo(name).eps))
    return max(TOLERANCE, widest)


def _matched(ours: Sequence[Any], theirs: Sequence[np.ndarray]) -> list[tuple[Any, np.ndarray]]:
    """Pairs outputs in order; where Flax gives fewer, each with torch's next of its shape."""
    matched: list[tuple[Any, np.ndarray]] = []
    rest = list(theirs)
    for mine in ours:
        shapes = [_squeezed(shape_of(mine))]
        while rest:
            other = rest.pop(0)
            if any(_squeezed(view.shape) in shapes for view in _views(other)):
                matched.append((mine, other))
                break
        else:
            return []
    return matched


def _views(output: np.ndarray) -> Iterator[np.ndarray]:
    yield output
    if output.ndim >= _MAP_AXES:
        yield np.moveaxis(output, 1, -1)


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _first_dtype(tensors: Sequence[Any]) -> Any:
    """Finds the type of the first tensor of real values; float32 if there is none."""
    for tensor in tensors:
        if is_tensor(tensor) or isinstance(tensor, np.ndarray):
            dtype = to_numpy(tensor).dtype
            if jnp.issubdtype(dtype, jnp.floating):
                return dtype
    return np.float32


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


def _follow(
    jaxpr: core.Jaxpr, sources: dict[Any, int], used: dict[int, int], upward: set[int]
) -> None:
    """Notes the order in which leaves meet an operation that is not a view of one.

    Args:
      jaxpr: What is looked through, with all that it calls.
      sources: Variable -> number of the leaf that it is; views are added.
      used: Number of a leaf -> its place in the order; filled here.
      upward: The leaves that a convolution with gaps between its inputs uses; filled here.
    """
    for equation in jaxpr.eqns:
        leaves: list[int] = []
        for variable in equation.invars:
            if not isinstance(variable, core.Literal) and variable in sources:
                leaves.append(sources[variable])
        if not leaves:
            continue
        called = list(_called(equation))
        for inner in called:
            inside: dict[Any, int] = {}
            arguments = equation.invars[len(equation.invars) - len(inner.invars) :]
            for variable, argument in zip(inner.invars, arguments, strict=False):
                if not isinstance(argument, core.Literal) and argument in sources:
                    inside[variable] = sources[argument]
            _follow(inner, inside, used, upward)
            for result, outer in zip(inner.outvars, equation.outvars, strict=False):
                if not isinstance(result, core.Literal) and result in inside:
                    sources[outer] = inside[result]
        if called:
            continue
        if equation.primitive.name in _VIEWS:
            sources[equation.outvars[0]] = leaves[0]
            continue
        for leaf in leaves:
            used.setdefault(leaf, len(used))
        if max(equation.params.get("lhs_dilation", ()), default=1) > 1:
            upward.update(leaves)


def _called(equation: Any) -> Iterator[core.Jaxpr]:
    """Lists the functions that an operation calls."""
    for value in equation.params.values():
        values = value if isinstance(value, list | tuple) else [value]
        for part in values:
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part
