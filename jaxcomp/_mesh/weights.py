r"""Weights of replicas: gradients are multiplied by their weight before any average.

The plain mean of :math:`g_w a_w / \bar a`, with the weights' mean :math:`\bar a`, is the weighted
mean :math:`\sum_w a_w g_w / \sum_w a_w`. So reducers need no code for weights. The cost is one
all-reduce of a scalar, which does not wait for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.checks import answers_other_names
from jaxcomp._base.leaves import compute_dtype, floating_leaves, is_floating, widest, with_leaves
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.collectives import as_local, mean_each, reduce_mean

# A mean below this or above its reciprocal is refused: quotients could become 0 or infinite.
_LEAST = 1e-30
_OTHER_NAMES = ("w", "wt", "wts", "wgt", "wgts", "count", "counts", "examples")


def refuse_misspelt_weight(names: Iterable[str]) -> None:
    """Refuses extra arguments of an update that look like ``weight`` and would do nothing.

    Other extra arguments are for other links of a chain. The last word of the name decides, as in
    ``example_weights``: a short word with a w that lacks at most one letter of ``weight``.

    Raises:
      ValueError: If it finds such a name; the message has the right one.
    """
    for name in names:
        word = name.lower().strip("_").rpartition("_")[2]
        missing = set("weight").difference(word)
        # A longer word is no slip, even if it has the letters.
        near = len(word) < 10 and len(missing) <= 1 and "w" in word
        if near or word in _OTHER_NAMES or word.endswith(("weight", "weights")):
            raise ValueError(
                f"There is no argument `{name}`. Pass `weight`, which says how much a replica, or "
                "each of its examples, counts."
            )


def as_weights(weight: Any) -> Array:
    """Returns weights, real numbers or bools, as an array.

    Raises:
      ValueError: If they are something else.
    """
    try:
        array = jnp.asarray(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"`weight` must hold real numbers, got a {type(weight).__name__}: {error}"
        ) from error
    real = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_
    if not real or jnp.iscomplexobj(array):
        raise ValueError(f"`weight` must hold real numbers, got dtype {array.dtype}.")
    return array


def share_of_mean(weight: Any, axis_name: AxisName, dtype: Any) -> tuple[Array, Array]:
    """Returns this replica's weight divided by the mean weight, and the mean weight.

    Args:
      weight: This replica's weight: one number, not negative; with 0 the replica is ignored.
      axis_name: The mapped axis or axes.
      dtype: The floating dtype of the results, float32 or wider.

    Returns:
      Two scalars. The share is NaN if a weight is negative or not finite, or the mean is
      not between 1e-30 and 1e30. Gradients that are multiplied by it become NaN.

    Raises:
      ValueError: If `weight` is not one real number.
    """
    weight = as_weights(weight)
    if weight.size != 1:
        raise ValueError(
            f"`weight` must be one number for this replica, got shape {weight.shape}. Map the "
            "array of all replicas' weights along the axis, as the batch."
        )
    # `lax.psum` refuses a value whose type varies along a part of the axes only.
    scalar = as_local(weight.astype(dtype).reshape(()), axis_name)
    scalar = jnp.where(scalar >= 0, scalar, jnp.nan)
    mean = reduce_mean([scalar], axis_name, dtype).means[0]
    usual = (mean >= _LEAST) & (mean <= 1 / _LEAST)
    return jnp.where(usual, scalar / mean, jnp.nan), mean


def weighted(tree: PyTree, share: Array) -> PyTree:
    """Multiplies every floating leaf by `share`, in float32 or wider; zeros if `share` is 0.

    A replica with weight 0 may hold NaN, and NaN times 0 would be NaN.
    """

    def times(leaf: Any) -> Any:
        if not is_floating(leaf):  # float0, the gradient of an integer
            return leaf
        wide = leaf.astype(compute_dtype(leaf.dtype))
        product = wide * share.astype(wide.dtype)
        return jnp.where(share == 0, jnp.zeros_like(wide), product)

    return jax.tree.map(times, tree)


def averaged(tree: PyTree, axis_name: AxisName, weight: Any = None) -> tuple[PyTree, Array | None]:
    """Averages every floating leaf of a tree in one all-reduce; others stay as they are.

    Args:
      tree: Any tree of arrays. Means are computed in float32 or wider and cast back.
      axis_name: The mapped axis or axes.
      weight: This replica's weight; None if all replicas have the same weight.

    Returns:
      The averages; and a bool scalar, False if all weights are 0 (None without `weight`).
    """
    tree = jax.tree.map(jnp.asarray, tree)
    leaves = floating_leaves(tree)
    wide = as_local([x.astype(compute_dtype(x.dtype)) for x in leaves], axis_name)
    counted = None
    if weight is not None:
        share, mean_weight = share_of_mean(weight, axis_name, widest(x.dtype for x in wide))
        wide = weighted(wide, share)
        counted = mean_weight != 0
    means = mean_each(wide, axis_name).means
    cast = [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
    return with_leaves(tree, cast), counted


@answers_other_names
def weighted_gradients(gradients: PyTree, weight: Any, axis_name: AxisName) -> PyTree:
    r"""Multiplies gradients :math:`g_w` by :math:`a_w / \bar a`: their plain mean is then weighted.

    ``update(..., weight=a)`` of every reducer does this first. Call it yourself before a chain of
    reducers along different axes, with all of these axes.

    Args:
      gradients: This replica's local gradients.
      weight: This replica's weight: one number, not negative; with 0 the replica is ignored.
      axis_name: The mapped axis or axes of the replicas.

    Returns:
      The same tree, in float32 or wider; zeros on a replica of weight 0, whatever its gradients
      hold.

    Raises:
      ValueError: If `weight` is not one real number, or the axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def mean(gradient, examples):
      ...     return jax.lax.pmean(extend.weighted_gradients(gradient, examples, "data"), "data")
      >>> jax.vmap(mean, axis_name="data")(jnp.array([1.0, 5.0]), jnp.array([3, 1])).tolist()
      [2.0, 2.0]
    """
    dtype = widest(leaf.dtype for leaf in floating_leaves(gradients))
    return weighted(gradients, share_of_mean(weight, axis_name, dtype)[0])
