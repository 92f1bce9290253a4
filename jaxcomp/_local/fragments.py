"""Splits parameters into fragments, by size or by name, which are averaged one at a time.

Streaming DiLoCo averages fragments in turn, so that less is sent at once. A fragment is the whole
tree with `optax.MaskedNode` in the place of all leaves outside of it, so reducers and optimizers
take it as they take any tree. Without streaming there is one fragment: all floating leaves.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_int, check_static_number
from jaxcomp._base.leaves import (
    compute_dtype,
    is_floating,
    is_masked,
    leaf_dtype,
    leaf_name,
    named_dtype,
)
from jaxcomp._base.typing import Array, KeyPath, PyTree

# The number of fragments, or a pattern for each fragment.
Split: TypeAlias = int | tuple[str, ...]


class Streaming(NamedTuple):
    """Plans a round: its fragments, when they are averaged, and how averages are mixed in."""

    split: Split
    ends: tuple[int, ...]  # step of a round after which each fragment's average is used
    delay: int  # steps between the average of a fragment and its use
    alpha: float  # fraction of its own parameters that a replica keeps

    @property
    def keeps_local(self) -> bool:
        """Returns whether parameters differ between replicas after a round."""
        return len(self.ends) > 1 or self.alpha > 0

    def mix(self, shared: PyTree, local: PyTree) -> PyTree:
        """Mixes the average with the fraction `alpha` of a replica's own parameters.

        Own values that are not finite are ignored, so that they do not survive the round.
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
    """Checks the arguments of Streaming DiLoCo.

    Raises:
      ValueError: If an argument is unusable, or a round of `period` steps is too short.
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
                f"`fragments` has {pattern!r}, which is not a regular expression: {error}. Pass a "
                "number, or a pattern for each fragment such as ['blocks/[0-3]/', '.*']."
            ) from error
    delay = check_int("fragment_sync_delay", delay, 0)
    alpha = check_static_number("fragment_update_alpha", alpha, 0, 1)
    # 0 if there are more fragments than steps, and then no delay is short enough.
    apart = period // count
    if delay >= apart:
        raise ValueError(
            f"An average must end before the next one begins. With fragments={count} and "
            f"sync_every={period} averages are {apart} steps apart, so fragment_sync_delay must be "
            f"less, got {delay}. Pass fewer fragments, a shorter delay or a larger sync_every."
        )
    # At least one step apart, because there are no more fragments than steps.
    ends = tuple(k * period // count for k in range(1, count + 1))
    return Streaming(split, ends, delay, alpha)


def check_not_complex(params: PyTree) -> None:
    """Refuses complex leaves, which are not averaged.

    Raises:
      ValueError: If a leaf is complex; the message names it.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = named_dtype(path, leaf)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"The leaf {leaf_name(path)} has dtype {dtype}, and only floating leaves are "
                "averaged. Split it, as optax.contrib.split_real_and_imaginary does."
            )


def numbered(params: PyTree, split: Split = 1) -> PyTree:
    """Returns the fragment number of each leaf, in a tree like the parameters; -1 if not floating.

    If `split` is a number, leaves are assigned in order of size, the largest first, each to the
    fragment with the fewest bytes so far. If `split` is patterns, a leaf gets the first pattern
    that is found in its path, written as ``blocks/0/kernel``.

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
    """Returns the tree with `optax.MaskedNode` in place of all leaves outside of a fragment.

    Key paths stay as they are, because a reducer may decide by a leaf's name. With None the result
    has the leaves of all fragments, so only leaves that are not floating are masked.
    """

    def chosen(number: int, leaf: Any) -> Any:
        if number == fragment or (fragment is None and number >= 0):
            return leaf
        return optax.MaskedNode()

    return jax.tree.map(chosen, numbers, tree)


def put_back(part: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree` with its leaves replaced by those that `part` has."""

    def chosen(leaf: Any, old: Any) -> Any:
        if is_masked(leaf):
            return old
        return leaf

    return jax.tree.map(chosen, part, tree, is_leaf=is_masked)


def _by_pattern(paths: Iterable[KeyPath], patterns: tuple[str, ...]) -> dict[KeyPath, int]:
    """Returns the number of the first pattern that is found in each leaf's name."""
    numbers: dict[KeyPath, int] = {}
    for path in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for number, pattern in enumerate(patterns):
            if re.search(pattern, name):
                numbers[path] = number
                break
        else:
            raise ValueError(
                f"No pattern of `fragments` is found in the path of the leaf {name!r}, so it would "
                "never be averaged. Add a pattern for it, such as '.*' at the end for all other "
                "leaves."
            )
    for number, pattern in enumerate(patterns):
        if number not in numbers.values():
            raise ValueError(
                f"No floating leaf belongs to the pattern {pattern!r} of `fragments`: a leaf "
                "belongs to the first pattern that is found in its path. Correct the pattern, or "
                "leave it out."
            )
    return numbers


def _by_size(sizes: dict[KeyPath, int], count: int) -> dict[KeyPath, int]:
    """Assigns each leaf, the largest first, to the fragment with the fewest bytes so far."""
    if count > max(len(sizes), 1):
        raise ValueError(
            f"fragments={count} is more than the {len(sizes)} floating leaves of the parameters. "
            "Pass at most as many fragments as leaves."
        )
    numbers: dict[KeyPath, int] = {}
    # For each fragment its bytes, its count of leaves and its index. Leaves count too, because an
    # empty leaf has no bytes.
    loads = [(0, 0, number) for number in range(count)]
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        size, leaves, numbers[path] = loads[0]
        heapq.heapreplace(loads, (size + sizes[path], leaves + 1, numbers[path]))
    return numbers
