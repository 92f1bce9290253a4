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
    text, wrappers = hook, []
    while True:
        if callable(text) and not isinstance(text, str):
            name = getattr(text, "__name__", type(text).__name__)
            if not re.fullmatch(r"(fp16|bf16)_compress_wrapper_hook", name):
                break
            wrappers.append(name.removesuffix("_hook"))
            text = inspect.getclosurevars(text).nonlocals["hook"]
            continue
        name = str(getattr(text, "name", text))
        if not (found := re.fullmatch(r"(?:[\w.]*\.)?(\w+_compress_wrapper)\((.*)\)", name)):
            name = name.rpartition(".")[2]
            break
        wrappers.append(found[1])
        text = found[2]
    return "(".join([*wrappers, name]) + ")" * len(wrappers)


def unwrapped_hook(hook: Any) -> tuple[str, Any]:
    """The name of a hook without its compression wrapper, and the wrapper's dtype or None.

    Example:
      >>> unwrapped_hook("bf16_compress_wrapper(powerSGD_hook)")[0]
      'powerSGD_hook'
    """
    if hook is None:
        return "", None
    *wrappers, name = hook_name(hook).rstrip(")").split("(")
    dtypes = [_NARROW[word.partition("_")[0]] for word in wrappers if word[:4] in ("fp16", "bf16")]
    return name, dtypes[0] if dtypes else None
