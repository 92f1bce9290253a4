"""Parameters in boxes: flax's annotated arrays, whose names and shardings are not a factor's.

A box is a node of the tree with one array inside and metadata about it: linen's ``Partitioned`` and
``LogicallyPartitioned``, nnx's ``Variable``. They are known by their methods, so that nothing here
imports flax. Made with the structure of the parameters, a state would have boxes too, and with them
the weight's axis names on a factor of another shape.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxcomp._base.typing import PyTree

_METHODS = (("unbox", "replace_boxed"), ("get_metadata", "set_metadata"))


def unboxed(tree: PyTree) -> PyTree:
    """The same tree with what is in each box in the place of the box; the same leaves.

    Args:
      tree: Any tree, with linen's or nnx's boxes or without.

    Returns:
      The tree of plain arrays that the states of reducers are made like.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> extend.unboxed({"w": jnp.ones(2)})["w"].tolist()
      [1.0, 1.0]
    """
    return jax.tree.map(_content, tree, is_leaf=_is_box)


def boxed_as(tree: PyTree, like: PyTree) -> PyTree:
    """The inverse of `unboxed`: a tree of the same leaves, in the boxes of `like`."""
    return jax.tree.structure(like).unflatten(jax.tree.leaves(tree))


def _is_box(node: Any) -> bool:
    return any(all(hasattr(type(node), name) for name in names) for names in _METHODS)


def _content(node: Any) -> Any:
    if not _is_box(node):
        return node
    inside = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return unboxed(inside[0]) if len(inside) == 1 else node
