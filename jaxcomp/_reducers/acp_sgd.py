"""ACP-SGD: half a power iteration a step, which the next one completes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.checks import names_checked
from jaxcomp._base.typing import Array, AxisName, PyTree, RankFn
from jaxcomp._lowrank.matrices import product
from jaxcomp._lowrank.orthogonalize import orthonormal_bases
from jaxcomp._mesh.collectives import switch
from jaxcomp._mesh.per_replica import no_owner
from jaxcomp._reducers.factor_bytes import count_bytes
from jaxcomp._reducers.low_rank import (
    Averaged,
    Factors,
    FactorsByName,
    Leaves,
    Wire,
    low_rank_step,
    nan_if_too_large,
)
from jaxcomp._reducers.options import LowRank
from jaxcomp._reducers.reducer import Reducer, Reduction
from jaxcomp._reducers.transformation import call_text


class ACPSGDState(NamedTuple):
    """State of `acp_sgd`."""

    # int32 scalar: finite updates seen; replicated
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PyTree  # compressed leaf: what was not sent yet, shape of the leaf; per replica
    p: PyTree  # compressed leaf: (*batch, rows, r) mean left factor, float32 or wider; replicated
    q: PyTree  # compressed leaf: (*batch, cols, r) mean right factor, float32 or wider; replicated
    # float32 scalar: whose the residual is, 0 for everybody's; per replica
    owner: Any = np.zeros((), np.float32)

    per_replica = ("residual", "owner")


@functools.partial(names_checked, options=LowRank)
def acp_sgd(rank: int | RankFn = 1, *, axis_name: AxisName, **arguments: Any) -> Reducer:
    r"""`powersgd` in one all-reduce a step: left and right factors take turns.

    With :math:`\hat P, \hat Q` for the orthogonalised factors of the updates before, one of these
    two takes its turn, the left factors in the first compressed update:

    .. math::
        P_w &= M_w \hat Q, & P &= \tfrac{1}{W} \sum_w P_w, &
            \text{output} &= P \hat Q^\top, & E_w &= M_w - P_w \hat Q^\top \\
        Q_w &= M_w^\top \hat P, & Q &= \tfrac{1}{W} \sum_w Q_w, &
            \text{output} &= \hat P Q^\top, & E_w &= M_w - \hat P Q_w^\top

    That halves the bytes and the latency of an update, but its basis is that of the update before,
    found for other gradients: docs/convergence.md says what that costs.

    Args:
      rank: Columns of the factors, or a function of (key path, leaf) that returns them.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      **arguments: Of `powersgd`, but for ``warm_start``.

    Returns:
      A transformation as `powersgd`'s. Its state is an `ACPSGDState`.

    Raises:
      ValueError: As `powersgd`.

    Example:
      >>> import jax.numpy as jnp, jaxcomp
      >>> tx = jaxcomp.acp_sgd(4, axis_name="data", start_step=0)
      >>> params = {"w": jnp.zeros((512, 256))}
      >>> [tx.bytes(params, step=step).bytes_after for step in (0, 1)]
      [4096, 8192]

    References:
      Zhang, Li, Shi, Chu, Li: Evaluation and Optimization of Gradient Compression for Distributed
      Deep Learning. ICDCS 2023.
    """
    given = {"rank": rank, "axis_name": axis_name, **arguments}
    options = LowRank(**given)

    def init(params: PyTree) -> ACPSGDState:
        p, q = options.random_factors(params, "p", 0, 1), options.random_factors(params, "q", 0)
        residual, owner = options.zero_residual(params), no_owner(axis_name)
        return ACPSGDState(jnp.zeros([], jnp.int32), residual, p, q, owner)

    def reduce(
        updates: PyTree, state: ACPSGDState, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        def half(
            left: bool,
            leaves: Leaves,
            starts: FactorsByName,
            totals: list[Array],
            uncompressed: list[Array],
            wire: Wire,
        ) -> Averaged:
            n, views, one, other = len(totals), leaves.views, *(("p", "q") if left else ("q", "p"))
            bases = orthonormal_bases(starts[other], options.eps)
            times = functools.partial(product, transposed=not left)
            local = nan_if_too_large(views, jax.tree.map(times, views, totals, bases), axis_name)
            reduced = wire([*local, *uncompressed], n)
            means, sent = (
                Factors(**{one: x[:n], other: bases}, uncompressed=x[n:])
                for x in (reduced.means, reduced.sent)
            )
            return Averaged(means, sent, {**starts, one: reduced.means[:n]}, reduced.finite)

        def average(*arrays: Any) -> Averaged:
            turns = [functools.partial(half, left, *arrays) for left in (False, True)]
            is_left = (state.count - options.start_step) % 2 == 0
            return switch(is_left.astype(jnp.int32), turns)

        return low_rank_step(options, average, updates, state, ACPSGDState, ("p", "q"))

    def of_turn(p: int, q: int, step: int | None) -> int:
        return (p + q) // 2 if step is None else q if step % 2 else p

    sent = functools.partial(count_bytes, options, of_factors=of_turn)
    return Reducer(init, reduce, axis_name, made_by=call_text("acp_sgd", given), count_bytes=sent)
