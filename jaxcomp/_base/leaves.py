"""What a leaf of a tree is: its name, its dtype and rounding to one, the box that it is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.typing import Array, KeyPath, PyTree

WIRE_DTYPES = ("float32", "bfloat16", "float16")
FACTOR_DTYPES = (*WIRE_DTYPES, "int8", "int6")
# A residual may exceed what float16 holds, and would then be infinite for ever.
RESIDUAL_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Integers:
    """Signed integers on the wire, with a scale for each block; of six bits there is no dtype."""

    bits: int

    @property
    def name(self) -> str:
        """As users write it."""
        return f"int{self.bits}"


def leaf_name(path: KeyPath) -> str:
    """Writes a key path as users do: ``['layer']['kernel']``, or ``(root)`` for a bare array."""
    return jax.tree_util.keystr(path) or "(root)"


def key_names(path: KeyPath) -> list[str | None]:
    """Returns the name of each key of a path; None for a position in a list."""
    return [getattr(key, "key", getattr(key, "name", None)) for key in path]


def leaf_dtype(leaf: Any) -> Any:
    """Returns the dtype of an array, a shape struct or a Python number."""
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    return jnp.result_type(leaf)


def widest(dtypes: Iterable[Any], least: Any = jnp.float32) -> Any:
    """Returns the floating dtype of the most bits among `least` and others, the first of equals.

    Written out because promotion of mixed dtypes is an error under
    ``jax_numpy_dtype_promotion='strict'``.
    """
    return max((jnp.dtype(least), *dtypes), key=lambda dtype: jnp.finfo(dtype).bits)


def alike(kinds: Iterable[Hashable | None]) -> list[list[int]]:
    """Returns the positions of equal kinds, for every kind in order; None is of no kind."""
    positions: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            positions.setdefault(kind, []).append(i)
    return list(positions.values())


def put_at(values: list[Any], positions: Iterable[int], new: Iterable[Any]) -> None:
    """Puts new values at positions of a list."""
    for i, value in zip(positions, new, strict=True):
        values[i] = value


def wire_dtype(comm_dtype: Any, dtypes: Iterable[Any]) -> Any:
    """Returns what an all-reduce of gradients of these dtypes has on the wire: never integers."""
    if comm_dtype is None or isinstance(comm_dtype, Integers):
        return widest(dtypes)
    return comm_dtype


def compute_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a leaf is compressed: float32, or its own where that is wider."""
    return widest([dtype])


def in_compute_dtype(tree: PyTree) -> PyTree:
    """Returns the shapes of a tree whose floating leaves are in their `compute_dtype`."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf_dtype(leaf)
        if is_floating(leaf):
            dtype = compute_dtype(dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype)

    return jax.tree.map(shape, tree)


def clipped(x: Array, dtype: Any) -> Array:
    """Replaces finite values beyond the range of `dtype` by its largest value.

    Among the 16-bit types only float16 has a smaller range than float32.
    """
    if jnp.finfo(dtype).nexp >= jnp.finfo(x.dtype).nexp:
        return x
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))


def saturated(x: Array, dtype: Any) -> Array:
    """Casts what is `clipped` to `dtype`."""
    return clipped(x, dtype).astype(dtype)


def checked_dtype(name: str, dtype: Any, allowed: tuple[str, ...] = WIRE_DTYPES) -> Any:
    """Returns `dtype` as NumPy's, as `Integers`, or None; refuses any but the allowed ones."""
    if dtype is None:
        return None
    try:
        kind = jnp.dtype(dtype).name
    except TypeError:
        kind = dtype
    if kind not in allowed:
        hint = "."
        if kind == "int8" and allowed == WIRE_DTYPES:
            hint = (
                ": a sum of 8-bit integers overflows. Use jaxcomp.quantized_allreduce, or "
                f"jaxcomp.powersgd with {name}=jnp.int8."
            )
        raise ValueError(
            f"`{name}` must be one of {', '.join(allowed)} or None, got {dtype!r}{hint}"
        )
    if kind in WIRE_DTYPES:
        return jnp.dtype(kind)
    return Integers(int(kind.removeprefix("int")))


def floating_leaves(tree: PyTree) -> list[Array]:
    """Returns the leaves that a reducer averages, in flattening order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> [x.shape for x in extend.floating_leaves({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})]
      [(3,), (2, 3)]
    """
    return list(filter(is_floating, jax.tree.leaves(tree)))


def with_leaves(tree: PyTree, arrays: Sequence[Array]) -> PyTree:
    """Puts arrays in the place of a tree's `floating_leaves`; others as they are.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> extend.with_leaves({"w": jnp.ones(2)}, [jnp.zeros(2)])["w"].tolist()
      [0.0, 0.0]
    """
    new = iter(arrays)
    return jax.tree.map(lambda x: next(new) if is_floating(x) else x, tree)


def is_array(leaf: Any) -> bool:
    """Tells an array of JAX or NumPy from a flag, a function, a ConfigDict."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def arrays_only(tree: PyTree) -> PyTree:
    """Returns the tree with None in the place of what is not an array."""
    return jax.tree.map(lambda x: x if is_array(x) else None, tree)


def arrays_or_shapes(tree: PyTree) -> PyTree:
    """Returns the tree with None in the place of what is neither an array nor the shape of one."""

    def kept(leaf: Any) -> Any:
        if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return None

    return jax.tree.map(kept, tree)


def with_arrays(tree: PyTree, arrays: PyTree) -> PyTree:
    """Returns the tree with other arrays in the places that `arrays_only` left; the rest stays."""
    return jax.tree.map(lambda x, array: x if array is None else array, tree, arrays)


def nodes_of(tree: PyTree, is_node: Callable[[Any], bool]) -> list[Any]:
    """Returns the nodes of a kind in a tree, without those inside of others."""
    return list(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def replaced(tree: PyTree, old: Any, new: Any) -> PyTree:
    """Returns a tree with another node in the place of `old`, itself one of its nodes."""

    def is_old(node: Any) -> bool:
        return node is old

    return jax.tree.map(lambda node: new if is_old(node) else node, tree, is_leaf=is_old)


def is_masked(node: Any) -> bool:
    """Tells whether a state has nothing for a leaf."""
    return isinstance(node, optax.MaskedNode)


def is_floating(leaf: Any) -> bool:
    """Tells whether a leaf is one that a reducer averages."""
    return jnp.issubdtype(leaf_dtype(leaf), jnp.floating)


def is_key(leaf: Any) -> bool:
    """Tells a random key of `jax.random.key` from numbers."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def in_words(leaf: Any) -> Any:
    """Returns the words of a random key; numbers as they are."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf


def all_finite(leaves: Sequence[Array]) -> Array:
    """Tells, in a bool scalar, whether every floating value is finite."""
    flags = []
    for leaf in leaves:
        if is_floating(leaf):
            flags.append(jnp.isfinite(leaf).all())
    if not flags:
        return jnp.array(True)
    return jnp.stack(flags).all()


def nan_unless(finite: Array, values: Sequence[Array]) -> list[Array]:
    """Returns the arrays, or NaN throughout."""
    return [jnp.where(finite, x, jnp.nan) for x in values]


def unboxed(tree: PyTree) -> PyTree:
    """Takes what is in each of linen's or nnx's boxes out of the box.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> extend.unboxed({"w": jnp.ones(2)})["w"].tolist()
      [1.0, 1.0]
    """
    return jax.tree.map(_content, tree, is_leaf=_is_box)


def boxed_as(tree: PyTree, like: PyTree) -> PyTree:
    """Inverts `unboxed`: puts the leaves into the boxes of `like`."""
    return jax.tree.structure(like).unflatten(jax.tree.leaves(tree))


def _is_box(node: Any) -> bool:
    """Tells a node with one array inside and metadata about it.

    Such are linen's `Partitioned` and `LogicallyPartitioned`, and nnx's `Variable`. They are known
    by their methods, so that nothing here imports flax. Made with the structure of the parameters,
    a state would have boxes too, and with them the weight's axis names on a factor of another
    shape.
    """
    kind = type(node)
    if hasattr(kind, "unbox") and hasattr(kind, "replace_boxed"):
        return True
    return hasattr(kind, "get_metadata") and hasattr(kind, "set_metadata")


def _content(node: Any) -> Any:
    inside = []
    if _is_box(node):
        inside = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    if len(inside) != 1:
        return node
    return unboxed(inside[0])
