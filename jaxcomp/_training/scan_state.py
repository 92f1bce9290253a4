"""The state of one reducer for layers in a scan, and its way out of a backward pass.

A backward pass returns nothing but cotangents, which are floating and of the type of what they
belong to. So a state goes in and comes out as floats: of integers the bits, unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.per_replica import of_reducer
from jaxcomp._reducers.contract import Reducer


class ScanState(NamedTuple):
    """State of the reducers of a model with scanned layers, from `ScanValueAndGrad`."""

    layers: PyTree  # the state of one layer's reducer, each leaf with a leading axis of layers
    rest: PyTree  # the state of the reducer of all other parameters
    # (1,) float32: whose the residuals of the layers are, 0 for everybody's; per replica. () if the
    # reducer keeps none. One for all layers, whose own states have () in its place.
    mark: PyTree = ()

    per_replica = ("mark",)


def depth_of(params: PyTree) -> int:
    """The number of layers.

    Raises:
      ValueError: If leaves disagree on it, or it is 0, or they are not floating.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    shapes = {leaf_name(path): tuple(np.shape(leaf)) for path, leaf in leaves}
    if len(depths := {shape[:1] for shape in shapes.values()}) != 1 or depths & {(), (0,)}:
        listed = "".join(f"\n  {name}: {shape}" for name, shape in shapes.items())
        raise ValueError(
            "The parameters of scanned layers need one leading axis of layers, as long for every "
            f"leaf:{listed or ' there is none'}\nStack them with jax.tree.map(lambda *x: "
            "jnp.stack(x), *layers), or make them with jax.vmap of one layer's init."
        )
    fixed = [leaf_name(path) for path, x in leaves if not jnp.issubdtype(x.dtype, jnp.floating)]
    if fixed:
        raise ValueError(
            f"The parameters of scanned layers must be floating, and {fixed[0]} is not. Pass what "
            "is not trained to layers(params, x, *args) as one of the further arguments."
        )
    return next(iter(shapes.values()))[0]


def at(tree: PyTree, i: Any) -> PyTree:
    """One layer's part of stacked arrays."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def put(tree: PyTree, i: Any, values: PyTree) -> PyTree:
    """The stacked arrays with one layer's part replaced."""
    return jax.tree.map(lambda x, v: lax.dynamic_update_index_in_dim(x, v, i, 0), tree, values)


def stacked_init(reducer: Reducer, params: PyTree) -> tuple[PyTree, PyTree]:
    """The reducer's first state for every layer, and the mark that they share."""
    depth = depth_of(params)
    one, mark = without_marks(reducer.init(jax.tree.map(lambda x: x[0], params)))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (depth, *jnp.shape(x))), one), mark


def without_marks(state: PyTree) -> tuple[PyTree, PyTree]:
    """The state with () for every mark, and one of the marks; () where there is none."""
    marks: list[Any] = []

    def strip(node: Any) -> Any:
        if not _is_marked(node):
            return node
        marks.extend(jax.tree.leaves(node.mark))
        return _mapped_fields(strip, node)._replace(mark=())

    stripped = jax.tree.map(strip, state, is_leaf=_is_marked)
    return stripped, marks[0] if marks else ()


def with_mark(state: PyTree, mark: PyTree) -> PyTree:
    """The state with this mark in the place of all that `without_marks` took out."""
    if isinstance(mark, tuple):
        return state

    def insert(node: Any) -> Any:
        return _mapped_fields(insert, node)._replace(mark=mark) if _is_marked(node) else node

    return jax.tree.map(insert, state, is_leaf=_is_marked)


def _is_marked(node: Any) -> bool:
    return of_reducer(node) and "mark" in node.per_replica and hasattr(node, "_replace")


def _mapped_fields(function: Any, node: Any) -> Any:
    """The state with `function` mapped over all states that its fields hold."""
    return node._make(jax.tree.map(function, x, is_leaf=_is_marked) for x in node)


def as_floats(state: PyTree) -> PyTree:
    """Every leaf as floats, from which `from_floats` makes the same bits again."""

    def one(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        if x.dtype.itemsize < 4:  # also of bool, which has no bits to take
            return x.astype(jnp.float32)
        return lax.bitcast_convert_type(x, jnp.dtype(f"float{8 * x.dtype.itemsize}"))

    return jax.tree.map(one, state)


def from_floats(floats: PyTree, like: PyTree) -> PyTree:
    """The state that `as_floats` was given; `like` are arrays of its dtypes."""

    def one(x: Array, like: Any) -> Array:
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            bits = lax.bitcast_convert_type(x, jnp.uint32)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
        if jnp.issubdtype(like.dtype, jnp.inexact):
            return x
        if like.dtype.itemsize < 4:
            return x.astype(like.dtype)
        return lax.bitcast_convert_type(x, like.dtype)

    return jax.tree.map(one, floats, like)
