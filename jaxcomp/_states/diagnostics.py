"""Reads from the state of a run how much of the gradients the factors carry.

It is for users who choose a rank: a low share says that most is delayed, idle columns say that
fewer would do. Everything is in the state already, because output and mean residual are orthogonal
and the norm of the output is that of `q`. So training steps pay nothing, and a saved state can be
asked too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp._base.checks import answers_other_names, is_traced
from jaxcomp._base.leaves import check_values, compute_dtype, is_masked, leaf_name, widest
from jaxcomp._base.stats import aligned
from jaxcomp._base.typing import Array, PyTree
from jaxcomp._mesh.collectives import varying
from jaxcomp._mesh.per_replica import (
    OWNER,
    has_replica_axis,
    is_reducer_state,
    leaves_marked,
    marks,
)
from jaxcomp._states.consolidate import consolidate, layout_of

# Below this share the residual holds more energy than the output.
_LOW_SHARE = 0.5
# The first columns that hold this fraction of the output's energy are needed; the rest are idle.
_MOST_ENERGY = 0.99


class LeafDiagnostics(NamedTuple):
    """Shows how much the factors of one compressed leaf carried in the last step."""

    share: Array  # float32 scalar in [0, 1]: energy of the output / energy to be sent
    output_norm: Array  # float32 scalar: Frobenius norm of the output P Q^T, in units of gradients
    residual_norm: Array  # float32 scalar: norm of the mean residual, in units of gradients
    singular_values: Array  # (*batch, rank): of the output, largest first


class Diagnostics(NamedTuple):
    """Holds the result of `diagnostics`: one entry for each leaf, and totals over all leaves.

    `print` shows a table, with a remark if a rank is too low or higher than necessary.
    """

    share: Array  # float32 scalar: as for a leaf, with the energies of all leaves added up
    output_norm: Array  # float32 scalar
    residual_norm: Array  # float32 scalar
    leaves: dict[str, LeafDiagnostics]

    def __str__(self) -> str:
        if is_traced(self.share):
            return repr(self)
        values: Diagnostics = jax.device_get(self)
        table = [("leaf", "share", "output", "residual", "rank", "")]
        for name, row in (*values.leaves.items(), ("all", values)):
            rank = remark = ""
            if isinstance(row, LeafDiagnostics):
                rank = str(row.singular_values.shape[-1])
                remark = _remark(row)
            norms = (f"{row.output_norm:.1e}", f"{row.residual_norm:.1e}")
            table.append((name, f"{row.share:.1%}", *norms, rank, remark))
        return aligned("<>>>><", table)


@answers_other_names
def diagnostics(state: PyTree) -> Diagnostics:
    r"""Measures how much of the gradients the factors of PowerSGD carried in the last step.

    The columns of :math:`P` are orthonormal, so the output :math:`P Q^\top` and the mean residual
    :math:`\bar E` are orthogonal parts of the matrix to send, :math:`\bar M = P Q^\top + \bar E`:

    .. math::
        \text{share} = \frac{\lVert P Q^\top \rVert^2}{\lVert \bar M \rVert^2}
            = \frac{\lVert Q \rVert^2}{\lVert Q \rVert^2 + \lVert \bar E \rVert^2}

    Both are in the state, so training steps cost nothing extra. The residual also holds noise and
    parts of earlier gradients, so compare a share with the share at another rank, not with 1. The
    singular values of the output, which are those of :math:`Q`, show which columns are idle.

    Before the first compressed step the residual is zero and the share is 1; norms and singular
    values are those of the initial factors.

    Args:
      state: Any tree that holds states of `powersgd`, `batched_powersgd`, or `error_feedback`
        around one of them, such as an optimizer's state or a TrainState: consolidated, or with an
        axis of replicas; inside `jax.jit` or outside. If the replicas are on several devices, the
        mean of their residuals costs as many bytes as an uncompressed all-reduce of the compressed
        leaves, so call it only every few hundred steps.

    Returns:
      A `jaxcomp.types.Diagnostics`, a tree of float32 arrays (wider if the residual is wider). It
      is exact if factors are sent in float32. A leaf is named by its path in the parameters; the
      path of its state comes first if several states have a leaf of that name.

    Raises:
      ValueError: If no leaf has both a residual and a factor, a leaf has no values, leaves are on
        different devices, or the state is known to belong to one replica only, as inside of a
        mapped function. If this cannot be known, the result is NaN.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.powersgd(rank=1, axis_name="data", start_step=0, min_compression_rate=1)
      >>> params = {"w": jnp.zeros((8, 8))}
      >>> state = jaxcomp.stack_replicas(tx.init(params), 2)
      >>> axes = jaxcomp.state_axes(state)
      >>> step = jax.vmap(tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name="data")
      >>> means, state = step({"w": jnp.ones((2, 8, 8))}, state)  # ones everywhere: rank 1
      >>> found = jaxcomp.diagnostics(state)
      >>> round(float(found.share), 3), round(float(found.leaves["['w']"].output_norm), 3)
      (1.0, 8.0)

    References:
      Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization. NeurIPS 2019. Algorithm 1.
    """
    marks(state)  # refuses a state that has lost its classes
    nodes = {}
    for path, node in jax.tree.leaves_with_path(state, is_leaf=_is_low_rank):
        if _is_low_rank(node):
            check_values("state", node, path)
            _check_not_local(node)
            nodes[jax.tree_util.keystr(path)] = node
    try:
        # Compiled as one program: op by op, a float32 copy of all residuals would be made on the
        # way.
        return jax.jit(_measured)(nodes)
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
        raise ValueError(
            "The leaves of `state` are on different devices. Place all of them on one mesh: "
            "jaxcomp.shard_state(state, mesh, axis_name)."
        ) from error


def _measured(nodes: dict[str, Any]) -> Diagnostics:
    """Measures several states, by their path in the tree.

    Raises:
      ValueError: If no leaf of these states has both a residual and a factor.
    """
    leaves: dict[str, LeafDiagnostics] = {}
    by_place: dict[str, LeafDiagnostics] = {}
    for place, node in nodes.items():
        for name, leaf in _of_state(node).items():
            leaves[name] = leaf
            by_place[place + name] = leaf
    if not leaves:
        raise ValueError(
            "`state` must hold a state of jaxcomp.powersgd in which a leaf has a residual and a "
            "factor; it has none. Pass the reducer's state, or the optimizer's that holds it; with "
            "error_feedback=False, warm_start=False, or no compressed leaf, the state does not "
            "show what the factors carried."
        )
    # Short names where they are clear: most states hold one reducer.
    if len(leaves) < len(by_place):  # several states have a leaf of the same name
        leaves = by_place
    outputs = []
    residuals = []
    for leaf in leaves.values():
        outputs.append(leaf.output_norm)
        residuals.append(leaf.residual_norm)
    output_norm = _norm_of_norms(outputs)
    residual_norm = _norm_of_norms(residuals)
    return Diagnostics(_share(output_norm, residual_norm), output_norm, residual_norm, leaves)


def _is_low_rank(node: Any) -> bool:
    """Returns whether a state has a residual, and a factor or the state of a reducer with one."""
    if not (is_reducer_state(node) and hasattr(node, "residual")):
        return False
    return hasattr(getattr(node, "inner", node), "q")


def _check_not_local(node: Any) -> None:
    """Refuses a state that is known to belong to one replica only.

    Raises:
      ValueError: If it is.
    """
    owners = leaves_marked(node, OWNER).values()
    traced = list(filter(is_traced, owners))
    if any(map(varying, traced)):
        raise ValueError(
            "Inside a mapped function a state is that of one replica. Call "
            "jaxcomp.diagnostics(jaxcomp.consolidate(state, axis_name)) there, or "
            "jaxcomp.diagnostics(state) of what the mapped function returned."
        )
    # Only a known state can be checked; for others `_of_state` returns NaN.
    if not traced and all(getattr(x, "is_fully_addressable", True) for x in owners):
        layout_of(node)


def _of_state(node: Any) -> dict[str, LeafDiagnostics]:
    """Measures each leaf with a residual and a factor; returns the results by path."""
    # Cast to float32 first: else the mean would be rounded to the dtype of the residual.
    node = node._replace(residual=jax.tree.map(_widened, node.residual))
    if has_replica_axis(node):
        node = consolidate(node)
    # A residual of one replica only tells nothing about the outputs: NaN.
    known = jnp.where(jnp.asarray(node.owner) == 0, 1.0, jnp.nan)
    measured: dict[str, LeafDiagnostics] = {}
    factors = jax.tree.leaves(getattr(node, "inner", node).q, is_leaf=is_masked)
    residuals = jax.tree.leaves_with_path(node.residual, is_leaf=is_masked)
    for (path, residual), q in zip(residuals, factors, strict=True):
        if not is_masked(residual) and not is_masked(q):
            measured[leaf_name(path)] = _of_leaf(residual, _widened(q), known)
    return measured


def _of_leaf(residual: Array, q: Array, known: Array) -> LeafDiagnostics:
    layout = jax.typeof(q).sharding
    if any(layout.spec):  # JAX computes no SVD along Explicit axes
        q = jax.sharding.reshard(q, NamedSharding(layout.mesh, PartitionSpec()))
    output_norm = _norm(q)
    residual_norm = _norm(residual)
    # Not from the Gram matrix, which holds small singular values with half the digits only.
    values = jnp.linalg.svd(q, compute_uv=False)
    share = _share(output_norm, residual_norm)
    measured = LeafDiagnostics(share, output_norm, residual_norm, values)
    return jax.tree.map(lambda x: x * known.astype(x.dtype), measured)


def _widened(x: Any) -> Any:
    return x.astype(compute_dtype(x.dtype))


def _norm(x: Array) -> Array:
    """Computes the norm of all values, scaled so that no square overflows or underflows."""
    largest = jnp.abs(x).max(initial=0)
    scale = jnp.where(largest > 0, largest, 1)
    # Without flattening the array, which would lose its Explicit axes.
    return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale)))


def _norm_of_norms(norms: Sequence[Array]) -> Array:
    dtype = widest([norm.dtype for norm in norms])
    in_one_dtype: Any = optax.tree.cast(norms, dtype)
    return _norm(jnp.stack(in_one_dtype))


def _share(output_norm: Array, residual_norm: Array) -> Array:
    """Computes the output's share of the energy; 1 if there was nothing to send."""
    norm = _norm_of_norms([output_norm, residual_norm])
    divisor = jnp.where(norm == 0, 1, norm)
    return jnp.where(norm == 0, 1, (output_norm / divisor) ** 2)


def _remark(leaf: LeafDiagnostics) -> str:
    """Says whether the rank is too low or higher than necessary."""
    rank = leaf.singular_values.shape[-1]
    # Squares of the values themselves might overflow.
    largest = np.max(leaf.singular_values, initial=np.finfo(np.float32).tiny)
    energy = np.cumsum(np.square(leaf.singular_values / largest), axis=-1)
    missing = energy < _MOST_ENERGY * energy[..., -1:]
    needed = int(missing.sum(axis=-1).max()) + 1  # columns that the most demanding matrix needs
    if 2 * needed <= rank:
        return f"higher than it need be: {needed} carry {_MOST_ENERGY:.0%} of the output"
    if leaf.share < _LOW_SHARE:
        return "too low: more is left than was sent"
    return ""
