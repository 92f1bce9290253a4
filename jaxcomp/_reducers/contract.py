"""What a reducer is: a transformation that knows what it sends and how it was made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.leaves import unboxed
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.per_replica import takes_rows
from jaxcomp._reducers.opening import Reduction, all_finite, on_plain_arrays, reducible

# (parameters, replicas or None, step or None) -> what one replica hands to the collectives
CountBytes = Callable[[PyTree, int | None, int | None], CompressionStats]


class Transformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation that shows how it was made and says what it sends.

    To `optax.chain` and the like it is an ordinary one, a pair of ``init`` and ``update``.
    """

    made_by: str
    count_bytes: CountBytes | None

    def __new__(
        cls,
        init: Callable[..., PyTree],
        update: Callable[..., Any],
        *,
        made_by: str = "",
        count_bytes: CountBytes | None = None,
    ) -> Self:
        """A pair of functions, as Optax wants it, with two attributes beside."""
        self = super().__new__(cls, init, update)
        self.made_by, self.count_bytes = made_by, count_bytes
        return self

    def bytes(
        self, params: PyTree, *, replicas: int | None = None, step: int | None = None
    ) -> CompressionStats:
        """Counts what each replica sends in one step; exact, no device needed.

        Args:
          params: Parameters or gradients: arrays, or anything with ``shape`` and ``dtype``.
          replicas: Number of replicas. Needed where arrays are cut into as many shares: with int8
            on the wire.
          step: Which update, counted from 0: before ``start_step`` gradients go as they are,
            one-sided steps take turns, local steps send nothing. None for the mean over the steps
            after all exact ones, rounded to a byte.

        Returns:
          The payload per replica in bytes, per leaf and in total, of the collectives over
          ``axis_name``. A ring all-reduce over ``n`` replicas sends ``2 (n - 1) / n`` times as
          much; so do an all-to-all and an all-gather of this payload together. XLA's CPU backend
          sends bfloat16 as float32; the figure is of backends that have it on the wire.

        Raises:
          ValueError: If an argument is unusable, `replicas` is missing where it is needed, or the
            transformation does not know what it sends.

        Example:
          >>> import jax.numpy as jnp, jaxcomp
          >>> params = {"w": jnp.zeros((512, 256)), "b": jnp.zeros(256)}
          >>> tx = jaxcomp.powersgd(rank=4, axis_name="data", start_step=100)
          >>> [tx.bytes(params, step=step).bytes_after for step in (0, 100)]
          [525312, 13312]
        """
        if replicas is not None:
            replicas = check_int("replicas", replicas, 1)
        if step is not None:
            step = check_int("step", step, 0)
        if self.count_bytes is None:
            raise ValueError(
                f"{self!r} does not know what it sends. Make it with count_bytes=, a function of "
                "(params, replicas, step) that returns jaxcomp.CompressionStats."
            )
        return self.count_bytes(params, replicas, step)

    def __repr__(self) -> str:
        return self.made_by or f"{type(self).__name__}(...)"

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `copy` and `pickle` build the copy from."""
        arguments = {"made_by": self.made_by, "count_bytes": self.count_bytes}
        return (self.init, self.update), arguments


class Reducer(Transformation):
    """An Optax transformation that also says what this replica contributed to the average.

    Every reducer of this package is one. `error_feedback` calls `reduce` instead of ``update``, and
    keeps what was not sent. Gradients that no reducer can take (complex, or already reduced over
    the axis) are refused before `reduce` sees them. ``update(..., weight=w)`` makes the average a
    weighted one, over all reducers of this package: `w` is how much this replica counts, a number
    such as that of the examples in its batch, 0 to sit the step out, when the gradients may hold
    anything. No collective is added. What was not sent yet keeps the weight that it arose with, so
    that the mean residual of `powersgd` is what is missing, however weights change. One-sided steps
    and `error_feedback` have one round of collectives: there a residual counts with its replica's
    weight of the day, which is exact only while weights stay in proportion, and of a replica that
    sits out it waits. A float16 wire overflows with weights above some thousand: give parts of a
    full batch there.

    Args:
      init: From parameters to a consolidated state.
      reduce: A function of local gradients, state, parameters or None, and extra arguments by name
        that returns a `Reduction`. `jaxcomp.extend.open_step` opens and closes it. With a parameter
        ``weight`` among the extra ones it takes weights; otherwise they are refused.
      axis_name: The mapped axis or axes of the replicas.
      update: Optax's update function; by default made of `reduce`.
      made_by: What ``repr`` shows.
      count_bytes: A function of (params, replicas, step), the last two possibly None, that returns
        `CompressionStats`: the answer of ``bytes``.

    Example:
      A reducer that averages signs, and keeps the rest for the next step:

      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> def reduce(updates, state, params=None, **extra_args):
      ...     step = jaxcomp.extend.open_step(updates, "data")
      ...     signs = [jnp.sign(g) for g in step.arrays]
      ...     reduced = jaxcomp.extend.reduce_mean(signs, "data", jnp.float32)
      ...     return step.close(reduced.means, state, reduced.finite, sent=signs, old=state)
      >>> signs = jaxcomp.Reducer(lambda params: optax.EmptyState(), reduce, "data")
      >>> tx = jaxcomp.error_feedback(signs)
      >>> grads = {"w": jnp.array([[3.0, -1.0], [0.5, -1.0]])}  # two replicas
      >>> state = tx.init({"w": jnp.zeros(2)})
      >>> mean, state = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(grads, state)
      >>> mean["w"][0].tolist(), state.residual["w"].tolist()
      ([1.0, -1.0], [[2.0, 0.0], [-0.5, 0.0]])
    """

    reduce: Callable[..., Reduction]
    axis_name: AxisName

    def __new__(
        cls,
        init: Callable[..., PyTree],
        reduce: Callable[..., Reduction],
        axis_name: AxisName,
        *,
        update: Callable[..., Any] | None = None,
        made_by: str = "",
        count_bytes: CountBytes | None = None,
    ) -> Self:
        """`update` and the checks around `reduce`."""
        check_axis_name(axis_name)
        weighs = "weight" in inspect.signature(reduce).parameters

        def checked(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> Reduction:
            reducible(updates, axis_name)
            if not weighs:
                check_not_weighed(self, extra_args)
            return reduce(updates, state, params, **extra_args)

        def derived(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, PyTree]:
            result = checked(updates, state, params, **extra_args)
            return result.updates, result.state

        made_by = made_by or f"{cls.__name__}(axis_name={axis_name!r})"
        init = _on_plain_params(init)
        update = takes_rows(on_plain_arrays(update or derived, _update_specs), init)
        self = super().__new__(cls, init, update, made_by=made_by, count_bytes=count_bytes)
        self.reduce = takes_rows(on_plain_arrays(checked, _reduction_specs), init)
        self.axis_name = axis_name
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `copy` and `pickle` build the copy from."""
        _, arguments = super().__getnewargs_ex__()
        arguments |= {"update": self.update}
        return (self.init, self.reduce, self.axis_name), arguments


def _on_plain_params(init: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A state of plain arrays also for parameters in boxes."""
    return lambda params: init(unboxed(params))


def _update_specs(updates: PyTree, state: PyTree) -> PyTree:
    """How the results of an update are sharded: as what they replace."""
    return updates, state


def _reduction_specs(updates: PyTree, state: PyTree) -> PyTree:
    """How the fields of a `Reduction` are sharded: as what they replace."""
    finite: Any = jax.sharding.PartitionSpec()
    return Reduction(updates, state, updates, finite)


def reduction_of(tx: optax.GradientTransformation) -> Callable[..., Reduction]:
    """The `reduce` of a reducer, or a stand-in for it made from a plain transformation.

    Nothing is known of what a plain transformation sends. The stand-in takes the average for every
    replica's contribution, as torch's hooks do: residuals then have the right mean.

    Args:
      tx: A `Reducer`, or any Optax transformation from local gradients to averages.

    Returns:
      A function of updates, state, params and extra arguments by name that returns a `Reduction`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxcomp import extend
      >>> result = extend.reduction_of(optax.identity())(jnp.ones(2), optax.EmptyState())
      >>> result.sent.tolist(), bool(result.finite)
      ([1.0, 1.0], True)
    """
    if isinstance(tx, Reducer):
        return tx.reduce
    plain = optax.with_extra_args_support(tx)

    def reduce(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        check_not_weighed(tx, extra_args)
        means, new_state = plain.update(updates, state, params, **extra_args)
        finite = all_finite(jax.tree.leaves(means))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
        return Reduction(means, kept, means, finite)

    return reduce


def check_not_weighed(tx: Any, extra_args: Mapping[str, Any]) -> None:
    """Refuses a weight that nobody would look at.

    Raises:
      ValueError: With what to do instead.
    """
    if extra_args.get("weight") is not None:
        raise ValueError(
            f"{shown(tx)} takes no `weight`. The reducers of jaxcomp do; one of your own says so "
            "by a parameter named weight."
        )


def bytes_of(tx: Any, params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
    """What a transformation inside of another one sends.

    Raises:
      ValueError: If it is none that knows.
    """
    if not isinstance(tx, Transformation):
        raise ValueError(
            f"What {shown(tx)} sends is not known: it is no reducer. Ask the reducer that is in it."
        )
    return tx.bytes(params, replicas=replicas, step=step)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as one would write it: ``powersgd(rank=4, axis_name='data', ...)``."""
    return f"{name}({', '.join(f'{key}={shown(value)}' for key, value in arguments.items())})"


def shown(value: Any) -> str:
    """An argument as one would write it; functions and dtypes by their names."""
    if isinstance(value, optax.GradientTransformation) and not isinstance(value, Transformation):
        return "optax.GradientTransformation(...)"
    if isinstance(value, np.dtype):
        return repr(value.name)
    if type(value) in (list, tuple):
        parts = ", ".join(map(shown, value))
        return f"[{parts}]" if type(value) is list else f"({parts}{',' * (len(value) == 1)})"
    if callable(value) and not isinstance(value, Transformation):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


def reducer_if_mapped(
    init: Any, reduce: Any, axis_name: AxisName | None, made_by: str, count_bytes: CountBytes
) -> Transformation:
    """A `Reducer`, or a plain transformation where nothing but plain ones went in."""
    if axis_name:
        return Reducer(init, reduce, axis_name, made_by=made_by, count_bytes=count_bytes)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        result = reduce(updates, state, params, **extra_args)
        return result.updates, result.state

    return Transformation(init, update, made_by=made_by, count_bytes=count_bytes)
