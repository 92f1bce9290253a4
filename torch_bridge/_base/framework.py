"""Imports PyTorch for the functions that need it; no other file imports PyTorch.

Reading a checkpoint and converting it to Flax need no torch, which is a gigabyte that a JAX
environment seldom has. So the import happens when a function is called that needs it, and says what
to install.
"""

from __future__ import annotations

import importlib
from typing import Any

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
# Module that may be missing -> the name under which pip installs it.
_PACKAGES = {"torch": "torch", "flax": "flax", "orbax": "orbax-checkpoint"}


def import_torch(module: str = "torch") -> Any:
    """Imports PyTorch, or one of its modules.

    Raises:
      ModuleNotFoundError: PyTorch is not installed; the message says how to install it.

    Example:
      >>> import_torch().ones(2).tolist()
      [1.0, 1.0]
    """
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is installed, but a module that it needs is not
            raise
        raise ModuleNotFoundError(not_installed(error), name="torch") from None
    return importlib.import_module(module)


def not_installed(error: ModuleNotFoundError) -> str:
    """Returns a sentence that says which package to install for a missing optional module.

    Example:
      >>> not_installed(ModuleNotFoundError("No module named 'flax'", name="flax"))
      'This needs flax, which is not installed: pip install flax.'
    """
    module = (error.name or "").partition(".")[0]
    if module not in _PACKAGES:
        return str(error)
    sentence = f"This needs {module}, which is not installed: pip install {_PACKAGES[module]}."
    if module == "torch":
        sentence += " Reading a file and going to Flax need no torch."
    return sentence
