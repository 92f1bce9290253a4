"""Names of parameters, without the words that DDP, FSDP and ``torch.compile`` put into them."""

from __future__ import annotations

import os
from collections.abc import Sequence

_WORDS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_HEADS = _WORDS | {"module"}


def unwrapped(names: Sequence[str]) -> list[str]:
    """The names without the wrappers' words that all of them begin with.

    Example:
      >>> unwrapped(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
      ['fc.weight', 'fc.bias']
    """
    shared = os.path.commonprefix(list(names)).split(".")[:-1]  # noqa: RUF071 (of characters)
    length = next((k for k, word in enumerate(shared) if word not in _HEADS), len(shared))
    cut = sum(len(word) + 1 for word in shared[:length])
    return [name[cut:] for name in names]


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Each name with what it reads without the wrappers' words, wherever they stand."""
    kept = [".".join(word for word in name.split(".") if word not in _WORDS) for name in names]
    return dict(zip(names, unwrapped(kept), strict=True))
