"""How much of the gradients the factors carry, read from the state of a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp._base.leaves import compute_dtype, is_masked, leaf_name, widest
from jaxcomp._base.typing import Array, KeyPath, PyTree
from jaxcomp._mesh.collectives import varying
from jaxcomp._mesh.per_replica import OWNER, has_rows, is_reducer_state, leaves_marked
from jaxcomp._states.consolidate import consolidate, layout_of

# Below this share more energy waits in the residual than went out.
_LOW_SHARE = 0.5
# Columns behind those that hold this much of the output's energy are called idle.
_MOST_ENERGY = 0.99


class LeafDiagnostics(NamedTuple):
    """What the factors of one compressed leaf carried in the last step."""

    share: Array  # float32 scalar in [0, 1]: energy that went out, of what was to be sent
    output_norm: Array  # float32 scalar: Frobenius norm of the output P Q^T, in units of gradients
    residual_norm: Array  # float32 scalar: of the replicas' mean residual, in units of gradients
    singular_values: Array  # (*batch, rank): those of the output, in falling order


class Diagnostics(NamedTuple):
    """What `diagnostics` gives: `leaves` by path, and the same over all of them.

    `print` shows it as a table, with a remark where a rank is too low or higher than it need be.
    """

    share: Array  # float32 scalar: as for a leaf, with the energies of all leaves added up
    output_norm: Array  # float32 scalar
    residual_norm: Array  # float32 scalar
    leaves: dict[str, LeafDiagnostics]

    def __str__(self) -> str:
        if isinstance(self.share, jax.core.Tracer):
            return repr(self)
        values: Diagnostics = jax.device_get(self)
        width = max(len("leaf"), *map(len, values.leaves))
        lines = [f"{'leaf':<{width}}   share     output   residual  rank"]
        for name, row in (*values.leaves.items(), ("all", values)):
            line = f"{name:<{width}}  {row.share:>6.1%}  "
            line += f"{row.output_norm:>9.1e}  {row.residual_norm:>9.1e}"
            if isinstance(row, LeafDiagnostics):
                line += f"  {row.singular_values.shape[-1]:>4}  {_remark(row)}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def diagnostics(state: PyTree) -> Diagnostics:
    r"""Says how much of the gradients the factors of PowerSGD carried in the last step.

    The columns of :math:`P` are orthonormal, so the output :math:`P Q^\top` and the mean residual
    :math:`\bar E` are orthogonal parts of what was to be sent, :math:`\bar M = P Q^\top + \bar E`:

    .. math::
        \text{share} = \frac{\lVert P Q^\top \rVert^2}{\lVert \bar M \rVert^2}
            = \frac{\lVert Q \rVert^2}{\lVert Q \rVert^2 + \lVert \bar E \rVert^2}

    Both are in the state, and a step that does not ask pays nothing. The residual holds what
    earlier steps left, and noise, so a share is compared with that of another rank, not with 1. The
    singular values of the output, which are those of :math:`Q`, say which columns are idle.

    Before the first compressed step the residual is zero and the share 1; norms and singular values
    are then of the factors to begin with.

    Args:
      state: Any tree that holds states of `powersgd`, `batched_powersgd`, or `error_feedback`
        around one of them, as an optimizer's or a TrainState does: consolidated, or with an axis of
        replicas. Inside `jax.jit` or outside. Where the replicas are spread over devices, the mean
        of their residuals is as many bytes between them as an all-reduce of the compressed
        gradients: ask every some hundred steps.

    Returns:
      A `jaxcomp.types.Diagnostics`, a tree of float32 arrays (wider where the residual is), exact
      for factors that are sent in float32. A leaf is named by its path among the parameters, behind
      that of its state if several states have a leaf of that name.

    Raises:
      ValueError: If no leaf keeps both a residual and a factor; or if the state is that of one
        replica, as inside of a mapped function, where that is known: elsewhere the result is NaN.

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
    paths: list[KeyPath] = []
    nodes: list[Any] = []
    for path, node in jax.tree.leaves_with_path(state, is_leaf=_is_low_rank):
        if _is_low_rank(node):
            _check_not_local(node)
            paths.append(path)
            nodes.append(node)
    # Compiled as one program: op by op, a float32 copy of all residuals would be made on the way.
    return jax.jit(functools.partial(_measured, paths))(nodes)


def _measured(paths: Sequence[KeyPath], nodes: Sequence[Any]) -> Diagnostics:
    """Measures states that lie at these paths.

    Raises:
      ValueError: If no leaf in them has both a residual and a factor.
    """
    leaves: dict[str, LeafDiagnostics] = {}
    by_place: dict[str, LeafDiagnostics] = {}
    for path, node in zip(paths, nodes, strict=True):
        for name, leaf in _of_state(node).items():
            leaves[name] = leaf
            by_place[jax.tree_util.keystr(path) + name] = leaf
    if not leaves:
        raise ValueError(
            "`state` must hold a state of jaxcomp.powersgd in which a leaf has a residual and a "
            "factor; it has none. Pass the reducer's state, or the optimizer's that holds it; with "
            "error_feedback=False, warm_start=False, or no leaf that is compressed, the state does "
            "not tell what was carried."
        )
    if len(leaves) < len(by_place):  # several states have a leaf of one name
        leaves = by_place
    output_norms = []
    residual_norms = []
    for leaf in leaves.values():
        output_norms.append(leaf.output_norm)
        residual_norms.append(leaf.residual_norm)
    output_norm = _norm_of_norms(output_norms)
    residual_norm = _norm_of_norms(residual_norms)
    return Diagnostics(_share(output_norm, residual_norm), output_norm, residual_norm, leaves)


def _is_low_rank(node: Any) -> bool:
    """Tells whether a state has a residual, and a factor or the state of a reducer with one."""
    if not (is_reducer_state(node) and hasattr(node, "residual")):
        return False
    return hasattr(getattr(node, "inner", node), "q")


def _check_not_local(node: Any) -> None:
    """Refuses the state of one replica, where that can be known.

    Raises:
      ValueError: If it is.
    """
    owners = leaves_marked(node, OWNER).values()
    traced = [x for x in owners if isinstance(x, jax.core.Tracer)]
    if any(map(varying, traced)):
        raise ValueError(
            "Inside a mapped function a state is that of one replica. Call "
            "jaxcomp.diagnostics(jaxcomp.consolidate(state, axis_name)) there, or "
            "jaxcomp.diagnostics(state) of what the mapped function returned."
        )
    if not traced and all(getattr(x, "is_fully_addressable", True) for x in owners):
        layout_of(node)


def _of_state(node: Any) -> dict[str, LeafDiagnostics]:
    """Measures the leaves of a state that have a residual and a factor, by their paths."""
    # In float32 before the mean, which would be rounded to what it is stored in.
    node = node._replace(residual=jax.tree.map(_widened, node.residual))
    if has_rows(node):
        node = consolidate(node)
    # Of one replica's state, which outputs do not depend on, nothing is said.
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
    if any(layout.spec):  # over Explicit axes, along which JAX decomposes nothing
        q = jax.sharding.reshard(q, NamedSharding(layout.mesh, PartitionSpec()))
    output_norm = _norm(q)
    residual_norm = _norm(residual)
    # Not from the products of columns, which know small values to half the digits only.
    values = jnp.linalg.svd(q, compute_uv=False)
    share = _share(output_norm, residual_norm)
    measured = LeafDiagnostics(share, output_norm, residual_norm, values)
    return jax.tree.map(lambda x: x * known.astype(x.dtype), measured)


def _widened(x: Any) -> Any:
    return x.astype(compute_dtype(x.dtype))


def _norm(x: Array) -> Array:
    """Computes the norm of all values, whose squares alone might leave the float range."""
    largest = jnp.abs(x).max(initial=0)
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.linalg.norm((x / scale).ravel())


def _norm_of_norms(norms: Sequence[Array]) -> Array:
    dtype = widest([norm.dtype for norm in norms])
    in_one_dtype: Any = optax.tree.cast(norms, dtype)
    return _norm(jnp.stack(in_one_dtype))


def _share(output_norm: Array, residual_norm: Array) -> Array:
    """Computes the share of the output's energy; 1 where there was nothing to send."""
    norm = _norm_of_norms([output_norm, residual_norm])
    return jnp.where(norm == 0, 1, (output_norm / jnp.where(norm == 0, 1, norm)) ** 2)


def _remark(leaf: LeafDiagnostics) -> str:
    """Says whether the rank is too low, or higher than it need be."""
    rank = leaf.singular_values.shape[-1]
    energy = np.cumsum(np.square(leaf.singular_values), axis=-1)
    missing = energy < _MOST_ENERGY * energy[..., -1:]
    needed = int(missing.sum(axis=-1).max()) + 1  # columns, in the matrix that needs the most
    if 2 * needed <= rank:
        return f"higher than it need be: {needed} carry {_MOST_ENERGY:.0%} of the output"
    if leaf.share < _LOW_SHARE:
        return "too low: more is left than was sent"
    return ""
