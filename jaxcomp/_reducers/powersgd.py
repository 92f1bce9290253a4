"""PowerSGD as an Optax transformation: local gradients in, one low-rank mean out.

Arguments and their checks; `powersgd_state` has what follows from them and what is remembered,
`powersgd_step` an update.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxcomp._base.checks import (
    check_axis_name,
    check_flag,
    check_function,
    check_int,
    check_number,
    check_static_number,
)
from jaxcomp._base.leaves import checked_factor_dtype, checked_residual_dtype
from jaxcomp._base.typing import AxisName, BucketFn, DType, MatrixDimsFn, RankFn, Schedule
from jaxcomp._lowrank.matricize import stacked_matrix_dims
from jaxcomp._reducers.buckets import checked_buckets
from jaxcomp._reducers.contract import Reducer, call_text
from jaxcomp._reducers.factor_bytes import count_bytes
from jaxcomp._reducers.opening import check_reduce_first
from jaxcomp._reducers.powersgd_state import Options, PowerSGDState
from jaxcomp._reducers.powersgd_step import reducer

__all__ = ["PowerSGDState", "powersgd"]  # older pickles name the state by this module


def powersgd(
    rank: int | RankFn = 1,
    *,
    axis_name: AxisName,
    start_step: int = 1_000,
    min_compression_rate: float = 2.0,
    error_feedback: bool = True,
    warm_start: bool = True,
    eps: float = 0.0,
    seed: int = 0,
    comm_dtype: DType | None = None,
    residual_dtype: DType | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    stacked: str | tuple[str, ...] = (),
    error_decay: float | Schedule = 1.0,
    feedback_every: int = 1,
    reduce_first: AxisName | None = None,
    alternating: bool = False,
    buckets: int | BucketFn | None = None,
    gpu_kernels: bool = False,
) -> Reducer:
    r"""Low-rank gradient averaging with error feedback; the first link of an `optax.chain`.

    For a leaf seen as a ``(rows, cols)`` matrix, with local gradient :math:`G_w`, residual
    :math:`E_w` and warm-started right factor :math:`Q` on each of :math:`W` replicas:

    .. math::
        M_w &= G_w + E_w \\
        P &= \mathrm{orthogonalize}\Big(\sum_w M_w\, \mathrm{orthogonalize}(Q)\Big)
            && \text{(first all-reduce)} \\
        Q_w &= M_w^\top P, \qquad Q = \tfrac{1}{W} \sum_w Q_w && \text{(second all-reduce)} \\
        \text{output} &= P Q^\top, \qquad E_w = M_w - P Q_w^\top

    These are Algorithms 1 and 2 of Vogels et al. (2019), with one change: the residual subtracts
    the replica's *own* factor :math:`Q_w`, as it was sent, where torch's hook subtracts the mean.
    Outputs depend on the residuals through their mean only, so they equal torch's; but torch's
    residual grows like the square root of the step count, and this one stays bounded.

    Leaves that are not compressed ride along in the first all-reduce, so a step takes two
    all-reduces, whatever the number of leaves. With integers on the wire each of the two becomes an
    all-to-all and an all-gather, as in `quantized_allreduce`: columns of the factors in blocks of
    at most 128 integers with a scale, the other leaves unrounded, sums in float32.

    If a gradient is not finite on any replica, all outputs are NaN on every replica and the state
    stays as it was, bit for bit. Wrap what comes *after* this transformation in
    `optax.apply_if_finite`; around it, replicas would disagree on whether to communicate.

    With ``alternating=True`` (ACP-SGD) an update is half a power iteration, which the next one
    completes. With :math:`\hat P, \hat Q` for the orthogonalised factors of the updates before,
    one of these two takes its turn:

    .. math::
        P_w &= M_w \hat Q, & P &= \tfrac{1}{W} \sum_w P_w, &
            \text{output} &= P \hat Q^\top, & E_w &= M_w - P_w \hat Q^\top \\
        Q_w &= M_w^\top \hat P, & Q &= \tfrac{1}{W} \sum_w Q_w, &
            \text{output} &= \hat P Q^\top, & E_w &= M_w - \hat P Q_w^\top

    That halves the bytes and the latency of an update. But its basis is the one found in the update
    before, for other gradients: docs/convergence.md has what that costs. It pays where the latency
    of a second all-reduce is what hurts.

    Args:
      rank: Columns of the factors, or a function of (key path, leaf) that returns them; None from
        the function leaves that leaf uncompressed.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      start_step: Updates before this one are plain all-reduces. Begin with 10% of the steps.
      min_compression_rate: A leaf is compressed iff
        ``(rows + cols) * r * min_compression_rate < rows * cols``, ``r = min(rows, cols, rank)``.
      error_feedback: Keep what was not sent and add it to the next gradient.
      warm_start: Start each power iteration from the last right factor. If False, a fresh one is
        drawn every step, the same on every replica.
      eps: torch's ``orthogonalization_epsilon``, in Gram-Schmidt (ranks 1 and 2) as in torch. Not
        needed here: zero columns are safe with 0.
      seed: Seeds the first (or with ``warm_start=False`` every) right factor.
      comm_dtype: What goes on the wire: bfloat16, float16 or float32; None for float32 (or wider,
        where a gradient is). int8 and ``"int6"`` (four integers in three bytes) are for the
        factors only: leaves that are not compressed, which have no residual to keep a rounding, go
        in their own dtype, and the exact averages before `start_step` as with None. The state is
        the same for all of them.
      residual_dtype: How the residual is stored; bfloat16 halves its memory. None for float32.
      matrix_dims: A function of (key path, leaf) that returns `MatrixDims`, or None for a leaf that
        shall not be compressed; by default the axes are split into a leading and a trailing block
        with the fewest rows + columns. Give batch axes to compress stacked layers one by one, and
        return ``jaxcomp.extend.default_matrix_dims(path, leaf)`` for the leaves without a wish.
      stacked: Names of the parts of the tree that hold stacked layers, as in ``nn.scan`` and
        `jax.lax.scan` over blocks: ``stacked="blocks"``. The leading axis of every leaf in them
        counts layers, which are compressed one by one.
      error_decay: Scales the residual as it is added back: a number in [0, 1] or an Optax schedule
        of the update count.
      feedback_every: Add the residual back every so many updates only; it accumulates in between.
      reduce_first: A fast axis (or axes) over which gradients are averaged exactly beforehand, so
        that only the slow `axis_name` carries compressed traffic. Residuals are then equal along
        the fast axis; give only the slow one to `state_specs`, `shard_state` and `consolidate`.
      alternating: Send one factor a step, in one all-reduce: left factors in the first compressed
        update, right ones in the second, and so on. See above.
      buckets: Cuts the leaves into so many groups, from the last layer to the first as the backward
        pass makes their gradients, each with two all-reduces of its own. All but the last group's
        can then travel while the backward pass goes on; outputs and bytes are the same. Layers are
        ordered by their names, and embeddings belong to the last group; where that is not the order
        of the model, give a function of (key path, leaf) that returns the group's number, from 0
        for what is sent first. None for one group. To any avail only with ``start_step=0`` and
        without `alternating`: a conditional, which those need, waits for all gradients.
      gpu_kernels: Use the Pallas kernels for NVIDIA GPUs inside `jax.shard_map` and `jax.pmap`:
        fewer kernels to launch and no temporary copies. Compiled for H200s only, and compared
        with the plain form in interpret mode, but not yet run on a GPU; elsewhere without effect.

    Returns:
      A transformation from local gradients to outputs in the gradients' dtypes, equal on every
      replica. Its state is a `PowerSGDState`.

    Raises:
      ValueError: If an argument is unusable; at tracing time, if the axis is not bound, a gradient
        is not floating or was already reduced, or the state belongs to other leaves or ranks.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> tx = optax.chain(jaxcomp.powersgd(rank=2, axis_name="data", start_step=0), optax.sgd(0.1))
      >>> params = {"w": jnp.zeros((32, 16))}
      >>> grads = {"w": jax.random.normal(jax.random.key(0), (4, 32, 16))}  # four replicas
      >>> updates, _ = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(
      ...     grads, tx.init(params))
      >>> updates["w"].shape, int(jnp.linalg.matrix_rank(updates["w"][0]))
      ((4, 32, 16), 2)

    References:
      Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization. NeurIPS 2019.

      Zhang, Li, Shi, Chu, Li: Evaluation and Optimization of Gradient Compression for Distributed
      Deep Learning. ICDCS 2023 (ACP-SGD: `alternating`).
    """
    made_by = call_text("powersgd", locals())
    check_axis_name(axis_name)
    check_reduce_first(reduce_first, axis_name)
    options = Options(
        rank=rank if callable(rank) else check_int("rank", rank, 1),
        axis_name=axis_name,
        start_step=check_int("start_step", start_step, 0),
        min_compression_rate=check_static_number("min_compression_rate", min_compression_rate, 0),
        error_feedback=check_flag("error_feedback", error_feedback),
        warm_start=check_flag("warm_start", warm_start),
        eps=check_number("eps", eps, 0),
        seed=seed if hasattr(seed, "aval") else check_int("seed", seed, 0),
        comm_dtype=checked_factor_dtype("comm_dtype", comm_dtype),
        residual_dtype=checked_residual_dtype(residual_dtype),
        matrix_dims=_with_stacked(check_function("matrix_dims", matrix_dims), stacked),
        error_decay=error_decay
        if callable(error_decay)
        else check_number("error_decay", error_decay, 0, 1),
        feedback_every=check_int("feedback_every", feedback_every, 1),
        reduce_first=reduce_first,
        alternating=check_flag("alternating", alternating),
        buckets=None if buckets is None else checked_buckets(buckets),
        gpu_kernels=check_flag("gpu_kernels", gpu_kernels),
    )
    if alternating and not warm_start:
        raise ValueError(
            "`alternating=True` needs warm_start=True: every step multiplies with the factor of "
            "the step before."
        )
    return reducer(options, made_by, functools.partial(count_bytes, options))


def _with_stacked(matrix_dims: MatrixDimsFn | None, stacked: Any) -> MatrixDimsFn | None:
    names = (stacked,) if isinstance(stacked, str) else stacked
    if not isinstance(names, tuple) or not all(isinstance(x, str) and x for x in names):
        raise ValueError(
            f"`stacked` must be a name or a tuple of names of parts of the tree, got {stacked!r}."
        )
    return stacked_matrix_dims(names, matrix_dims) if names else matrix_dims
