"""Defines `local_sgd_round`, which checks its arguments and makes a `LocalSGDRound`.

The class is in `round`; the arguments, their equations and examples are here. One `Sync` is made
for each fragment, because each may have an outer optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from jaxcomp._base.checks import check_axis_name, check_function, check_int
from jaxcomp._base.typing import AxisName
from jaxcomp._local.fragments import check_streaming
from jaxcomp._local.round import LocalSGDRound, StepFn
from jaxcomp._local.sync import AverageInnerState, InnerInit, check_sync
from jaxcomp._mesh.meshes import check_mesh_axes
from jaxcomp._reducers.transformation import shows_its_call


@shows_its_call
def local_sgd_round(
    step_fn: StepFn,
    *,
    sync_every: int,
    axis_name: AxisName,
    reducer: optax.GradientTransformation | None = None,
    outer: optax.GradientTransformation | Sequence[optax.GradientTransformation] | None = None,
    average_inner_state: AverageInnerState = False,
    fragments: int | Sequence[str] = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    drop_non_finite: bool = False,
    inner_init: InnerInit | None = None,
    mesh: Mesh | None = None,
) -> LocalSGDRound:
    r"""Makes a round of local SGD or DiLoCo from an ordinary single-device training step.

    .. math::
        p_w^{0} = p, \qquad p_w^{h+1} = \mathrm{step}(p_w^{h}), \qquad
        p \leftarrow \frac{1}{W} \sum_w p_w^{H}
        \quad\text{or}\quad p + \mathrm{outer}\Big(\frac{1}{W} \sum_w (p - p_w^{H})\Big)

    `step_fn` is a step for one device: ``jax.grad``, ``optimizer.update``, ``optax.apply_updates``,
    and no collective. The average at the end *sets* the parameters, so they are equal on all
    replicas bit for bit; under ``shard_map(check_vma=True)`` pass and return them with ``P()``.
    Between rounds there is one copy of the parameters, to evaluate and to save. The state does not
    depend on `sync_every`, so rounds of several lengths can share it if the period changes.

    Streaming DiLoCo averages one fragment of the parameters at a time. With a delay :math:`\tau`, a
    fraction :math:`\alpha` and the anchor :math:`a`, a fragment whose average is used after step
    :math:`t` is updated by

    .. math::
        a &\leftarrow a + \mathrm{outer}\Big(\frac{1}{W} \sum_v (a - p_v^{t - \tau})\Big)
            && \text{(after step } t - \tau \text{)} \\
        p_w^t &\leftarrow (1 - \alpha)\, a + \alpha\, p_w^t && \text{(after step } t \text{)}

    The round is one program. An average does not depend on the steps until it is used, so the
    compiler may run both at the same time. Compiling takes longer, because these steps are
    unrolled. With several fragments or a positive fraction, `params` are the anchor, one copy, and
    the state also holds each replica's own parameters.

    Args:
      step_fn: ``(params, inner_state, batch) -> (params, inner_state, auxiliary)``.
      sync_every: Number of local steps in a round.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      reducer: A jaxcomp reducer for the pseudo-gradients, as in `local_sgd`.
      outer: An Optax optimizer of the pseudo-gradients, as in `local_sgd`, with one state for each
        fragment; or a list with one optimizer for each fragment.
      average_inner_state: As in `local_sgd`. Without an outer optimizer, BatchNorm statistics and
        other floating arrays that shall always be averaged can be part of `params`.
      fragments: Average one fragment of the leaves at a time. The total bytes are the same, and the
        peak is lower by the number of fragments. Pass a number, for fragments of about equal size;
        or a list of regular expressions: a leaf belongs to the first one that is found in its path,
        written ``blocks/0/kernel``. The average of fragment ``k`` of ``n``, counted from 1, is used
        after ``k * sync_every // n`` steps.
      fragment_sync_delay: Number of steps between the average of a fragment and its use, less than
        ``sync_every // fragments``.
      fragment_update_alpha: Fraction, from 0 to 1, of its own parameters that a replica keeps when
        it uses the average of a fragment.
      drop_non_finite: Ignore a replica in an average if it would contribute a value that is not
        finite. The replica continues with the mean of the others, and its inner state is reset with
        `inner_init`, which is then required. If no replica is left, the mean is NaN.
      inner_init: ``params -> inner_state``, the inner optimizer's ``init``. It is required if inner
        states may be reset; `LocalSGDRound.init` uses it as a default.
      mesh: The mesh of the replicas, for a loop in `jax.jit` over sharded arrays. The round then
        maps itself over `axis_name`, with Auto or Explicit axes, and per-replica leaves are global
        arrays with a leading axis of replicas. None takes the mesh of `jax.set_mesh`, else that of
        the state's arrays; place the state with `shard_state` then.

    Returns:
      A `LocalSGDRound`: ``init(params, inner_state)`` returns a `LocalSGDState`, and a call
      ``(params, state, batches)``, inside the mapped function, returns
      ``(params, state, auxiliary)``. With a `mesh` call it inside `jax.jit` instead.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> optimizer = optax.sgd(0.5)
      >>> def step(params, opt_state, batch):  # nothing here knows of replicas
      ...     loss, grads = jax.value_and_grad(lambda p: ((p - batch) ** 2 / 2).sum())(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, loss
      >>> run = jaxcomp.local_sgd_round(step, sync_every=2, axis_name="data")
      >>> params = jnp.zeros(3)
      >>> state = run.init(params, optimizer.init(params))
      >>> batches = jnp.array([[0.0, 0.0], [16.0, 16.0]])  # two replicas, two steps
      >>> params, state, losses = jax.vmap(run, in_axes=(None, None, 0), axis_name="data")(
      ...     params, state, batches)
      >>> params.tolist()
      [[6.0, 6.0, 6.0], [6.0, 6.0, 6.0]]

      Streaming DiLoCo: the parameters after the first step are averaged while the second step runs.

      >>> run = jaxcomp.local_sgd_round(
      ...     step, sync_every=2, axis_name="data", fragment_sync_delay=1)
      >>> params, state, losses = jax.vmap(run, in_axes=(None, None, 0), axis_name="data")(
      ...     jnp.zeros(3), run.init(jnp.zeros(3), optimizer.init(jnp.zeros(3))), batches)
      >>> params[0].tolist()
      [4.0, 4.0, 4.0]

    References:
      Those of `local_sgd`.
      Douillard et al.: Streaming DiLoCo with Overlapping Communication. 2025.
    """
    check_axis_name(axis_name)
    length = check_int("sync_every", sync_every, 1)
    streaming = check_streaming(fragments, fragment_sync_delay, fragment_update_alpha, length)
    fragment_count = len(streaming.ends)
    optimizers: Any = outer  # one for each fragment
    if type(outer) not in (list, tuple):  # an optimizer is a named tuple
        optimizers = [outer] * fragment_count
    elif len(optimizers) != fragment_count or None in optimizers:
        raise ValueError(
            f"`outer` has {len(optimizers)} optimizers for {fragment_count} fragments, or None in "
            "its list. Pass one for each, in the order of `fragments`, with optax.sgd(1.0) for a "
            "fragment that takes the mean itself; or a single optimizer for all."
        )
    syncs = []
    for optimizer in optimizers:
        syncs.append(
            check_sync(axis_name, reducer, optimizer, average_inner_state, drop_non_finite)
        )
    in_parts = streaming.delay or len(syncs) > 1
    if in_parts and (average_inner_state is not False or drop_non_finite):
        raise ValueError(
            f"average_inner_state={average_inner_state!r} and drop_non_finite={drop_non_finite!r} "
            "need fragments=1 and fragment_sync_delay=0: an inner state belongs to all parameters, "
            "and what is not finite in some spreads to the others."
        )
    check_function("step_fn", step_fn, "params", "inner_state", "batch")
    check_function("inner_init", inner_init, "params", otherwise=" or None")
    anew = ""  # the argument that makes a fresh inner state necessary
    if average_inner_state == "reset":
        anew = "average_inner_state='reset'"
    if drop_non_finite:
        anew = "drop_non_finite=True"
    if anew and inner_init is None:
        raise ValueError(
            f"{anew} needs `inner_init`, the inner optimizer's init: inner_init=optimizer.init."
        )
    if mesh is not None:
        check_mesh_axes(mesh, axis_name)
    return LocalSGDRound(step_fn, length, axis_name, streaming, tuple(syncs), inner_init, mesh)
