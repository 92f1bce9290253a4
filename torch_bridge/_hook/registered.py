"""Which communication hook was registered, by name, wrappers included."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax.numpy as jnp

_NARROW = {"fp16": jnp.float16, "bf16": jnp.bfloat16}


def hook_name(hook: Any) -> str:
    """A hook as text: ``"fp16_compress_wrapper(powerSGD_hook)"``.

    Args:
      hook: A function, a ``DDPCommHookType``, or a name that may begin with a module's.

    Example:
      >>> hook_name("default_hooks.fp16_compress_wrapper(powerSGD_hook)")
      'fp16_compress_wrapper(powerSGD_hook)'
    """
    wrappers: list[str] = []
    while found := re.fullmatch(r"(\w+_compress_wrapper)_hook", getattr(hook, "__name__", "")):
        wrappers.append(found[1])
        hook = inspect.getclosurevars(hook).nonlocals["hook"]
    if callable(hook):
        hook = getattr(hook, "__name__", type(hook).__name__)
    text = str(getattr(hook, "name", hook))
    words = [*wrappers, *(word.rpartition(".")[2] for word in text.split("("))]
    return "(".join(words) + ")" * len(wrappers)


def unwrapped_hook(hook: Any) -> tuple[str, Any]:
    """The name of a hook without its compression wrapper, and the wrapper's dtype or None.

    Example:
      >>> unwrapped_hook("bf16_compress_wrapper(powerSGD_hook)")[0]
      'powerSGD_hook'
    """
    if hook is None:
        return "", None
    *wrappers, name = hook_name(hook).rstrip(")").split("(")
    return name, next((_NARROW[word[:4]] for word in wrappers if word[:4] in _NARROW), None)
