"""Parameters in fragments of about equal size, to be averaged one at a time."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.leaves import leaf_dtype, leaf_name
from jaxcomp._base.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Which fragment each leaf belongs to, in flattening order; -1 for one that is not floating."""

    owner: tuple[int, ...]

    def take(self, tree: PyTree, k: int) -> PyTree:
        """The tree with `optax.MaskedNode` in place of every other fragment's leaves.

        Key paths stay as they are: a reducer may decide by a leaf's name.
        """
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(
            [
                leaf if owner == k else optax.MaskedNode()
                for leaf, owner in zip(leaves, self.owner, strict=True)
            ]
        )

    def put(self, tree: PyTree, part: PyTree, k: int) -> PyTree:
        """`tree` with the leaves of fragment `k` from `part`."""
        leaves, treedef = jax.tree.flatten(tree)
        values = iter(jax.tree.leaves(part))
        return treedef.unflatten(
            [
                next(values) if owner == k else leaf
                for leaf, owner in zip(leaves, self.owner, strict=True)
            ]
        )


def make_fragments(params: PyTree, count: int) -> Fragments:
    """Spreads the floating leaves over `count` fragments, the largest leaf first, to the lightest.

    Raises:
      ValueError: If there are fewer floating leaves than fragments, or a leaf is complex.
    """
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
    if count > max(len(sizes), 1):
        raise ValueError(
            f"fragments={count} is more than the {len(sizes)} floating leaves of the parameters. "
            "Pass at most as many fragments as leaves."
        )
    owner = [-1] * len(leaves)
    load = [0] * count
    members = [0] * count
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        # Empty leaves weigh nothing; the second key still gives every fragment one.
        k = min(range(count), key=lambda k: (load[k], members[k]))
        owner[i] = k
        load[k] += sizes[i]
        members[k] += 1
    return Fragments(tuple(owner))
