"""Which communication hook was registered, by name, wrappers included."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax.numpy as jnp

_WRAPPED = re.compile(r"(\w+_compress_wrapper)_hook")
_NARROW = {"fp16": jnp.float16, "bf16": jnp.bfloat16}


def hook_name(hook: Any) -> str:
    """Writes a hook as text: ``"fp16_compress_wrapper(powerSGD_hook)"``.

    Args:
      hook: A function, a ``DDPCommHookType``, or a name that may begin with a module's.

    Example:
      >>> hook_name("default_hooks.fp16_compress_wrapper(powerSGD_hook)")
      'fp16_compress_wrapper(powerSGD_hook)'
    """
    wrappers: list[str] = []
    wrapped = _WRAPPED.fullmatch(getattr(hook, "__name__", ""))
    while wrapped:
        wrappers.append(wrapped[1])
        hook = inspect.getclosurevars(hook).nonlocals["hook"]
        wrapped = _WRAPPED.fullmatch(getattr(hook, "__name__", ""))
    if callable(hook):
        hook = getattr(hook, "__name__", type(hook).__name__)
    words = list(wrappers)
    for word in str(getattr(hook, "name", hook)).split("("):
        words.append(word.rpartition(".")[2])
    return "(".join(words) + ")" * len(wrappers)


def unwrapped_hook(hook: Any) -> tuple[str, Any]:
    """Returns the name of a hook without its compression wrapper, and the wrapper's dtype or None.

    Example:
      >>> unwrapped_hook("bf16_compress_wrapper(powerSGD_hook)")[0]
      'powerSGD_hook'
    """
    if hook is None:
        return "", None
    words = hook_name(hook).rstrip(")").split("(")
    name = words.pop()
    for word in words:
        if word[:4] in _NARROW:
            return name, _NARROW[word[:4]]
    return name, None
