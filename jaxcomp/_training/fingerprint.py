"""Is a checkpoint what was saved? A checksum of every leaf, to be stored beside it.

Most formats carry none: a flipped bit loads as another value, and a run goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._training.checksum import checksum


class FingerprintMismatch(ValueError):
    """A tree that is not the one whose fingerprint was taken."""


def fingerprint(tree: PyTree) -> dict[str, str]:
    """A checksum of every leaf: shape, dtype and a 32-bit hash of its bits and their positions.

    Any single flipped bit changes it; other changes go unnoticed with probability 2^-32.

    Args:
      tree: What is saved or was restored: arrays of JAX or NumPy, wherever they lie, and Python
        numbers, which count as NumPy's of 8 bytes. Of arrays that lie on several processes, all of
        these must call it.

    Returns:
      The checksums by the leaves' names, fit for JSON.

    Raises:
      ValueError: A leaf is neither number nor array of them; the message names it.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> saved = jaxcomp.fingerprint({"w": jnp.arange(3.0), "step": 7})
      >>> sorted(saved)
      ["['step']", "['w']"]
      >>> try:
      ...     jaxcomp.check_fingerprint({"w": jnp.array([0.0, 1.0, 2.5]), "step": 7}, saved)
      ... except jaxcomp.FingerprintMismatch as error:
      ...     print(str(error)[:43])
      These leaves are not what was saved: ['w'].
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    _refuse_what_is_no_number(leaves)
    hashes = _hashes([leaf for _, leaf in leaves])
    return {
        leaf_name(path): f"{_kind(leaf)} {h:08x}"
        for (path, leaf), h in zip(leaves, hashes, strict=True)
    }


def check_fingerprint(tree: PyTree, saved: Mapping[str, str]) -> None:
    """Compares a restored tree with the `fingerprint` of what was saved.

    Args:
      tree: The tree.
      saved: Its checksums, from before.

    Raises:
      FingerprintMismatch: Naming the leaves that differ, that are missing, and that are new.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> jaxcomp.check_fingerprint({"w": jnp.ones(2)}, jaxcomp.fingerprint({"w": jnp.ones(2)}))
    """
    found = fingerprint(tree)
    differ = [name for name in found if name in saved and found[name] != saved[name]]
    told = (
        ("These leaves are not what was saved", differ),
        ("These were saved and are missing", [name for name in saved if name not in found]),
        ("These were not saved", [name for name in found if name not in saved]),
    )
    wrong = [f"{what}: {', '.join(names)}." for what, names in told if names]
    if wrong:
        raise FingerprintMismatch(f"{' '.join(wrong)} Restore an earlier checkpoint.")


def _refuse_what_is_no_number(leaves: list[tuple[Any, Any]]) -> None:
    wrong = [
        f"{leaf_name(path)} is {leaf!r:.60}"
        for path, leaf in leaves
        if not isinstance(leaf, jax.Array) and np.asarray(leaf).dtype.kind in "OUSMm"
    ]
    if wrong:
        raise ValueError(f"A fingerprint is of numbers: {'; '.join(wrong)}. Leave these out.")


def _hashes(leaves: list[Any]) -> list[int]:
    # One program cannot take arrays that lie on different devices.
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        placed = isinstance(leaf, jax.Array) and leaf.committed
        places.setdefault(frozenset(leaf.sharding.device_set) if placed else None, []).append(i)
    hashes = [0] * len(leaves)
    for chosen in places.values():
        own = [leaves[i] for i in chosen]
        # So that JAX takes NumPy's 8 bytes, a Python number's too, as they are.
        with jax.enable_x64(True):
            found = _stacked([x if isinstance(x, jax.Array) else np.asarray(x) for x in own])
        for i, value in zip(chosen, np.asarray(found), strict=True):
            hashes[i] = int(value)
    return hashes


@jax.jit
def _stacked(leaves: list[Array]) -> Array:
    return jnp.stack([checksum(leaf) for leaf in leaves])


def _kind(leaf: Any) -> str:
    """Dtype and shape, as ``float32[3,4]``."""
    value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
