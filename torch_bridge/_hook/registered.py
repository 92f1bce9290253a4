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
    while callable(hook) and not isinstance(hook, str):
        name = getattr(hook, "__name__", type(hook).__name__)
        if not re.fullmatch(r"(fp16|bf16)_compress_wrapper_hook", name):
            hook = name
            break
        wrappers.append(name.removesuffix("_hook"))
        hook = inspect.getclosurevars(hook).nonlocals["hook"]
    text = str(getattr(hook, "name", hook))
    *outer, inner = (word.rpartition(".")[2] for word in text.split("("))
    if all(word.endswith("_compress_wrapper") for word in outer) and inner.endswith(
        ")" * len(outer)
    ):
        wrappers += outer
        text = inner[: len(inner) - len(outer)]
    return "(".join([*wrappers, text.rpartition(".")[2]]) + ")" * len(wrappers)


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
