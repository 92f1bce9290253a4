"""Parameters in fragments, of about equal size or by name, to be averaged one at a time."""

from __future__ import annotations

import heapq
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
        """Tells whether replicas differ after a round."""
        return len(self.ends) > 1 or self.alpha > 0

    def mix(self, shared: PyTree, local: PyTree) -> PyTree:
        """Mixes the average with a share of a replica's parameters, for it to go on with.

        An element that is not finite there is left out, so that it does not outlive the round.
        """
        if not self.alpha:
            return shared

        def mixed(shared: Array, local: Array) -> Array:
            wide = compute_dtype(shared.dtype)
            both = (1 - self.alpha) * shared.astype(wide) + self.alpha * local.astype(wide)
            return jnp.where(jnp.isfinite(local), both.astype(shared.dtype), shared)

        return jax.tree.map(mixed, shared, local)


def check_streaming(fragments: Any, delay: Any, alpha: Any, period: int) -> Streaming:
    """Reads the arguments of Streaming DiLoCo.

    Raises:
      ValueError: If one is unusable, or a round of `period` steps is too short for them.
    """
    if isinstance(fragments, (list, tuple)):
        split = tuple(fragments)
        count = len(split)
        for pattern in split:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`fragments` has {pattern!r}, which is not a regular expression: {error}. "
                    "Pass a number, or a pattern for each fragment such as ['blocks/[0-3]/', '.*']."
                ) from error
        if not split:
            raise ValueError("`fragments` is empty. Pass a number, or a pattern for each fragment.")
    else:
        count = check_int("fragments", fragments, 1)
        split = count
    delay = check_int("fragment_sync_delay", delay, 0)
    alpha = check_static_number("fragment_update_alpha", alpha, 0, 1)
    apart = period // count
    if delay >= apart:
        raise ValueError(
            f"fragments={count} leave {apart} steps of sync_every={period} between two averages, "
            f"and fragment_sync_delay={delay} must be less: what one sends arrives before the next "
            "is sent. Pass fewer fragments, a shorter delay or a larger sync_every."
        )
    # At least one step apart, because there are no more fragments than steps.
    ends = tuple(k * period // count for k in range(1, count + 1))
    return Streaming(split, ends, delay, alpha)


def numbered(params: PyTree, split: Split = 1) -> PyTree:
    """Gives every floating leaf the number of a fragment, in a tree like the parameters; others -1.

    A number of fragments: the largest leaf first, to the lightest fragment. Patterns: the first
    that matches within the leaf's path, written as ``blocks/0/kernel``.

    Raises:
      ValueError: If a fragment would be empty, a leaf has no pattern, or a leaf is complex.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    floating: list[int] = []
    for i, (path, leaf) in enumerate(leaves):
        dtype = leaf_dtype(leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"The leaf {leaf_name(path)} has dtype {dtype}, and only floating leaves are "
                "averaged. Split it, as optax.contrib.split_real_and_imaginary does."
            )
        if jnp.issubdtype(dtype, jnp.floating):
            floating.append(i)
    if isinstance(split, tuple):
        names = [jax.tree_util.keystr(leaves[i][0], simple=True, separator="/") for i in floating]
        chosen = _by_pattern(names, split)
    else:
        leaf_values = [leaves[i][1] for i in floating]
        sizes = [np.size(x) * jnp.dtype(leaf_dtype(x)).itemsize for x in leaf_values]
        chosen = _by_size(sizes, split)
    numbers = np.full(len(leaves), -1)
    numbers[floating] = chosen
    return treedef.unflatten(numbers.tolist())


def part_of(tree: PyTree, numbers: PyTree, fragment: int | None = None) -> PyTree:
    """Returns the tree with `optax.MaskedNode` in place of all leaves but a fragment's.

    Key paths stay as they are: a reducer may decide by a leaf's name. None for all fragments, which
    leaves out what is not floating.
    """

    def chosen(number: int, leaf: Any) -> Any:
        inside = number >= 0 if fragment is None else number == fragment
        return leaf if inside else optax.MaskedNode()

    return jax.tree.map(chosen, numbers, tree)


def put_back(part: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree` with the leaves that a part of it has."""

    def chosen(leaf: Any, old: Any) -> Any:
        return old if _is_masked(leaf) else leaf

    return jax.tree.map(chosen, part, tree, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _by_pattern(names: list[str], patterns: tuple[str, ...]) -> list[int]:
    """Gives each leaf the first pattern that matches within its name."""
    numbers: list[int] = []
    for name in names:
        fitting = [k for k, pattern in enumerate(patterns) if re.search(pattern, name)]
        if not fitting:
            raise ValueError(
                f"No pattern of `fragments` is found in the leaf {name!r}, so that it would never "
                "be averaged. Add one for it, such as '.*' at the end for all that are left."
            )
        numbers.append(fitting[0])
    for number, pattern in enumerate(patterns):
        if number not in numbers:
            raise ValueError(
                f"`fragments` has the pattern {pattern!r}, and no floating leaf is left for it. A "
                "leaf belongs to the first pattern that is found in its path; correct it, or leave "
                "it out."
            )
    return numbers


def _by_size(sizes: list[int], count: int) -> list[int]:
    """Gives each leaf, the largest first, the fragment that is the lightest until then."""
    if count > max(len(sizes), 1):
        raise ValueError(
            f"fragments={count} is more than the {len(sizes)} floating leaves of the parameters. "
            "Pass at most as many fragments as leaves."
        )
    numbers = [0] * len(sizes)
    # Bytes and leaves of each: an empty leaf has no bytes, and yet its fragment is not empty.
    fragments = [(0, 0, number) for number in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, leaves, numbers[i] = heapq.heappop(fragments)
        heapq.heappush(fragments, (load + sizes[i], leaves + 1, numbers[i]))
    return numbers
