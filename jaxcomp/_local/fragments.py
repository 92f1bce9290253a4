"""Parameters in fragments, of about equal size or by name, to be averaged one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_int, check_static_number
from jaxcomp._base.leaves import compute_dtype, is_floating, is_masked, leaf_dtype, leaf_name
from jaxcomp._base.typing import Array, KeyPath, PyTree

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
            kept = self.alpha * local.astype(wide)
            both = (1 - self.alpha) * shared.astype(wide) + kept
            return jnp.where(jnp.isfinite(local), both.astype(shared.dtype), shared)

        return jax.tree.map(mixed, shared, local)


def check_streaming(fragments: Any, delay: Any, alpha: Any, period: int) -> Streaming:
    """Reads the arguments of Streaming DiLoCo.

    Raises:
      ValueError: If one is unusable, or a round of `period` steps is too short for them.
    """
    split: Any = fragments
    patterns: tuple[str, ...] = ()
    if isinstance(fragments, (list, tuple)):
        split = patterns = tuple(fragments)
        count = len(patterns)
    else:
        count = check_int("fragments", fragments, 1)
    if not count:
        raise ValueError("`fragments` is empty. Pass a number, or a pattern for each fragment.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"`fragments` has {pattern!r}, which is not a regular expression: {error}. "
                "Pass a number, or a pattern for each fragment such as ['blocks/[0-3]/', '.*']."
            ) from error
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


def check_not_complex(params: PyTree) -> None:
    """Refuses what has no average here.

    Raises:
      ValueError: Naming a complex leaf.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(leaf_dtype(leaf), jnp.complexfloating):
            raise ValueError(
                f"The leaf {leaf_name(path)} has dtype {leaf_dtype(leaf)}, and only floating "
                "leaves are averaged. Split it, as optax.contrib.split_real_and_imaginary does."
            )


def numbered(params: PyTree, split: Split = 1) -> PyTree:
    """Gives every floating leaf the number of a fragment, in a tree like the parameters; others -1.

    A number of fragments: the largest leaf first, to the lightest fragment. Patterns: the first
    that matches within the leaf's path, written as ``blocks/0/kernel``.

    Raises:
      ValueError: If a fragment would be empty, a leaf has no pattern, or a leaf is complex.
    """
    check_not_complex(params)
    floating: dict[KeyPath, int] = {}  # bytes of each leaf
    for path, leaf in jax.tree.leaves_with_path(params):
        if is_floating(leaf):
            floating[path] = np.size(leaf) * jnp.dtype(leaf_dtype(leaf)).itemsize
    if isinstance(split, tuple):
        numbers = _by_pattern(floating, split)
    else:
        numbers = _by_size(floating, split)
    return jax.tree.map_with_path(lambda path, _: numbers.get(path, -1), params)


def part_of(tree: PyTree, numbers: PyTree, fragment: int | None = None) -> PyTree:
    """Returns the tree with `optax.MaskedNode` in place of all leaves but a fragment's.

    Key paths stay as they are: a reducer may decide by a leaf's name. None for all fragments, which
    leaves out what is not floating.
    """

    def chosen(number: int, leaf: Any) -> Any:
        if number == fragment or (fragment is None and number >= 0):
            return leaf
        return optax.MaskedNode()

    return jax.tree.map(chosen, numbers, tree)


def put_back(part: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree` with the leaves that a part of it has."""

    def chosen(leaf: Any, old: Any) -> Any:
        if is_masked(leaf):
            return old
        return leaf

    return jax.tree.map(chosen, part, tree, is_leaf=is_masked)


def _by_pattern(paths: Iterable[KeyPath], patterns: tuple[str, ...]) -> dict[KeyPath, int]:
    """Gives each leaf the first pattern that matches within its name."""
    numbers: dict[KeyPath, int] = {}
    for path in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        numbers[path] = -1
        for number, pattern in enumerate(patterns):
            if re.search(pattern, name):
                numbers[path] = number
                break
        if numbers[path] < 0:
            raise ValueError(
                f"No pattern of `fragments` is found in the leaf {name!r}, so that it would never "
                "be averaged. Add one for it, such as '.*' at the end for all that are left."
            )
    for number, pattern in enumerate(patterns):
        if number not in numbers.values():
            raise ValueError(
                f"`fragments` has the pattern {pattern!r}, and no floating leaf is left for it. A "
                "leaf belongs to the first pattern that is found in its path; correct it, or leave "
                "it out."
            )
    return numbers


def _by_size(sizes: dict[KeyPath, int], count: int) -> dict[KeyPath, int]:
    """Gives each leaf, the largest first, the fragment that is the lightest until then."""
    if count > max(len(sizes), 1):
        raise ValueError(
            f"fragments={count} is more than the {len(sizes)} floating leaves of the parameters. "
            "Pass at most as many fragments as leaves."
        )
    numbers: dict[KeyPath, int] = {}
    # Bytes and leaves of each: an empty leaf has no bytes, and yet its fragment is not empty.
    loads = [(0, 0)] * count
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        lightest = loads.index(min(loads))
        numbers[path] = lightest
        size, leaves = loads[lightest]
        loads[lightest] = size + sizes[path], leaves + 1
    return numbers
