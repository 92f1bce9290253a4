"""`jax.value_and_grad` for a `jit` loop, with a reducer for its gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxcomp._base.checks import check_flag, names_checked
from jaxcomp._training.data_parallel import DataParallel, data_parallel


@functools.partial(names_checked, options=data_parallel, but=("grad_fn",))
def value_and_grad(
    fun: Callable[..., Any],
    reducer: optax.GradientTransformation,
    *,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    **options: Any,
) -> DataParallel:
    """`jax.value_and_grad` whose gradients are averaged by a reducer, for loops in `jax.jit`.

    Nothing but ``data_parallel(jax.value_and_grad(fun, argnums, has_aux), reducer, ...)``.

    Args:
      fun: The mean loss of the examples that it is given: a scalar, or (scalar, auxiliary) with
        `has_aux`. Parameters come first, or where `argnums` says.
      reducer: As for `data_parallel`.
      argnums: As for `jax.value_and_grad`.
      has_aux: As for `jax.value_and_grad`.
      **options: Of `data_parallel`: mesh, batch_specs (for the arguments that are not
        differentiated), aux, axis_name, check_vma.

    Returns:
      A `DataParallel`; a call ``(state, params, *batch)`` gives ``((value, gradients), state)``.

    Raises:
      ValueError: If an argument is unusable.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> def loss_fn(params, x):
      ...     return jnp.mean((x @ params["w"] - 1) ** 2)
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> value_and_grad = jaxcomp.value_and_grad(
      ...     loss_fn, jaxcomp.powersgd(rank=2, axis_name="data", start_step=0), mesh=mesh)
      >>> params, optimizer = {"w": jnp.zeros((16, 16))}, optax.sgd(0.1)
      >>> state, opt_state = value_and_grad.init(params), optimizer.init(params)
      >>> @jax.jit
      ... def step(params, opt_state, state, x):
      ...     (loss, grads), state = value_and_grad(state, params, x)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, state, loss
      >>> params, opt_state, state, loss = step(params, opt_state, state, jnp.eye(16))
      >>> float(loss), state.residual["w"].shape
      (1.0, (2, 16, 16))
    """
    has_aux = check_flag("has_aux", has_aux)
    checked = data_parallel(fun, reducer, argnums=argnums, **options)
    return dataclasses.replace(checked, grad_fn=jax.value_and_grad(fun, argnums, has_aux))
