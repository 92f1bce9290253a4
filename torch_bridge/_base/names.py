"""Names of parameters, without the words that DDP, FSDP and ``torch.compile`` put into them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch_bridge._base.errors import CheckpointMismatch

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
    """Each name with what it reads without the wrappers' words, wherever they stand.

    Raises:
      CheckpointMismatch: Names become one, so that a tensor would be lost; all such are listed.
    """
    kept = [".".join(word for word in name.split(".") if word not in _WORDS) for name in names]
    cleaned = dict(zip(names, unwrapped(kept), strict=True))
    first = {clean: name for name, clean in reversed(cleaned.items())}
    if len(first) < len(cleaned):
        raise CheckpointMismatch(
            "Names become one without the words of DDP, FSDP and torch.compile. Rename or drop one "
            "of each two before the conversion.",
            ambiguous=[
                f"{first[clean]} and {name}"
                for name, clean in cleaned.items()
                if first[clean] != name
            ],
        )
    return cleaned
