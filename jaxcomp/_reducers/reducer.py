"""What a reducer is, and the door through which all gradients enter one.

At the door gradients are checked and taken out of their boxes, weights multiplied in, and a state
is seen as one replica's; behind it a reducer is arithmetic on plain trees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._base.checks import check_axis_name, check_int
from jaxcomp._base.leaves import (
    all_finite,
    boxed_as,
    floating_leaves,
    leaf_name,
    nan_unless,
    unboxed,
    with_leaves,
)
from jaxcomp._base.stats import CompressionStats
from jaxcomp._base.typing import Array, AxisName, PyTree
from jaxcomp._mesh.axes import check_local, explicit_axes
from jaxcomp._mesh.explicit import call_on_automatic_axes, typed_specs
from jaxcomp._mesh.per_replica import takes_rows
from jaxcomp._mesh.weights import weighted_gradients

# (parameters, replicas or None, step or None) -> what one replica hands to the collectives
CountBytes = Callable[[PyTree, int | None, int | None], CompressionStats]


class Reduction(NamedTuple):
    """One update of a `Reducer`, with what `error_feedback` and `switch_at` need to know of it."""

    updates: PyTree  # the average, equal on every replica
    state: PyTree  # the new state; the old one, bit for bit, where `finite` is False
    sent: PyTree  # this replica's own contribution as sent: `updates` is the mean of it
    finite: Array  # bool scalar, equal on every replica: whether all updates are finite


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
        """A pair of functions, as Optax wants it, with two attributes."""
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
            ACP-SGD's factors take turns, local steps send nothing. None for the mean over the steps
            after all exact ones, rounded to a byte.

        Returns:
          The payload per replica in bytes, per leaf and in total, of the collectives over
          ``axis_name``. A ring all-reduce over ``n`` replicas sends ``2 (n - 1) / n`` times as
          much; so do an all-to-all and an all-gather of this payload together. XLA's CPU backend
          sends bfloat16 as float32; the figure is of backends that have it on the wire. A weight
          adds an all-reduce of four bytes, which is not counted, and leaves of 16 bits that are not
          compressed then go as float32, but for `allreduce`'s.

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
                "(params, replicas, step) that returns jaxcomp.types.CompressionStats."
            )
        return self.count_bytes(params, replicas, step)

    def __repr__(self) -> str:
        return self.made_by or f"{type(self).__name__}(...)"

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `copy` builds the copy from."""
        arguments = {"made_by": self.made_by, "count_bytes": self.count_bytes}
        return (self.init, self.update), arguments


class Reducer(Transformation):
    """An Optax transformation that also says what this replica contributed to the average.

    Every reducer of this package is one. `error_feedback` calls ``reduce`` instead of ``update``,
    and keeps what was not sent. Gradients that no reducer can take (complex, or already reduced
    over the axis) are refused before `reduce` sees them.

    ``update(..., weight=w)`` makes the average a weighted one, over any reducer: `w` is how much
    this replica counts, a number such as that of the examples in its batch, 0 to sit the step out,
    when the gradients may hold anything. They are multiplied by `w` over the mean weight, which one
    all-reduce of a scalar tells, and then averaged like others. So what is not sent is a share of
    the weighted mean, whatever the weights of later steps.

    Args:
      init: From parameters to a consolidated state.
      reduce: A function of local gradients, state, parameters or None, and extra arguments by name
        that returns a `Reduction`; updates and sent in any floating dtypes. With a parameter
        ``weight`` among the extra ones it sees to weights itself.
      axis_name: The mapped axis or axes of the replicas.
      made_by: What ``repr`` shows.
      count_bytes: A function of (params, replicas, step), the last two possibly None, that returns
        `CompressionStats`: the answer of ``bytes``.

    Example:
      A reducer that averages signs, and keeps the rest for the next step:

      >>> import jax, jax.numpy as jnp, jaxcomp, optax
      >>> from jaxcomp import extend
      >>> def reduce(updates, state, params=None, **extra_args):
      ...     signs = [jnp.sign(g) for g in extend.floating_leaves(updates)]
      ...     reduced = extend.reduce_mean(signs, "data", jnp.float32)
      ...     means, sent = (extend.with_leaves(updates, x) for x in (reduced.means, signs))
      ...     return jaxcomp.Reduction(means, state, sent, reduced.finite)
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
        made_by: str = "",
        count_bytes: CountBytes | None = None,
    ) -> Self:
        """`reduce` behind the door, and an ``update`` made of it."""
        check_axis_name(axis_name)
        unboxed_init = lambda params: init(unboxed(params))  # noqa: E731
        entered = takes_rows(_behind_door(reduce, axis_name), unboxed_init)

        def update(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, PyTree]:
            result = entered(updates, state, params, **extra_args)
            return result.updates, result.state

        self = super().__new__(
            cls,
            unboxed_init,
            update,
            made_by=made_by or f"{cls.__name__}(axis_name={axis_name!r})",
            count_bytes=count_bytes,
        )
        self.reduce, self.axis_name = entered, axis_name
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `copy` builds the copy from."""
        _, arguments = super().__getnewargs_ex__()
        return (self.init, self.reduce, self.axis_name), arguments


def _behind_door(reduce: Callable[..., Reduction], axis_name: AxisName) -> Callable[..., Reduction]:
    """`reduce` for gradients in boxes, beside Explicit axes, and with weights."""
    weighs = "weight" in inspect.signature(reduce).parameters

    def run(updates: PyTree, state: PyTree, params: PyTree, extra_args: Any) -> Reduction:
        check_gradients(updates, axis_name)
        gradients = updates
        if not weighs and (weight := extra_args.pop("weight", None)) is not None:
            gradients = weighted_gradients(updates, weight, axis_name)
        result = reduce(gradients, state, params, **extra_args)
        means, sent = (_cast_as(x, updates) for x in (result.updates, result.sent))
        if _narrowed(result.updates, means):
            # What was finite may not fit: then it is as if it had not been.
            finite = result.finite & all_finite(jax.tree.leaves(means))
            kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), result.state, state)
            whole = with_leaves(means, nan_unless(finite, floating_leaves(means)))
            return Reduction(whole, kept, sent, finite)
        return result._replace(updates=means, sent=sent)

    def enter(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        arguments = unboxed(updates), state, unboxed(params), extra_args
        if explicit_axes():
            # Beside these every operation must say how its result is sharded, which the arithmetic
            # of a reducer cannot know. There the compiler decides meanwhile, and the results are
            # typed as what they replace.
            like, of_state = map(typed_specs, arguments[:2])
            everywhere: Any = jax.sharding.PartitionSpec()
            typed = Reduction(like, of_state, like, everywhere)
            result = call_on_automatic_axes(run, typed, *arguments)
        else:
            result = run(*arguments)
        means, sent = (boxed_as(x, updates) for x in (result.updates, result.sent))
        return result._replace(updates=means, sent=sent)

    return enter


def _cast_as(tree: PyTree, like: PyTree) -> PyTree:
    """The same tree in the dtypes of the gradients."""
    return jax.tree.map(lambda x, g: x if x.dtype == g.dtype else x.astype(g.dtype), tree, like)


def _narrowed(tree: PyTree, cast: PyTree) -> bool:
    """Whether a leaf has become float16 that was wider."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(cast), strict=True)
    return any(new.dtype == jnp.float16 != old.dtype for old, new in pairs)


def check_gradients(updates: PyTree, axis_name: AxisName | None) -> None:
    """Refuses what no reducer can average.

    ``float0`` leaves, the gradients of integer parameters, carry nothing and pass.

    Raises:
      ValueError: If a leaf is neither floating nor ``float0``, or was already reduced over the
        axis, or the axis is not bound. The message names the leaves.
    """
    wrong = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(updates)[0]:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            wrong.append(f"{leaf_name(path)} is a {type(leaf).__name__} and no array")
        elif not jnp.issubdtype(dtype, jnp.floating) and dtype != jax.dtypes.float0:
            wrong.append(f"{leaf_name(path)} has dtype {dtype}")
    if wrong:
        raise ValueError(
            f"Only floating gradients can be reduced: {'; '.join(wrong)}. Keep parameters that are "
            "not trained out with optax.masked (of an Equinox module, differentiate "
            "eqx.filter(model, eqx.is_inexact_array)); wrap the chain in "
            "optax.contrib.split_real_and_imaginary for complex ones."
        )
    if axis_name is not None:
        check_local(updates, axis_name)


def reduction_of(tx: optax.GradientTransformation) -> Callable[..., Reduction]:
    """The `reduce` of a reducer, or a stand-in for it made from a plain transformation.

    Nothing is known of what a plain transformation sends. The stand-in takes the average for every
    replica's contribution, as torch's hooks do: residuals then have the right mean.

    Args:
      tx: A `Reducer`, or any Optax transformation from local gradients to averages.

    Returns:
      A function of updates, state, params and extra arguments by name that returns a `Reduction`.

    Raises:
      ValueError: If `tx` is none, as a reducer that was not called.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxcomp import extend
      >>> result = extend.reduction_of(optax.identity())(jnp.ones(2), optax.EmptyState())
      >>> result.sent.tolist(), bool(result.finite)
      ([1.0, 1.0], True)
    """
    if isinstance(tx, Reducer):
        return tx.reduce
    if not isinstance(tx, optax.GradientTransformation):
        fix = "Call it first" if callable(tx) else "Pass one"
        raise ValueError(
            f"A reducer is wanted, got {shown(tx)}. {fix}, as in "
            "jaxcomp.error_feedback(jaxcomp.allreduce(axis_name='data'))."
        )
    plain = optax.with_extra_args_support(tx)

    def reduce(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> Reduction:
        if extra_args.get("weight") is not None:
            raise ValueError(
                f"{shown(tx)} takes no `weight`: it does not say along which axis the replicas "
                "lie. The reducers of jaxcomp do, and a jaxcomp.Reducer of your own."
            )
        means, new_state = plain.update(updates, state, params, **extra_args)
        finite = all_finite(jax.tree.leaves(means))
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
        return Reduction(means, kept, means, finite)

    return reduce


def reducer_if_mapped(
    init: Any, reduce: Any, axis_name: AxisName | None, made_by: str, count_bytes: CountBytes
) -> Transformation:
    """A `Reducer`, or a plain transformation where nothing but plain ones went in."""
    if axis_name:
        return Reducer(init, reduce, axis_name, made_by=made_by, count_bytes=count_bytes)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        check_gradients(updates, None)
        result = reduce(updates, state, params, **extra_args)
        return _cast_as(result.updates, updates), result.state

    return Transformation(init, takes_rows(update, init), made_by=made_by, count_bytes=count_bytes)


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
