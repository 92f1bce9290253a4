"""Whose residual it is: a mark beside a residual, so that another replica's can do no harm.

`jax.pmap` with ``out_axes=None`` and ``shard_map(check_vma=False)`` with ``P()`` return arrays that
claim to be replicated and are not, and taking the first of several copies is a habit. Either way a
checkpoint gets one replica's residual for all of them. Added on every replica, it would be a
gradient that nobody computed; a replica that finds another's mark leaves it out instead.

The mark is the replica's index less the mean index, so that the mean of all marks, which is what a
consolidated state holds, is 0: a residual that is everybody's.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import as_local, axis_size, is_bound
from jaxcomp._mesh.collectives import replica_index


def common_mark(axis_name: AxisName | None) -> Array:
    """The mark of a residual that is everybody's: zeros of shape (1,)."""
    mark = jnp.zeros(1, jnp.float32)
    return as_local(mark, axis_name) if axis_name and is_bound(axis_name) else mark


def own_mark(axis_name: AxisName) -> Array:
    """The mark of this replica: float32 of shape (1,)."""
    centre = (axis_size(axis_name) - 1) / 2
    return replica_index(axis_name).astype(jnp.float32)[None] - centre


def is_ours(mark: PyTree, axis_name: AxisName) -> Array:
    """Bool scalar: whether a residual with this mark is everybody's or this replica's own.

    A state of before there were marks has (): its residual is taken for what it says it is.
    """
    if isinstance(mark, tuple):
        return jnp.array(True)
    return ((mark == 0) | (mark == own_mark(axis_name))).all()


def marked(mark: PyTree, axis_name: AxisName, commit: Array) -> PyTree:
    """The mark after a step: this replica's, if the step wrote the residual."""
    if isinstance(mark, tuple):
        return mark
    return jnp.where(commit, own_mark(axis_name), as_local(mark, axis_name))
