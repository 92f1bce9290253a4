"""Leaves of trees: their names, their dtypes and casts, and the boxes that hold them.

All other wings use these functions. Two rules are fixed here, so that no two modules differ: a
reducer averages the floating leaves and leaves all others alone, and arithmetic is in at least
float32, the `compute_dtype` of a leaf. A tree of the user may hold anything (flags, modules, flax's
boxes), so these functions look at what a leaf is before they read its dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import answers_other_names, is_traced
from jaxcomp._base.typing import Array, KeyPath, PyTree

# What an all-reduce can sum; and, beside these, integers, which are never summed on the wire.
WIRE_DTYPES = ("float32", "bfloat16", "float16")
FACTOR_DTYPES = (*WIRE_DTYPES, "int8", "int6")
# Not float16: a residual may exceed its range, and would then stay infinite.
RESIDUAL_DTYPES = ("float32", "bfloat16")
# What flax's modules hold beside parameters: linen's collections, and nnx's classes of variables.
_COLLECTIONS = ("batch_stats", "cache", "intermediates")
_NOT_TRAINED = ("BatchStat", "Cache", "Intermediate")


# Not a dtype, because NumPy has no integers of six bits.
@dataclasses.dataclass(frozen=True)
class Integers:
    """Describes a wire format: signed integers, with a scale for each block."""

    bits: int

    @property
    def name(self) -> str:
        """Returns the name as users write it."""
        return f"int{self.bits}"


def leaf_name(path: KeyPath) -> str:
    """Returns a key path as text: ``['layer']['kernel']``, or ``(root)`` for a bare array."""
    return jax.tree_util.keystr(path) or "(root)"


def key_names(path: KeyPath) -> list[str | None]:
    """Returns the name of each key of a path; None for a position in a list."""
    # A dict's key has `key`, an attribute's has `name`, and a position in a list has neither.
    return [getattr(key, "key", getattr(key, "name", None)) for key in path]


def leaf_dtype(leaf: Any) -> Any:
    """Returns the dtype of a shape struct, or that of the JAX array of an array or a number."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return jax.dtypes.canonicalize_dtype(leaf.dtype)
    if hasattr(leaf, "dtype"):
        return leaf.dtype
    return jnp.result_type(leaf)


def named_dtype(path: KeyPath, leaf: Any) -> Any:
    """Returns the `leaf_dtype` of a leaf.

    Raises:
      ValueError: If the leaf is neither an array nor a number; the message names it.
    """
    kind = type(leaf).__name__
    try:
        if not has_texts(leaf):
            return leaf_dtype(leaf)
        kind += f" of {leaf.dtype}"
    except TypeError:
        pass
    raise ValueError(
        f"The leaf {leaf_name(path)} is a {kind} and not an array of numbers. For an Equinox "
        "module pass eqx.filter(model, eqx.is_inexact_array), for other trees the arrays that are "
        "trained."
    )


def has_texts(leaf: Any) -> bool:
    """Returns whether a leaf is an array of NumPy that holds texts, dates or objects."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm"


def checked_params(name: str, tree: PyTree) -> PyTree:
    """Returns parameters, or a tree like them, without boxes; refuses other trees.

    Args:
      name: The name of the argument.
      tree: The argument.

    Raises:
      ValueError: If it is a count of parameters, a part of it is a state or is not trained, or a
        leaf is neither an array nor a number. The message names the part or leaf.
    """
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=_is_no_parameter):
        if not _is_no_parameter(node) and not isinstance(tree, int):
            continue
        kind = type(node).__name__
        if isinstance(node, Mapping):
            kind += f" of {', '.join(map(repr, node))}"
        raise ValueError(
            f"`{name}` must be a tree of parameters alone, or one like it, and {leaf_name(path)} "
            f"is of type {kind}. Pass state.params of a TrainState, nnx.state(model, nnx.Param), "
            "linen's variables['params'], or mu of Adam's state."
        )
    tree = unboxed(tree)
    jax.tree.map_with_path(named_dtype, tree)  # refuses other objects than arrays
    return tree


def _is_no_parameter(node: Any) -> bool:
    """Returns whether a node is a state, an optimizer, or holds values that are not trained.

    Those of flax are recognised by their names, so that it is not imported.
    """
    if isinstance(node, Mapping):
        return "params" in node and not node.keys().isdisjoint(_COLLECTIONS)
    if isinstance(node, optax.GradientTransformation):
        return True
    kind = type(node)
    if issubclass(kind, tuple) and kind.__module__.startswith("optax"):
        # Optax also wraps parameters, as split_real_and_imaginary does.
        return kind.__name__.endswith("State")
    if hasattr(kind, "per_replica") or hasattr(node, "opt_state"):
        return True
    return any(base.__name__ in _NOT_TRAINED for base in kind.__mro__)


def widest(dtypes: Iterable[Any], least: Any = jnp.float32) -> Any:
    """Returns the floating dtype with the most bits among `least` and others, the first of equals.

    This is not `jnp.promote_types`, because promotion of mixed dtypes is an error under
    ``jax_numpy_dtype_promotion='strict'``.
    """
    return max((jnp.dtype(least), *dtypes), key=lambda dtype: jnp.finfo(dtype).bits)


def alike(kinds: Iterable[Hashable | None]) -> list[list[int]]:
    """Returns lists of the positions of equal kinds, in order; None is left out."""
    positions: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            positions.setdefault(kind, []).append(i)
    return list(positions.values())


def put_at(values: list[Any], positions: Iterable[int], new: Iterable[Any]) -> None:
    """Puts new values at positions of a list."""
    for i, value in zip(positions, new, strict=True):
        values[i] = value


def compute_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a leaf is compressed: float32, or the leaf's wider dtype."""
    return widest([dtype])


def in_compute_dtype(tree: PyTree) -> PyTree:
    """Returns the shapes of a tree whose floating leaves are in their `compute_dtype`."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf_dtype(leaf)
        if is_floating(leaf):
            dtype = compute_dtype(dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype)

    return jax.tree.map(shape, tree)


def is_narrow(dtype: Any) -> bool:
    """Returns whether a floating dtype has fewer bits for the exponent than float32: float16."""
    return jnp.finfo(dtype).nexp < jnp.finfo(jnp.float32).nexp


def clipped(x: Array, dtype: Any) -> Array:
    """Replaces finite values beyond the range of `dtype` by its largest value.

    Among the 16-bit types only float16 has a smaller range than float32.
    """
    if jnp.finfo(dtype).nexp >= jnp.finfo(x.dtype).nexp:
        return x
    largest = float(jnp.finfo(dtype).max)
    # An infinite value stays: it is how a step that is not finite is recognised.
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))


def limited(residual: Array, values: int, replicas: int) -> Array:
    """Limits a residual so that no product or sum of later steps overflows because of it.

    One finite step could otherwise leave a residual of which every later step is refused: its
    gradients may be so large in a direction that the factors do not see. In float32 the limit is
    about 3e30 / `replicas` for a matrix of a hundred million values.

    Args:
      residual: The part of a gradient that was not sent.
      values: The number of values that are multiplied or sent together.
      replicas: The number of replicas.
    """
    if not values:
        return residual
    largest = float(jnp.finfo(residual.dtype).max) / (values * replicas)
    return jnp.clip(residual, -largest, largest)


def saturated(x: Array, dtype: Any) -> Array:
    """Clips `x` to the range of `dtype`, and casts it."""
    return clipped(x, dtype).astype(dtype)


def checked_dtype(name: str, dtype: Any, allowed: tuple[str, ...] = WIRE_DTYPES) -> Any:
    """Returns `dtype` as a NumPy dtype, `Integers` or None; refuses dtypes that are not allowed."""
    if dtype is None:
        return None
    try:
        kind = jnp.dtype(dtype).name
    except (TypeError, ValueError):  # "int6" is no name of a NumPy dtype
        kind = str(dtype)
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
    if kind.startswith("int"):
        return Integers(int(kind.removeprefix("int")))
    return jnp.dtype(kind)


@answers_other_names
def floating_leaves(tree: PyTree) -> list[Array]:
    """Returns the leaves that a reducer averages, in flattening order.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> [x.shape for x in extend.floating_leaves({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})]
      [(3,), (2, 3)]
    """
    return list(filter(is_floating, jax.tree.leaves(tree)))


@answers_other_names
def with_leaves(tree: PyTree, arrays: Sequence[Array]) -> PyTree:
    """Replaces a tree's `floating_leaves` by arrays; other leaves stay.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> extend.with_leaves({"w": jnp.ones(2)}, [jnp.zeros(2)])["w"].tolist()
      [0.0, 0.0]
    """
    needed = len(floating_leaves(tree))
    if len(arrays) != needed:
        raise ValueError(
            f"`arrays` must hold one array for each of the {needed} floating leaves of `tree`, got "
            f"{len(arrays)}."
        )
    new = iter(arrays)
    return jax.tree.map(lambda x: next(new) if is_floating(x) else x, tree)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of JAX or NumPy, or the shape of one."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def arrays_only(tree: PyTree) -> PyTree:
    """Returns the tree with None in place of leaves that are not arrays."""
    return jax.tree.map(lambda x: x if is_array(x) else None, tree)


def with_arrays(tree: PyTree, arrays: PyTree) -> PyTree:
    """Inverts `arrays_only`: returns the tree with its arrays replaced by those of `arrays`."""
    return jax.tree.map(lambda x, array: x if array is None else array, tree, arrays)


def check_values(name: str, tree: PyTree, place: KeyPath = (), *, on_host: bool = False) -> None:
    """Refuses leaves without values: shapes, and arrays that were donated.

    Args:
      name: The name of an argument.
      tree: The argument, or the part of it at the path `place`.
      place: The path.
      on_host: True to refuse also what NumPy cannot read: tracers, and arrays with a part in
        another process.

    Raises:
      ValueError: If it finds one; the message has the name of the argument and of the leaf.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        where = leaf_name((*place, *path))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"`{name}` has only a shape at {where}: pass the arrays of a run.")
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
            raise ValueError(
                f"`{name}` was deleted at {where}, as by jax.jit(step, donate_argnums=...): pass "
                "what the last step returned."
            )
        if not on_host:
            continue
        if is_traced(leaf):
            raise ValueError(
                f"`{name}` is traced at {where}: read it outside of jax.jit, between two steps."
            )
        if not getattr(leaf, "is_fully_addressable", True) and not leaf.is_fully_replicated:
            raise ValueError(
                f"`{name}` has a part of {where} in another process. Gather it first, "
                f"as with jax.experimental.multihost_utils.process_allgather({name}, tiled=True)."
            )


def nodes_of(tree: PyTree, is_node: Callable[[Any], bool]) -> list[Any]:
    """Returns the outermost nodes of a tree for which `is_node` is true."""
    return list(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def replaced(tree: PyTree, old: Any, new: Any) -> PyTree:
    """Returns a tree with the node `old` replaced by `new`."""
    is_old = functools.partial(operator.is_, old)
    return jax.tree.map(lambda node: new if node is old else node, tree, is_leaf=is_old)


def is_masked(node: Any) -> bool:
    """Returns whether a node is `optax.MaskedNode`, which stands for no leaf."""
    return isinstance(node, optax.MaskedNode)


def is_floating(leaf: Any) -> bool:
    """Returns whether a leaf is floating, so that a reducer averages it."""
    return jnp.issubdtype(leaf_dtype(leaf), jnp.floating)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is a typed random key, as `jax.random.key` makes it."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def in_words(leaf: Any) -> Any:
    """Returns the data of a random key; other arrays are returned as they are."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf


def all_finite(leaves: Sequence[Array]) -> Array:
    """Returns a bool scalar: True if every floating value is finite."""
    flags = [jnp.isfinite(leaf).all() for leaf in filter(is_floating, leaves)]
    return jnp.all(jnp.array(flags, bool))


def nan_unless(finite: Array, values: Sequence[Array]) -> list[Array]:
    """Returns the arrays if `finite` is true, else arrays of NaN."""
    return [jnp.where(finite, x, jnp.nan) for x in values]


@answers_other_names
def unboxed(tree: PyTree) -> PyTree:
    """Replaces each box of linen or nnx by the value in it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> extend.unboxed({"w": jnp.ones(2)})["w"].tolist()
      [1.0, 1.0]
    """
    return jax.tree.map(_content, tree, is_leaf=_is_box)


def boxed_as(tree: PyTree, like: PyTree) -> PyTree:
    """Inverts `unboxed`: puts leaves into the boxes of `like`."""
    return jax.tree.structure(like).unflatten(jax.tree.leaves(tree))


def _is_box(node: Any) -> bool:
    """Returns whether a node is a box: an array with metadata.

    Boxes are linen's `Partitioned` and `LogicallyPartitioned`, and nnx's `Variable`. They are
    recognised by their methods, so that flax is not imported. A state must not have them: its
    factors have other shapes than the weights whose axis names a box holds.
    """
    kind = type(node)
    if hasattr(kind, "unbox") and hasattr(kind, "replace_boxed"):
        return True
    return hasattr(kind, "get_metadata") and hasattr(kind, "set_metadata")


def _content(node: Any) -> Any:
    # Boxes nest, such as an nnx Param of a Partitioned. One with several values has no content that
    # could stand in its place, so it stays.
    inside = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    if not _is_box(node) or len(inside) != 1:
        return node
    return unboxed(inside[0])
