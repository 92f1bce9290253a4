"""Parameters in fragments, of about equal size or by name, to be averaged one at a time."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_int, check_static_number
from jaxcomp._base.leaves import compute_dtype, leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, KeyPath, PyTree

# How many fragments, or a pattern for each.
Split: TypeAlias = int | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a round averages its parameters: in which parts, when, and how much is taken over."""

    split: Split = 1
    delay: int = 0  # steps between the average of a fragment and its use
    alpha: float = 0.0  # share of its parameters that a replica keeps

    @property
    def fragments(self) -> int:
        """How many there are."""
        return self.split if isinstance(self.split, int) else len(self.split)

    @property
    def keeps_local(self) -> bool:
        """Whether replicas differ after a round."""
        return self.fragments > 1 or self.alpha > 0

    def ends(self, period: int) -> list[int]:
        """After how many steps of a round each fragment's average is used."""
        # At least one step apart, because there are no more fragments than steps.
        return [k * period // self.fragments for k in range(1, self.fragments + 1)]

    def mix(self, shared: PyTree, local: PyTree) -> PyTree:
        """What a replica goes on with: the average, and a share of its own parameters.

        An element of its own that is not finite is left out, so that it does not outlive the round.
        """
        if not self.alpha:
            return shared

        def one(shared: Array, local: Array) -> Array:
            wide = compute_dtype(shared.dtype)
            mixed = (1 - self.alpha) * shared.astype(wide) + self.alpha * local.astype(wide)
            return jnp.where(jnp.isfinite(local), mixed.astype(shared.dtype), shared)

        return jax.tree.map(one, shared, local)


def check_streaming(fragments: Any, delay: Any, alpha: Any, period: int) -> Streaming:
    """Reads the arguments of Streaming DiLoCo.

    Raises:
      ValueError: If one is unusable, or a round of `period` steps is too short for them.
    """
    split = _check_split(fragments)
    delay = check_int("fragment_sync_delay", delay, 0)
    alpha = check_static_number("fragment_update_alpha", alpha, 0, 1)
    streaming = Streaming(split, delay, alpha)
    count = streaming.fragments
    if count > period:
        raise ValueError(
            f"fragments={count} cannot be staggered over sync_every={period} steps: "
            "at most one fragment is averaged per step. Pass at most as many fragments as steps."
        )
    if delay and delay >= period // count:
        raise ValueError(
            f"fragment_sync_delay={delay} must be less than the steps between two averages, "
            f"sync_every // fragments = {period // count}: what one sends arrives before the "
            "next is sent. Pass a shorter delay or a larger sync_every."
        )
    return streaming


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Which fragment each leaf belongs to, in flattening order; -1 for one that is not floating."""

    owner: tuple[int, ...]
    count: int

    def take(self, tree: PyTree, k: int | None = None) -> PyTree:
        """The tree with `optax.MaskedNode` in place of all leaves but fragment `k`'s.

        Key paths stay as they are: a reducer may decide by a leaf's name. None for all fragments,
        which leaves out what is not floating.
        """
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(
            [
                leaf if self._has(k, owner) else optax.MaskedNode()
                for leaf, owner in zip(leaves, self.owner, strict=True)
            ]
        )

    def put(self, tree: PyTree, part: PyTree, k: int | None = None) -> PyTree:
        """`tree` with the leaves of fragment `k`, or of all, from `part`."""
        leaves, treedef = jax.tree.flatten(tree)
        values = iter(jax.tree.leaves(part))
        return treedef.unflatten(
            [
                next(values) if self._has(k, owner) else leaf
                for leaf, owner in zip(leaves, self.owner, strict=True)
            ]
        )

    @staticmethod
    def _has(k: int | None, owner: int) -> bool:
        return owner >= 0 if k is None else owner == k


def _check_split(fragments: Any) -> Split:
    """Reads the argument `fragments`.

    Raises:
      ValueError: If it is neither a positive integer nor a sequence of regular expressions.
    """
    if not isinstance(fragments, (list, tuple)):
        return check_int("fragments", fragments, 1)
    for pattern in fragments:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"`fragments` has {pattern!r}, which is no regular expression: {error}. Pass a "
                "number, or a pattern for each fragment such as ['blocks/[0-3]/', '.*']."
            ) from error
    if not fragments:
        raise ValueError("`fragments` is empty. Pass a number, or a pattern for each fragment.")
    return tuple(fragments)


def make_fragments(params: PyTree, split: Split) -> Fragments:
    """Gives every floating leaf a fragment.

    A number of fragments: the largest leaf first, to the lightest fragment. Patterns: the first
    that is found in the leaf's path, written as ``blocks/0/kernel``.

    Raises:
      ValueError: If a fragment would be empty, a leaf has no pattern, or a leaf is complex.
    """
    paths, sizes = _floating(params)
    if isinstance(split, tuple):
        owner = {i: _first_match(paths[i], split) for i in sizes}
        missing = [pattern for k, pattern in enumerate(split) if k not in owner.values()]
        if missing:
            raise ValueError(
                f"`fragments` has the pattern {missing[0]!r}, and no floating leaf is left for it. "
                "A leaf belongs to the first pattern that is found in its path; correct it, or "
                "leave it out."
            )
    else:
        owner = _by_size(sizes, split)
    count = split if isinstance(split, int) else len(split)
    return Fragments(tuple(owner.get(i, -1) for i in range(len(paths))), count)


def _floating(params: PyTree) -> tuple[list[KeyPath], dict[int, int]]:
    """All paths, and the bytes of the floating leaves by position."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    sizes = {}
    for i, (path, leaf) in enumerate(leaves):
        dtype = leaf_dtype(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"The parameter {leaf_name(path)} has dtype {dtype}, and only floating ones can be "
                "averaged. Wrap the transformation in optax.contrib.split_real_and_imaginary."
            )
        if jnp.issubdtype(dtype, jnp.floating):
            sizes[i] = math.prod(np.shape(leaf)) * jnp.dtype(dtype).itemsize
    return [path for path, _ in leaves], sizes


def _first_match(path: KeyPath, patterns: tuple[str, ...]) -> int:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for k, pattern in enumerate(patterns):
        if re.search(pattern, name):
            return k
    raise ValueError(
        f"No pattern of `fragments` is found in the leaf {name!r}, so that it would never be "
        "averaged. Add one for it, such as '.*' at the end for all that are left."
    )


def _by_size(sizes: dict[int, int], count: int) -> dict[int, int]:
    if count > max(len(sizes), 1):
        raise ValueError(
            f"fragments={count} is more than the {len(sizes)} floating leaves of the parameters. "
            "Pass at most as many fragments as leaves."
        )
    owner = {}
    load = [0] * count
    members = [0] * count
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        # Empty leaves weigh nothing; the second key still gives every fragment one.
        k = min(range(count), key=lambda k: (load[k], members[k]))
        owner[i] = k
        load[k] += sizes[i]
        members[k] += 1
    return owner
