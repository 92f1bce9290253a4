"""Arguments of `powersgd`, checked, and what its first state is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._base.checks import (
    check_axis_name,
    check_flag,
    check_function,
    check_int,
    check_number,
    check_static_number,
)
from jaxcomp._base.leaves import (
    checked_factor_dtype,
    checked_residual_dtype,
    compute_dtype,
)
from jaxcomp._base.typing import Array, AxisName, MatrixDimsFn, PyTree, RankFn
from jaxcomp._lowrank.matrices import LeafPlan, plan_leaves
from jaxcomp._mesh.collectives import local_if_bound


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Arguments of `powersgd`, which documents them.

    Raises:
      ValueError: Naming the first that is unusable.
    """

    rank: int | RankFn
    axis_name: AxisName
    start_step: int = 1_000
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    eps: Any = 0.0
    seed: Any = 0
    comm_dtype: Any = None
    residual_dtype: Any = None
    matrix_dims: MatrixDimsFn | None = None

    def __post_init__(self) -> None:
        """Checks each, and keeps it in the one form in which it is used."""
        check_axis_name(self.axis_name)
        rate, seed = self.min_compression_rate, self.seed
        checked = {
            "rank": self.rank if callable(self.rank) else check_int("rank", self.rank, 1),
            "start_step": check_int("start_step", self.start_step, 0),
            "min_compression_rate": check_static_number("min_compression_rate", rate, 0),
            "error_feedback": check_flag("error_feedback", self.error_feedback),
            "warm_start": check_flag("warm_start", self.warm_start),
            "eps": check_number("eps", self.eps, 0),
            "seed": seed if hasattr(seed, "aval") else check_int("seed", seed, 0),
            "comm_dtype": checked_factor_dtype("comm_dtype", self.comm_dtype),
            "residual_dtype": checked_residual_dtype(self.residual_dtype),
            "matrix_dims": check_function("matrix_dims", self.matrix_dims),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def plan(self, tree: PyTree) -> list[LeafPlan]:
        """Plans what happens to each leaf of `tree`."""
        return plan_leaves(tree, self.rank, self.min_compression_rate, self.matrix_dims)

    def zero_residual(self, params: PyTree) -> PyTree:
        """Nothing left over, for every leaf that is compressed; typed as local where it is."""
        leaves, treedef = jax.tree.flatten(params)

        def zeros(leaf: Any, plan: LeafPlan) -> Any:
            if plan.view is None or not self.error_feedback:
                return optax.MaskedNode()
            dtype = self.residual_dtype or compute_dtype(plan.dtype)
            return jnp.zeros_like(leaf, dtype=dtype)

        residual = treedef.unflatten(map(zeros, leaves, self.plan(params)))
        return local_if_bound(residual, self.axis_name)

    def random_factor(self, shape: tuple[int, ...], dtype: Any, *path: Any) -> Array:
        """Draws a factor to start from: the same on every replica, another for every path."""
        # Threefry whatever jax_default_prng_impl says: others differ between the lanes of a vmap.
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in path:
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, shape, compute_dtype(dtype))

    def first_factors(self, params: PyTree) -> PyTree:
        """Draws a right factor for every leaf that is compressed, to warm-start from."""
        factors = [
            self.random_factor(plan.q_shape, plan.dtype, i, 0)
            if plan.view and self.warm_start
            else optax.MaskedNode()
            for i, plan in enumerate(self.plan(params))
        ]
        return jax.tree.structure(params).unflatten(factors)
