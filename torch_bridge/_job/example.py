"""One example through a torch module, by which a converted model can be checked elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from torch_bridge._base.framework import import_torch
from torch_bridge._base.tensors import is_tensor

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, str, type(None))


def example_inputs(example: Any) -> tuple[torch.Tensor, ...]:
    """Checks what a user gives as an example.

    Args:
      example: One tensor, or a tuple or list of the module's positional arguments.

    Returns:
      The positional arguments.

    Raises:
      TypeError: It is something else than tensors.
    """
    inputs = tuple(example) if isinstance(example, tuple | list) else (example,)
    if inputs and all(is_tensor(value) for value in inputs):
        return inputs
    raise TypeError(
        f"`example` must be an input of the model: one tensor, or a tuple of tensors, got a "
        f"{type(example).__name__}."
    )


def run_example(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Runs a module in evaluation mode, in full precision and without gradients.

    Afterwards the module is as it was: the mode of each part, its buffers, and the state of torch's
    random number generators. Nothing is sent, so that one rank of a job can run it alone.

    Args:
      module: The module itself, not what DDP makes of it.
      inputs: Its positional arguments, on any device.

    Returns:
      Inputs and outputs on the CPU. Outputs are tensors in dictionaries and tuples; what is neither
      (a cache of keys and values) becomes None.

    Raises:
      ValueError: The module does not take the inputs, or gives no tensor.
    """
    torch = import_torch()
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    placed = [value.detach().to(device) for value in inputs]
    with _evaluation(module, device):
        try:
            # Clones, since a module may write into its arguments.
            outputs = _plain(module(*[value.clone() for value in placed]))
        except Exception as error:  # it is the user's code, so it may raise anything
            raise ValueError(
                f"the model does not run on `example` in evaluation mode "
                f"({type(error).__name__}: {error!s:.300})"
            ) from error
    if not any(map(is_tensor, jax.tree.leaves(outputs))):
        raise ValueError("the model gives no tensor for `example`")
    return tuple(value.cpu() for value in placed), outputs


@contextlib.contextmanager
def _evaluation(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Puts a module into evaluation mode, and everything back as it was."""
    torch = import_torch()
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    on_cpu = device.type == "cpu"
    with contextlib.ExitStack() as undisturbed:
        undisturbed.enter_context(torch.no_grad())
        undisturbed.enter_context(torch.random.fork_rng([] if on_cpu else [device]))
        undisturbed.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            # TF32 is off by a thousandth, which would hide what the example is to show.
            undisturbed.enter_context(torch.backends.cudnn.flags(allow_tf32=False))
            precision = torch.get_float32_matmul_precision()
            undisturbed.callback(torch.set_float32_matmul_precision, precision)
            torch.set_float32_matmul_precision("highest")
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
            for buffer, saved in buffers:
                buffer.copy_(saved)


def _plain(value: Any) -> Any:
    """Copies an output as tensors on the CPU in plain dictionaries and tuples."""
    if is_tensor(value):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    return value if isinstance(value, _PLAIN) else None
