"""Optax transformations that show their arguments and count the bytes that they send.

`Transformation` is the base class of `Reducer`, and the class of what `local_sgd` and `accumulate`
return. It adds three things to the pair of functions that Optax expects: a ``repr`` that shows the
call, ``bytes``, and an update that accepts the replica axis of 1 which `jax.shard_map` leaves on
per-replica leaves. So the functions in it always see the state of one replica.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

import jax
import optax

from jaxcomp._base.checks import answers_other_names, check_int
from jaxcomp._base.leaves import checked_params
from jaxcomp._base.stats import CompressionStats, whole_run
from jaxcomp._base.typing import PyTree
from jaxcomp._mesh.per_replica import has_replica_axis, with_replica_axis, without_replica_axis

F = TypeVar("F", bound=Callable[..., Any])
# (parameters, replicas or None, step or None) -> the bytes that one replica hands to the
# collectives
CountBytes = Callable[[PyTree, int | None, int | None], CompressionStats]


class Counted:
    """Shows the call that made a transformation or a round of local SGD, and counts its bytes."""

    made_by: str = ""  # the text that ``repr`` shows
    count_bytes: Any  # `CountBytes`, or None if it is not known what is sent
    # True if the bytes change only between a few phases. Local SGD sends nothing in most steps and
    # averages in others, so its steps are counted one by one.
    in_phases = False

    def __repr__(self) -> str:
        return self.made_by or f"{type(self).__name__}(...)"

    @answers_other_names
    def bytes(
        self,
        params: PyTree,
        *,
        replicas: int | None = None,
        step: int | None = None,
        steps: int | None = None,
    ) -> CompressionStats:
        """Counts exactly the bytes that each replica sends in one step or a whole run.

        Args:
          params: Parameters or gradients: arrays, or other objects with ``shape`` and ``dtype``.
          replicas: Number of replicas. Needed only if integers are sent, because arrays are then
            cut into one share for each replica.
          step: Number of the update, from 0: before ``start_step`` gradients are sent uncompressed,
            and local steps send nothing. None for the mean over all steps after the exact ones,
            rounded to a byte.
          steps: Number of steps of a run: counts the bytes of all of them, the exact ones too. Pass
            either `step` or `steps`.

        Returns:
          The payload of the collectives over ``axis_name``, in bytes per replica, for each leaf and
          in total. A ring all-reduce over ``n`` replicas sends ``2 (n - 1) / n`` times as much; so
          do an all-to-all and an all-gather of this payload together. XLA's CPU backend sends
          bfloat16 as float32; the count is for backends that send 16 bits. With a weight there is
          one more all-reduce of one number, which is not counted, and uncompressed 16-bit leaves
          are sent as float32 (except by `allreduce`).

        Raises:
          ValueError: If an argument is unusable, `replicas` is missing but needed, or the
            transformation has no `count_bytes`.

        Example:
          >>> import jax.numpy as jnp, jaxcomp
          >>> params = {"w": jnp.zeros((512, 256)), "b": jnp.zeros(256)}
          >>> tx = jaxcomp.powersgd(rank=4, axis_name="data", start_step=100)
          >>> [tx.bytes(params, step=step).bytes_after for step in (0, 100)]
          [525312, 13312]
          >>> run = tx.bytes(params, steps=1_000)  # 100 exact steps and 900 compressed ones
          >>> f"{run.bytes_after:,} bytes, {run.ratio:.1f} times fewer"
          '64,512,000 bytes, 8.1 times fewer'
        """
        if replicas is not None:
            replicas = check_int("replicas", replicas, 1)
        if step is not None and steps is not None:
            raise ValueError("Pass `step` for one step or `steps` for a whole run, not both.")
        if step is not None:
            step = check_int("step", step, 0, 2**63)
        if self.count_bytes is None:
            raise ValueError(
                f"{self!r} does not know what it sends. Make it with count_bytes=, a function of "
                "(params, replicas, step) that returns jaxcomp.types.CompressionStats."
            )
        params = checked_params("params", params)
        if steps is None:
            return self.count_bytes(params, replicas, step)
        steps = check_int("steps", steps, 1, 2**63)
        count = functools.partial(self.count_bytes, params, replicas)
        return whole_run(count, steps, in_phases=self.in_phases)


@jax.tree_util.register_static  # else JAX would flatten it to a plain tuple
class Transformation(Counted, optax.GradientTransformationExtraArgs):
    """Extends an Optax transformation: shows its arguments and counts the bytes that it sends.

    It is an ordinary pair of ``init`` and ``update`` for `optax.chain` and other functions. Its
    update also accepts a state whose per-replica leaves are rows ``(1, *leaf)``, as `jax.shard_map`
    passes them with `state_specs`; the new state then has rows too.

    Args:
      init: A function that makes a state from parameters.
      update: An Optax update; it gets the state of one replica, without a replica axis.
      count_bytes: The function that ``bytes`` calls, or None if it is not known what is sent.
    """

    def __new__(
        cls,
        init: Callable[..., PyTree],
        update: Callable[..., Any],
        *,
        count_bytes: CountBytes | None = None,
    ) -> Self:
        """Makes an Optax pair of functions with one more attribute."""

        def update_of_replica(
            updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, PyTree]:
            # A state without an owner does not show whether it has a replica axis, so it is
            # compared with a fresh one.
            like = updates if params is None else params
            if not has_replica_axis(state, lambda: init(like)):
                return update(updates, state, params, **extra_args)
            outputs, state = update(updates, without_replica_axis(state), params, **extra_args)
            return outputs, with_replica_axis(state)

        self = super().__new__(cls, init, update_of_replica)
        self.count_bytes = count_bytes
        return self

    # A copy of a named tuple calls `__new__` with its fields, which is not how these are made.
    def __copy__(self) -> Self:
        """Returns itself, since it is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns itself."""
        return self


def bytes_of(tx: Any, params: PyTree, replicas: int | None, step: int | None) -> CompressionStats:
    """Counts the bytes that a transformation inside of another one sends.

    Raises:
      ValueError: If it is not a `Transformation`, so its bytes are not known.
    """
    if not isinstance(tx, Transformation):
        raise ValueError(
            f"What {shown(tx)} sends is not known, because it is not a reducer. Call bytes of the "
            "reducer in it."
        )
    return tx.bytes(params, replicas=replicas, step=step)


def shows_its_call(make: F) -> F:
    """Decorates a factory so that ``repr`` of its result shows the call: ``powersgd(rank=4, ...)``.

    Arguments with other names are answered too, as by `answers_other_names`.
    """
    signature = inspect.signature(make)
    checked = answers_other_names(make)

    @functools.wraps(make)
    def shown_call(*args: Any, **kwargs: Any) -> Any:
        # Before the call is bound: a wrong number of arguments is then Python's usual error.
        made = checked(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        listed = [f"{name}={shown(value)}" for name, value in call.arguments.items()]
        # A round of local SGD is a frozen object.
        object.__setattr__(made, "made_by", f"{make.__name__}({', '.join(listed)})")
        return made

    return cast(F, shown_call)


def shown(value: Any) -> str:
    """Returns the text of an argument in a call; functions and dtypes are shown by their names."""
    if isinstance(value, Transformation):
        return repr(value)
    if isinstance(value, optax.GradientTransformation):
        return "optax.GradientTransformation(...)"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)
