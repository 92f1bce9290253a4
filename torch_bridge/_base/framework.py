"""PyTorch itself, for the functions that cannot do without it; no other file imports it."""

from __future__ import annotations

import importlib
from typing import Any

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_EXTRA = frozenset({"torch", "flax", "orbax"})


def import_torch(module: str = "torch") -> Any:
    """PyTorch, or one of its modules.

    Raises:
      ModuleNotFoundError: PyTorch is not installed; the message says how to install it.

    Example:
      >>> import_torch().ones(2).tolist()
      [1.0, 1.0]
    """
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is there, and lacks something itself
            raise
        raise ModuleNotFoundError(not_installed(error), name="torch") from None
    return importlib.import_module(module)


def not_installed(error: ModuleNotFoundError) -> str:
    """One sentence on what to install, if the missing module is one of the extra ``torch``."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRA:
        return str(error)
    return f'This needs {package}, which is not installed: pip install "jaxcomp[torch]"'
