"""Weighted means: of replicas that do not count the same, in the collectives of an ordinary mean.

Nothing is asked beforehand. Values go out multiplied by this replica's weight, the weight rides
along, and the mean of the weights divides what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import Array, AxisName
from jaxcomp._mesh.axes import as_local, axis_size
from jaxcomp._mesh.collectives import Reduced, reduce_mean, replica_index

_BYTES = 4  # of a float32


class Weight(NamedTuple):
    """How much this replica counts in a step."""

    own: Array  # float32 scalar, not negative; 0 sits out
    mean: Array | None = None  # over the replicas; None until a first mean has brought it


class WeightedMeans(NamedTuple):
    """What a weighted mean of several arrays gave."""

    reduced: Reduced  # sent: what this replica put in, before it was weighed; zeros for weight 0
    weight: Weight | None  # with the mean, for what else the same replicas average


def as_weight(weight: Any, axis_name: AxisName | None) -> Weight | None:
    """The argument ``weight`` of an update; None if it was not given.

    A negative weight becomes NaN, so that the step is one that is not finite.

    Raises:
      ValueError: If it is not one real number.
    """
    if weight is None or isinstance(weight, Weight):
        return weight
    if not hasattr(weight, "dtype"):
        weight = np.asarray(weight)
    kind = weight.dtype
    if np.size(weight) != 1 or not (
        jnp.issubdtype(kind, jnp.floating)
        or jnp.issubdtype(kind, jnp.integer)
        or kind == jnp.dtype(bool)
    ):
        raise ValueError(
            f"`weight` must be one number for this replica, got shape {np.shape(weight)} of dtype "
            f"{kind}. Map the array of all replicas' weights along the axis, as the batch."
        )
    if axis_name is None:
        raise ValueError("`weight` needs a reducer that says along which axis the replicas lie.")
    own = as_local(jnp.asarray(weight).astype(jnp.float32).reshape(()), axis_name)
    return Weight(jnp.where(own >= 0, own, jnp.nan))


def if_counted(weight: Weight | None, x: Array) -> Array:
    """`x`, or zeros on a replica of weight 0, whatever it holds there."""
    return x if weight is None else jnp.where(weight.own == 0, jnp.zeros_like(x), x)


def weighted_mean(
    reduce: Callable[[list[Array]], Reduced],
    parts: Sequence[Array],
    weight: Weight | None,
    axis_name: AxisName,
    wire_dtype: Any = jnp.float32,
    *,
    weighed: int = 0,
) -> WeightedMeans:
    r"""The means of `reduce`, weighted: :math:`\sum_w a_w x_w / \sum_w a_w`.

    Args:
      reduce: Averages a list of arrays, in their dtypes; one more array may come at the end.
      parts: The arrays.
      weight: This replica's; None for the plain mean.
      axis_name: The mapped axis or axes.
      wire_dtype: What goes on the wire, for what comes at the end of the list.
      weighed: How many of the first parts are multiplied by the weight already.

    Returns:
      Means and sent with the dtypes of the parts, not finite if no replica counts.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> mean = functools.partial(
      ...     extend.reduce_mean, axis_name="data", wire_dtype=jnp.float32)
      >>> def step(gradient, examples):
      ...     opened = extend.open_step(gradient, "data", weight=examples)
      ...     means = extend.weighted_mean(mean, opened.arrays, opened.weight, "data")
      ...     return means.reduced.means[0]
      >>> jax.vmap(step, axis_name="data")(jnp.array([1.0, 5.0]), jnp.array([3, 1])).tolist()
      [2.0, 2.0]
    """
    if weight is None:
        return WeightedMeans(reduce(list(parts)), None)
    scale = weight.own if weight.mean is None else weight.own / weight.mean
    scaled = [x.astype(compute_dtype(x.dtype)) for x in parts]
    scaled[weighed:] = [if_counted(weight, x * scale.astype(x.dtype)) for x in scaled[weighed:]]
    riding = [] if weight.mean is not None else [_written(weight.own, axis_name, wire_dtype)]
    reduced = reduce([*scaled, *riding])
    divisor = _read(reduced.means[-1]) if riding else jnp.ones([], jnp.float32)
    known = Weight(weight.own, divisor) if riding else weight
    # What a replica of weight 0 sent is the rounding of the means that it was asked to pass on.
    own = jnp.where(weight.own == 0, divisor, scale)

    def divided(xs: Sequence[Array], by: Array) -> list[Array]:
        zipped = zip(xs, parts, strict=False)
        return [(x / by.astype(x.dtype)).astype(part.dtype) for x, part in zipped]

    means = divided(reduced.means, divisor)
    finite = jnp.stack([jnp.isfinite(x).all() for x in [*means, divisor]]).all()
    finite &= reduced.finite & (divisor > 0)
    return WeightedMeans(Reduced(means, divided(reduced.sent, own), finite), known)


def weighted_mean_each(
    leaves: Sequence[Array], weight: Weight | None, axis_name: AxisName
) -> WeightedMeans:
    """Averages each array in its own dtype: one all-reduce for every dtype among them."""
    means, sent = list(leaves), list(leaves)
    finite = jnp.array(True)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        chosen = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]

        def reduce(parts: list[Array], dtype: Any = dtype) -> Reduced:
            return reduce_mean(parts, axis_name, dtype)

        parts = [leaves[i] for i in chosen]
        reduced, weight = weighted_mean(reduce, parts, weight, axis_name, dtype)
        finite &= reduced.finite
        for i, mean, own in zip(chosen, reduced.means, reduced.sent, strict=True):
            means[i], sent[i] = mean, own
    return WeightedMeans(Reduced(means, sent, finite), weight)


def mean_each(leaves: Sequence[Array], axis_name: AxisName) -> list[Array]:
    """Averages each array in its own dtype: one all-reduce for every dtype among them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomp import extend
      >>> def mean(x):
      ...     return extend.mean_each([x, x.astype(jnp.bfloat16)], "data")
      >>> [m.tolist() for m in jax.vmap(mean, axis_name="data")(jnp.array([1.0, 3.0]))]
      [[2.0, 2.0], [2.0, 2.0]]
    """
    return weighted_mean_each(leaves, None, axis_name).reduced.means


def _written(own: Array, axis_name: AxisName, wire_dtype: Any) -> Array:
    """The weight as it travels, to be averaged with the rest.

    A narrow wire would round it. There each replica writes the bytes of its weight into places of
    its own, integers up to 255, to which the others add zeros.
    """
    if jnp.dtype(wire_dtype).itemsize >= _BYTES:
        return own[None]
    size = axis_size(axis_name)
    mine = lax.bitcast_convert_type(own, jnp.uint8).astype(jnp.float32)
    places = jnp.arange(size)[:, None] == replica_index(axis_name)
    # The mean divides by the number of replicas.
    return jnp.where(places, mine * size, 0).reshape(-1)


def _read(mean: Array) -> Array:
    """The mean of the weights, from the mean of what the replicas wrote."""
    if mean.size == 1:
        return mean.reshape(())
    each = lax.bitcast_convert_type(mean.reshape(-1, _BYTES).astype(jnp.uint8), jnp.float32)
    return jnp.mean(each)
