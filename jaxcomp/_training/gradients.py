"""Takes gradients of one replica.

Under ``shard_map(check_vma=True)`` JAX sums gradients over the replicas by itself, before a reducer
can compress them. Marking the parameters as local prevents that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxcomp._base.typing import AxisName
from jaxcomp._mesh.collectives import as_local
from jaxcomp._training.outputs import check_loss


def local_value_and_grad(
    fun: Callable[..., Any], axis_name: AxisName, **value_and_grad_kwargs: Any
) -> Callable[..., Any]:
    """Differentiates like `jax.value_and_grad`, and returns the gradient of this replica alone.

    Under ``shard_map(check_vma=True)`` plain `jax.grad` with respect to a replicated parameter
    returns the *sum* over the axis. That is an uncompressed all-reduce, so a reducer after it
    cannot save bytes. This function first marks the differentiated arguments as local. Under
    `jax.pmap`, `jax.vmap` and ``check_vma=False`` gradients are local anyway and nothing changes.

    Args:
      fun: The loss of this replica's batch: a scalar, or (scalar, auxiliary) with ``has_aux=True``.
        It should not average over the axis itself.
      axis_name: The mapped axis or axes of the replicas.
      **value_and_grad_kwargs: Passed on to `jax.value_and_grad` (``argnums``, ``has_aux``, ...).

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradients)``, both of this
      replica only. Average the value with `jax.lax.pmean` to report it.

    Raises:
      ValueError: When called, if an axis is not bound; under ``check_vma=True``, if `fun` averages
        over the axis, which would divide local gradients by the number of replicas.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomp
      >>> def loss(w, x):
      ...     return jnp.sum(w * x)
      >>> def step(w, x):
      ...     return jaxcomp.local_value_and_grad(loss, "data")(w, x)
      >>> value, grads = jax.vmap(step, in_axes=(None, 0), axis_name="data")(
      ...     jnp.ones(2), jnp.arange(4.0).reshape(2, 2))
      >>> grads.tolist()
      [[0.0, 1.0], [2.0, 3.0]]
    """
    value_and_grad = jax.value_and_grad(fun, **value_and_grad_kwargs)
    argnums = np.atleast_1d(value_and_grad_kwargs.get("argnums", 0))

    def local(*args: Any, **kwargs: Any) -> Any:
        marked = list(args)
        for index in argnums:
            if -len(args) <= index < len(args):  # else JAX raises its own error
                marked[index] = as_local(marked[index], axis_name)
        value, grads = value_and_grad(*marked, **kwargs)
        check_loss(jax.tree.leaves(value)[0], axis_name)  # the loss comes before the auxiliary
        return value, grads

    return local
