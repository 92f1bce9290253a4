"""Averages parameters, momenta or other arrays over the replicas.

`average` is for users, at the end of a run of `local_sgd` or for statistics beside it, and for
`local_sgd` itself where its rounds begin. Unlike a reducer it is exact, keeps no state and takes
any tree.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._local.fragments import check_not_complex
from jaxcomp._mesh.collectives import axis_size, switch
from jaxcomp._mesh.weights import averaged


def average(
    tree: PyTree, axis_name: AxisName, *, when: Array | None = None, weight: Any = None
) -> PyTree:
    r"""Averages every floating leaf over the replicas, for example at the end of local steps.

    .. math:: \bar x = \frac{1}{W} \sum_{w=1}^{W} x_w

    If a run of `local_sgd` ends between two averages, call ``params = average(params, axis_name)``
    at the end. The function also averages other arrays, such as BatchNorm statistics.

    Args:
      tree: Any tree of arrays. Floating leaves are averaged in float32 or wider, in one all-reduce,
        and cast back to their dtypes. Integers, flags and keys stay as they are.
      axis_name: The mapped axis or axes of the replicas.
      when: A bool scalar, equal on every replica: average only if it is true. With
        ``when=state.synced`` for a `LocalSGDState`, BatchNorm statistics are averaged together with
        the parameters, and the other steps still have no collective.
      weight: This replica's weight, a number. The values of a replica with weight 0 are ignored,
        even NaN. None if all replicas have the same weight.

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
    axis_size(axis_name)  # names an unbound axis even if there is nothing to average
    check_not_complex(tree)

    def means() -> PyTree:
        return averaged(tree, axis_name, weight)[0]

    if when is None:
        return means()
    return switch(jnp.asarray(when).astype(jnp.int32), [lambda: tree, means])
