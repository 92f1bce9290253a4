"""What a leaf of a tree is: its name, its dtype and rounding to one, the box that it is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.typing import Array, KeyPath, PyTree

_WIRE = ("float32", "bfloat16", "float16")
# A box is a node of the tree with one array inside and metadata about it: linen's `Partitioned` and
# `LogicallyPartitioned`, nnx's `Variable`. They are known by their methods, so that nothing here
# imports flax. Made with the structure of the parameters, a state would have boxes too, and with
# them the weight's axis names on a factor of another shape.
_BOX_METHODS = (("unbox", "replace_boxed"), ("get_metadata", "set_metadata"))


@dataclasses.dataclass(frozen=True)
class Integers:
    """Signed integers on the wire, with a scale for each block; of six bits there is no dtype."""

    bits: int

    @property
    def name(self) -> str:
        """As users write it."""
        return f"int{self.bits}"


_INTEGERS = {wire.name: wire for wire in (Integers(8), Integers(6))}


def leaf_name(path: KeyPath) -> str:
    """Writes a key path as users do: ``['layer']['kernel']``, or ``(root)`` for a bare array."""
    return jax.tree_util.keystr(path) or "(root)"


def leaf_dtype(leaf: Any) -> Any:
    """Returns the dtype of an array, a shape struct or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def widest(dtypes: Iterable[Any], least: Any = jnp.float32) -> Any:
    """Returns the floating dtype of the most bits among `least` and others, the first of equals.

    Written out because promotion of mixed dtypes is an error under
    ``jax_numpy_dtype_promotion='strict'``.
    """
    return max((jnp.dtype(least), *dtypes), key=lambda dtype: jnp.finfo(dtype).bits)


def wire_dtype(comm_dtype: Any, dtypes: Iterable[Any]) -> Any:
    """Returns what an all-reduce of gradients of these dtypes has on the wire: never integers."""
    exact = comm_dtype is None or isinstance(comm_dtype, Integers)
    return widest(dtypes) if exact else comm_dtype


def compute_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a leaf is compressed: float32, or its own where that is wider."""
    return widest([dtype])


def in_compute_dtype(tree: PyTree) -> PyTree:
    """Returns the shapes of a tree whose floating leaves are in their `compute_dtype`."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf_dtype(leaf)
        wide = compute_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
        return jax.ShapeDtypeStruct(np.shape(leaf), wide)

    return jax.tree.map(shape, tree)


def saturated(x: Array, dtype: Any) -> Array:
    """Casts `x` to `dtype`; what is finite and beyond its range becomes its largest value.

    Of the 16-bit types only float16 ends before float32 does.
    """
    if jnp.finfo(dtype).nexp >= jnp.finfo(x.dtype).nexp:
        return x.astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    clipped = jnp.clip(x, -largest, largest)
    return jnp.where(jnp.isinf(x), x, clipped).astype(dtype)


def excess(x: Array, dtype: Any) -> Array:
    """Returns what `saturated` leaves out of `x`, in the dtype of `x`; zeros inside the range."""
    largest = float(jnp.finfo(dtype).max)
    return x - jnp.clip(x, -largest, largest)


def checked_dtype(name: str, dtype: Any) -> Any:
    """Returns `dtype` of an all-reduce, a NumPy dtype or None; refuses all but 32 and 16 bits."""
    if _dtype_name(dtype) == "int8":
        raise ValueError(
            f"`{name}` must be one of {', '.join(_WIRE)} or None, got {dtype!r}: a sum of 8-bit "
            "integers overflows. Use jaxcomp.quantized_allreduce, or jaxcomp.powersgd with "
            f"{name}=jnp.int8."
        )
    return _checked(name, dtype, _WIRE)


def checked_factor_dtype(name: str, dtype: Any) -> Any:
    """Returns `dtype` of factors, a NumPy dtype, `Integers` or None; refuses any other."""
    wire = dtype if isinstance(dtype, str) else _dtype_name(dtype)
    if wire in _INTEGERS:
        return _INTEGERS[wire]
    return _checked(name, dtype, (*_WIRE, *_INTEGERS))


def checked_residual_dtype(dtype: Any) -> Any:
    """Returns `dtype` of a stored residual or None; refuses all but float32 and bfloat16."""
    # A residual may exceed what float16 holds, and would then be infinite for ever.
    return _checked("residual_dtype", dtype, ("float32", "bfloat16"))


def _checked(name: str, dtype: Any, allowed: tuple[str, ...]) -> Any:
    if dtype is None:
        return None
    if _dtype_name(dtype) in allowed:
        return jnp.dtype(dtype)
    raise ValueError(f"`{name}` must be one of {', '.join(allowed)} or None, got {dtype!r}.")


def _dtype_name(dtype: Any) -> str | None:
    """Returns NumPy's name; None for what is not a dtype."""
    if dtype is None:  # which NumPy takes for float64
        return None
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return None


def floating_leaves(tree: PyTree) -> list[Array]:
    """Returns the leaves that a reducer averages, in flattening order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> [x.shape for x in extend.floating_leaves({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})]
      [(3,), (2, 3)]
    """
    return [x for x in jax.tree.leaves(tree) if is_floating(x)]


def with_leaves(tree: PyTree, arrays: Sequence[Array]) -> PyTree:
    """Puts arrays in the place of a tree's `floating_leaves`; others as they are.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> extend.with_leaves({"w": jnp.ones(2)}, [jnp.zeros(2)])["w"].tolist()
      [0.0, 0.0]
    """
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(arrays)
    return treedef.unflatten([next(new) if is_floating(x) else x for x in leaves])


def is_floating(leaf: Any) -> bool:
    """Tells whether a leaf is one that a reducer averages."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def all_finite(leaves: Sequence[Array]) -> Array:
    """Tells, in a bool scalar, whether every floating value is finite."""
    flags = [jnp.isfinite(x).all() for x in leaves if is_floating(x)]
    return jnp.stack(flags).all() if flags else jnp.array(True)


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
    return any(_has_all(type(node), names) for names in _BOX_METHODS)


def _has_all(kind: type, names: Sequence[str]) -> bool:
    return all(hasattr(kind, name) for name in names)


def _content(node: Any) -> Any:
    if not _is_box(node):
        return node
    inside = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    if len(inside) != 1:
        return node
    return unboxed(inside[0])
