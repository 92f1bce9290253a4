"""Runs a torch module on one example, with which a conversion checks the Flax model.

Names and shapes cannot tell whether a conversion is right; outputs can. So `save_checkpoint` stores
a few rows of inputs with what the module returns for them. The run must leave a training job as it
was, down to the random numbers, and must be exact, since the difference of two frameworks is judged
by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from torch_bridge._base.framework import import_torch
from torch_bridge._base.tensors import is_tensor
from torch_bridge._job.calls import recorded_calls

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, str, type(None))


def example_inputs(example: Any) -> tuple[torch.Tensor, ...]:
    """Checks the user's `example` and returns the module's arguments.

    Args:
      example: One tensor, or a tuple or list of the module's positional arguments.

    Returns:
      The positional arguments, as a tuple.

    Raises:
      TypeError: `example` holds something else than tensors.
    """
    inputs = tuple(example) if isinstance(example, tuple | list) else (example,)
    if inputs and all(map(is_tensor, inputs)):
        return inputs
    raise TypeError(
        f"`example` must be an input of the model: one tensor, or a tuple of tensors, got a "
        f"{type(example).__name__}."
    )


def run_example(
    module: torch.nn.Module, example: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Any, dict[str, np.ndarray]]:
    """Runs a torch module on an example, for a conversion of a file that has none.

    `save_checkpoint(example=)` runs the module in the same way and stores the result in its file.
    For a file of ``torch.save`` load the weights into the module, and pass the result as `example`
    to `to_flax`, `params_from_torch` or `pair`.

    The module runs in evaluation mode, in full precision, and without gradients or
    ``torch.compile``. Afterwards the modes of all submodules, the buffers and torch's random number
    generators are as they were. Nothing is sent, so one rank of a job can call this alone.

    Args:
      module: The module, with the weights of the file. For a ``DistributedDataParallel`` model pass
        its ``module``.
      example: Inputs of the module, a tensor or a tuple of tensors, on any device; a few rows are
        enough.

    Returns:
      The inputs, the outputs and the calls, on the CPU. The outputs are tensors and plain values in
      dictionaries and tuples; any other object (a cache of keys and values) becomes None. The calls
      say in which order the parameters are used. They have the four largest and four smallest
      values of each array that a parameter is applied to.

    Raises:
      TypeError: `module` is not a module, or `example` holds something else than tensors.
      ValueError: The module fails on the inputs, or returns no tensor.

    Example:
      >>> import torch
      >>> inputs, outputs, calls = run_example(torch.nn.Linear(8, 4), torch.ones(2, 8))
      >>> outputs.shape, list(calls)
      (torch.Size([2, 4]), ['weight', 'bias'])
    """
    torch = import_torch()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"`module` must be the torch module that the example runs through, got a "
            f"{type(module).__name__}. Load a state dict into its module first."
        )
    inputs = example_inputs(example)
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    placed = [value.detach().to(device) for value in inputs]
    with _evaluation(module, device), recorded_calls(module) as calls:
        try:
            # The inputs are cloned, because a module may write into its arguments.
            outputs = _plain(module(*map(torch.clone, placed)))
        except Exception as error:  # it is the user's code, so it may raise anything
            raise ValueError(
                f"the model does not run on `example` in evaluation mode "
                f"({type(error).__name__}: {error!s:.300})"
            ) from error
    if not any(map(is_tensor, jax.tree.leaves(outputs))):
        raise ValueError("the model gives no tensor for `example`")
    return tuple(map(torch.Tensor.cpu, placed)), outputs, calls


@contextlib.contextmanager
def undisturbed(module: torch.nn.Module) -> Iterator[None]:
    """Restores a module's buffers and torch's random number generators when the block ends."""
    torch = import_torch()
    saved = [buffer.detach().clone() for buffer in module.buffers()]
    devices = {parameter.device for parameter in module.parameters()} - {torch.device("cpu")}
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            for buffer, values in zip(module.buffers(), saved, strict=True):
                buffer.copy_(values)


@contextlib.contextmanager
def _evaluation(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Puts a module into evaluation mode, and restores its modes when the block ends.

    Products are exact meanwhile, on a CPU as on a GPU: both may round them to 16 bits on request.
    """
    torch = import_torch()
    modes = {part: part.training for part in module.modules()}
    precision = torch.get_float32_matmul_precision()
    with (
        torch.no_grad(),
        undisturbed(module),
        torch.autocast(device.type, enabled=False),
        # TF32 rounds to a thousandth, which would hide the differences that we look for.
        torch.backends.cudnn.flags(allow_tf32=False),
    ):
        torch.set_float32_matmul_precision("highest")
        module.eval()
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for part, training in modes.items():
                part.training = training


def _plain(value: Any) -> Any:
    """Copies an output as tensors on the CPU in plain dictionaries and tuples."""
    if is_tensor(value):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        names = map(str, value)
        return dict(zip(names, map(_plain, value.values()), strict=True))
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) else None
