"""Records which parameters a torch module uses, in which order, and what they are applied to.

The outputs of a whole module say whether a conversion is right, but hardly which layer is wrong.
With the inputs of each layer a conversion finds the layers one after the other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from torch_bridge._base.framework import import_torch
from torch_bridge._base.schema import EXTREMES
from torch_bridge._base.tensors import is_tensor

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def recorded_calls(module: torch.nn.Module) -> Iterator[dict[str, np.ndarray]]:
    """Records the use of a module's parameters while the block runs.

    Torch's functions are watched, and no module gets a hook. So ``F.linear(x, self.weight)`` is
    recorded like a call of ``nn.Linear``. Compiled modules run without their compiled code, which
    no Python function calls.

    Yields:
      Name of a parameter -> the extremes of the array that it is first applied to, in the order of
      use. They are NaN if the parameter is not the first matrix of a function of one array: for
      vectors, and for the output projection of torch's attention.
    """
    overrides = import_torch("torch.overrides")
    calls = {}
    names = {}  # id of a parameter, or of a tensor made of parameters -> the tensor, its names
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), (parameter, []))[1].append(name)

    class Recorder(overrides.TorchFunctionMode):
        """Sees each call of a function of torch."""

        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            options = options or {}
            tensors = []
            for value in jax.tree.leaves((arguments, list(options.values()))):
                if is_tensor(value) and (value.ndim > 0 or id(value) in names):
                    tensors.append(value)
            used = []
            for tensor in tensors:
                _, its_names = names.get(id(tensor), (None, ()))
                used += its_names
            is_applied = any(id(tensor) not in names for tensor in tensors)
            if is_applied and used:
                matrix, extremes = _first_matrix(tensors, names)
                _, known = names.get(id(matrix), (None, ()))
                for name in used:
                    unknown = np.full_like(extremes, np.nan)
                    calls.setdefault(name, extremes if name in known else unknown)
            result = function(*arguments, **options)
            if used and not is_applied:  # such as a transposed weight, or the parts of a packed one
                for part in filter(is_tensor, jax.tree.leaves(result)):
                    names[id(part)] = (part, used)
            return result

    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes a second
            stack.enter_context(import_torch("torch.compiler").set_stance("force_eager"))
        stack.enter_context(Recorder())
        yield calls


def _first_matrix(
    tensors: Sequence[torch.Tensor], weights: Container[int]
) -> tuple[torch.Tensor | None, np.ndarray]:
    """Finds the first matrix in a call, and the only array that comes before it, or after it.

    Args:
      tensors: The tensors of the call.
      weights: The ids of those that are parameters, or made of parameters.

    Returns:
      The matrix, or None. And the extremes of the array, or NaN if there are several arrays.
    """
    matrix = None
    inputs = []
    for tensor in tensors:
        if id(tensor) in weights:
            if matrix is None and tensor.ndim > 1:
                matrix = tensor
        elif matrix is None or not inputs:
            inputs.append(tensor)
    first = inputs[0]
    is_one = all(tensor is first for tensor in inputs)
    is_plain = first.layout == import_torch().strided and not first.is_complex()
    extremes = np.full(2 * EXTREMES, np.nan, np.float32)
    if matrix is not None and is_one and is_plain:
        flat = first.detach().to("cpu", import_torch().float32).ravel()
        count = min(EXTREMES, flat.numel())
        extremes[:] = 0
        extremes[:count] = flat.topk(count).values
        extremes[EXTREMES : EXTREMES + count] = flat.topk(count, largest=False).values
    return matrix, extremes
