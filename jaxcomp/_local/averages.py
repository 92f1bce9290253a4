"""Means over the replicas: of parameters, momenta, or anything else that has some."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp._base.leaves import compute_dtype
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import numbered, part_of, put_back
from jaxcomp._mesh.collectives import as_local, axis_size, mean_each, switch
from jaxcomp._mesh.weights import share_of_mean, weighted


def average(
    tree: PyTree, axis_name: AxisName, *, when: Array | None = None, weight: Any = None
) -> PyTree:
    r"""Averages every floating leaf over the replicas; the end of a run of local steps.

    .. math:: \bar x = \frac{1}{W} \sum_{w=1}^{W} x_w

    A run of `local_sgd` that does not end on an average loses nothing with
    ``params = average(params, axis_name)``. The same function averages what is neither parameter
    nor optimizer state, such as BatchNorm statistics.

    Args:
      tree: Any tree of arrays. Averaged in float32 even where stored narrower (one all-reduce for
        all of it), then back to the stored dtype. Integers, flags and keys stay as they are.
      axis_name: The mapped axis or axes of the replicas.
      when: A boolean scalar, the same on every replica: average only if it is true. With
        ``when=state.synced`` for a `LocalSGDState`, BatchNorm statistics are averaged together with
        the parameters, and the steps in between still hold no collective.
      weight: How much this replica counts, a number. The values of a replica of weight 0 are
        ignored, even NaN. None if all count the same.

    Returns:
      The same tree. Without `when` it is equal on every replica, bit for bit, and replicated under
      ``shard_map(check_vma=True)``.

    Raises:
      ValueError: If the axis is not bound, or a leaf is complex.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> params = {"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}  # two replicas
      >>> jax.vmap(lambda p: jaxcomp.average(p, "data"), axis_name="data")(params)["w"].tolist()
      [[2.0, 4.0], [2.0, 4.0]]
    """
    axis_size(axis_name)  # so that an unbound axis is named even if there is nothing to average
    if when is None:
        means, _ = averaged(tree, axis_name, weight)
        return means
    due = jnp.asarray(when).astype(jnp.int32)
    return switch(due, [lambda: tree, lambda: average(tree, axis_name, weight=weight)])


def averaged(tree: PyTree, axis_name: AxisName, weight: Any) -> tuple[PyTree, Array | None]:
    """Averages a tree, and says whether any replica counted; None if all do."""
    numbers = numbered(tree)
    floating = jax.tree.map(jnp.asarray, part_of(tree, numbers))
    wide = jax.tree.map(lambda x: x.astype(compute_dtype(x.dtype)), floating)
    wide = as_local(wide, axis_name)
    counted = None
    if weight is not None:
        share, mean_weight = share_of_mean(weight, axis_name)
        wide = weighted(wide, share)
        counted = mean_weight != 0
    leaves, treedef = jax.tree.flatten(wide)
    means = treedef.unflatten(mean_each(leaves, axis_name).means)
    means = jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, floating)
    return put_back(means, tree), counted


def unless_nobody(counted: Array | None, new: PyTree, before: PyTree) -> PyTree:
    """Returns what was averaged, or what was there before if the weights of all are 0."""
    if counted is None:
        return new
    return choose(counted, new, before)


def choose(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Selects one of two trees, leaf by leaf."""
    return jax.tree.map(lambda first, second: jnp.where(condition, first, second), new, old)
