"""Parameters in fragments, of about equal size or by name, to be averaged one at a time."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_int, check_static_number
from jaxcomp._base.leaves import compute_dtype, leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, PyTree

# How many fragments, or a pattern for each.
Split: TypeAlias = int | tuple[str, ...]


class Streaming(NamedTuple):
    """How a round averages its parameters: in which parts, when, and how much is taken over."""

    split: Split
    ends: tuple[int, ...]  # after how many steps of a round each fragment's average is used
    delay: int  # steps between the average of a fragment and its use
    alpha: float  # share of its parameters that a replica keeps

    @property
    def keeps_local(self) -> bool:
        """Whether replicas differ after a round."""
        return len(self.ends) > 1 or self.alpha > 0

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
    if isinstance(fragments, (list, tuple)):
        split, count = tuple(fragments), len(fragments)
        _check_patterns(split)
    else:
        split = count = check_int("fragments", fragments, 1)
    delay = check_int("fragment_sync_delay", delay, 0)
    alpha = check_static_number("fragment_update_alpha", alpha, 0, 1)
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
    # At least one step apart, because there are no more fragments than steps.
    ends = tuple(k * period // count for k in range(1, count + 1))
    return Streaming(split, ends, delay, alpha)


def _check_patterns(patterns: tuple[Any, ...]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"`fragments` has {pattern!r}, which is no regular expression: {error}. Pass a "
                "number, or a pattern for each fragment such as ['blocks/[0-3]/', '.*']."
            ) from error
    if not patterns:
        raise ValueError("`fragments` is empty. Pass a number, or a pattern for each fragment.")


class Fragments(NamedTuple):
    """Which fragment each leaf belongs to, in flattening order; -1 for one that is not floating."""

    owner: tuple[int, ...]

    def take(self, tree: PyTree, k: int | None = None) -> PyTree:
        """The tree with `optax.MaskedNode` in place of all leaves but fragment `k`'s.

        Key paths stay as they are: a reducer may decide by a leaf's name. None for all fragments,
        which leaves out what is not floating.
        """
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaves, self._chosen(k), strict=True)
        return treedef.unflatten([leaf if own else optax.MaskedNode() for leaf, own in pairs])

    def put(self, tree: PyTree, part: PyTree, k: int | None = None) -> PyTree:
        """`tree` with the leaves of fragment `k`, or of all, from `part`."""
        leaves, treedef = jax.tree.flatten(tree)
        values, pairs = iter(jax.tree.leaves(part)), zip(leaves, self._chosen(k), strict=True)
        return treedef.unflatten([next(values) if own else leaf for leaf, own in pairs])

    def _chosen(self, k: int | None) -> list[bool]:
        return [owner >= 0 if k is None else owner == k for owner in self.owner]


def make_fragments(params: PyTree, split: Split = 1) -> Fragments:
    """Gives every floating leaf a fragment.

    A number of fragments: the largest leaf first, to the lightest fragment. Patterns: the first
    that is found in the leaf's path, written as ``blocks/0/kernel``.

    Raises:
      ValueError: If a fragment would be empty, a leaf has no pattern, or a leaf is complex.
    """
    names, sizes = list[str](), dict[int, int]()  # of all; bytes of the floating ones, by position
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0]):
        dtype = leaf_dtype(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"The parameter {leaf_name(path)} has dtype {dtype}, and only floating ones can be "
                "averaged. Wrap the transformation in optax.contrib.split_real_and_imaginary."
            )
        names.append(jax.tree_util.keystr(path, simple=True, separator="/"))
        if jnp.issubdtype(dtype, jnp.floating):
            sizes[i] = math.prod(np.shape(leaf)) * jnp.dtype(dtype).itemsize
    if isinstance(split, tuple):
        owner = _by_pattern({i: names[i] for i in sizes}, split)
    else:
        owner = _by_size(sizes, split)
    return Fragments(tuple(owner.get(i, -1) for i in range(len(names))))


def _by_pattern(names: dict[int, str], patterns: tuple[str, ...]) -> dict[int, int]:
    owner = {}
    for i, name in names.items():
        found = [k for k, pattern in enumerate(patterns) if re.search(pattern, name)]
        if not found:
            raise ValueError(
                f"No pattern of `fragments` is found in the leaf {name!r}, so that it would never "
                "be averaged. Add one for it, such as '.*' at the end for all that are left."
            )
        owner[i] = found[0]
    for k, pattern in enumerate(patterns):
        if k not in owner.values():
            raise ValueError(
                f"`fragments` has the pattern {pattern!r}, and no floating leaf is left for it. A "
                "leaf belongs to the first pattern that is found in its path; correct it, or leave "
                "it out."
            )
    return owner


def _by_size(sizes: dict[int, int], count: int) -> dict[int, int]:
    if count > max(len(sizes), 1):
        raise ValueError(
            f"fragments={count} is more than the {len(sizes)} floating leaves of the parameters. "
            "Pass at most as many fragments as leaves."
        )
    owner, load = {}, [(0, 0)] * count  # bytes and leaves: empty leaves weigh nothing
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        k = load.index(min(load))
        owner[i], load[k] = k, (load[k][0] + sizes[i], load[k][1] + 1)
    return owner
