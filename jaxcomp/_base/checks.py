"""Checks of arguments that several transformations share.

Each function returns the value in the form that the caller keeps, or raises a ValueError that names
the argument. The checks run when a transformation is made, so a mistake does not first show inside
a traced step. Two kinds of argument differ: an integer or a flag decides the shape of the program
and must be known, a number such as `eps` may be a tracer, because `optax.inject_hyperparams` passes
one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

# Names of arguments here, each with names that torch, Optax, `jax.pmap` or papers have for it.
_OTHER_NAMES = {
    "aux": ("out_specs", "out_axes"),
    "axis_name": ("axis", "axis_names", "process_group", "group"),
    "batch_specs": ("batch_spec", "in_axes", "in_shardings", "in_specs"),
    "check_vma": ("check_rep",),
    "comm_dtype": ("dtype", "wire_dtype"),
    "eps": ("orthogonalization_epsilon",),
    "error_feedback": ("use_error_feedback",),
    "every_k": ("every_k_schedule", "k", "steps"),
    "mesh": ("device_ids", "devices"),
    "outer": ("outer_optimizer",),
    "rank": ("matrix_approximation_rank",),
    "reducer": ("comm_hook", "hook"),
    "replicas": ("num_replicas", "workers", "world_size"),
    "seed": ("random_seed",),
    "start_step": ("start_powerSGD_iter",),
    "sync_every": ("H", "local_steps", "period", "steps"),
    "workers": ("num_replicas", "replicas", "world_size"),
}
# Arguments of other libraries that nothing here corresponds to.
_ELSEWHERE = {
    "allow_int": "pass it to jax.value_and_grad, and its result to jaxcomp.data_parallel",
    "average": "all reducers average",
    "batch_tensors_with_same_shape": "small leaves of one shape are always taken together here",
    "compression_stats_logging_frequency": "call its bytes(params) for the figures",
    "donate_argnums": "pass it to the jax.jit around the step",
    "has_aux": (
        "pass it to jax.value_and_grad, which makes the gradient function; `aux` says here how the "
        "auxiliary outputs of the replicas are combined"
    ),
    "holomorphic": "pass it to jax.value_and_grad, and its result to jaxcomp.data_parallel",
    "op": "all reducers average",
    "static_argnums": "an argument that is not an array stays as it is",
}


def answers_other_names(function: F) -> F:
    """Decorates a function: the error for an unknown argument tells the name to use here.

    It is a TypeError, as for every unknown argument in Python.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in parameters:
                hint = _hint(name, parameters)
                raise TypeError(f"{function.__name__} has no argument {name}: {hint}.")
        return function(*args, **kwargs)

    return cast(F, checked)


def _hint(name: str, parameters: Collection[str]) -> str:
    for here, others in _OTHER_NAMES.items():
        if name in others and here in parameters:
            return f"it is `{here}` here"
    arguments = [parameter for parameter in parameters if parameter != "self"]
    return _ELSEWHERE.get(name, f"it has {', '.join(arguments)}")


def check_axis_name(axis_name: Any) -> Any:
    """Returns a string or a non-empty tuple of distinct strings; refuses anything else."""
    names = axis_name
    if not isinstance(axis_name, tuple):
        names = (axis_name,)
    texts = {name for name in names if isinstance(name, str) and name}
    # A repeated axis would count its replicas twice; `lax.psum` refuses it only inside of a step.
    if not names or len(texts) < len(names):
        raise ValueError(
            f"`axis_name` must be a string or a tuple of distinct strings, got {axis_name!r}. Pass "
            "the axis_name of your pmap or vmap, or the mesh axis of your shard_map."
        )
    return axis_name


def is_traced(value: Any) -> bool:
    """Returns whether a value is a tracer, whose type but not value is known."""
    return isinstance(value, jax.core.Tracer)


def is_compiling() -> bool:
    """Returns whether all that is computed is traced, as inside of `jax.jit`.

    Under `jax.grad` and `jax.vmap` outside of it, only arguments are traced.
    """
    # An explicit transfer, because `jax.transfer_guard("disallow")` refuses others.
    return is_traced(jax.device_put(0.0))


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer of Python or NumPy, and not a bool or a tracer."""
    # A bool is an int in Python, and rank=True would compress at rank 1.
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_int(name: str, value: Any, minimum: int, below: int = 2**31) -> int:
    """Returns `value` as an int from `minimum` to below a bound; refuses other values and tracers.

    The bound is that of the counters on devices, which are int32.
    """
    kind = "a non-negative integer"
    if minimum == 1:
        kind = "a positive integer"
    if not is_integer(value) or value < minimum:
        hint = _static_hint(name, value)
        raise ValueError(f"`{name}` must be {kind}, got {name}={value!r}.{hint}")
    if value >= below:
        raise ValueError(f"`{name}` must be below {below:,}, got {name}={value}.")
    return int(value)


def check_function(name: str, value: Any, *parameters: str, otherwise: str = "") -> Any:
    """Returns `value` if it takes these arguments, or is None and `otherwise` says so.

    Raises:
      ValueError: If it is anything else.
    """
    try:
        inspect.signature(value).bind(*parameters)
    except TypeError as error:  # not a function, or one of other arguments
        listed = ", ".join(parameters)
        if value is not None or not otherwise:
            raise ValueError(
                f"`{name}` must be a function of ({listed}){otherwise}, got {value!r}."
            ) from error
    except ValueError:  # some built-in functions have no signature
        pass
    return value


def check_dims(matrix_dims: Any) -> Any:
    """Returns a `matrix_dims` function or None; refuses anything else."""
    return check_function("matrix_dims", matrix_dims, "path", "leaf", otherwise=" or None")


def check_rank(rank: Any) -> Any:
    """Returns a rank, or a function of (path, leaf) that will return it; refuses anything else."""
    if callable(rank):
        return check_function("rank", rank, "path", "leaf")
    return check_int("rank", rank, 1)


def check_flag(name: str, value: Any) -> bool:
    """Returns `value` as a bool; refuses other values and tracers."""
    if not isinstance(value, (bool, np.bool_)):
        hint = _static_hint(name, value)
        raise ValueError(f"`{name}` must be True or False, got {value!r}.{hint}")
    return bool(value)


def check_number(
    name: str, value: Any, minimum: float, maximum: float = math.inf, *, below: float = math.inf
) -> Any:
    """Returns `value` if it is a number in the closed interval and below a bound.

    The value of a tracer is not known, only whether it is a single number.

    A number is returned as a Python float, which does not change the dtype of arrays in arithmetic.
    An array is returned as it is.

    Raises:
      ValueError: If it is no number, or outside the interval.
    """
    number = value
    scalar = isinstance(value, jax.Array) and value.ndim == 0
    if scalar and jnp.issubdtype(value.dtype, jnp.number):  # a random key has no item()
        if is_traced(value):
            return value
        number = value.item()
    usable = isinstance(number, (int, float, np.integer, np.floating))
    # NaN fails all comparisons; infinity is not below infinity.
    inside = usable and minimum <= number <= maximum and number < below
    if not inside or isinstance(number, bool):
        bounds = f"at least {minimum:g}"
        if maximum < math.inf:
            bounds += f" and at most {maximum:g}"
        if below < math.inf:
            bounds += f" and below {below:g}"
        raise ValueError(f"`{name}` must be a finite number, {bounds}, got {value!r}.")
    if isinstance(value, jax.Array):
        return value
    return float(number)


def check_static_number(name: str, value: Any, minimum: float, maximum: float = math.inf) -> float:
    """Checks a number that determines shapes in the program; refuses tracers too."""
    if isinstance(value, jax.Array):
        raise ValueError(f"`{name}` must be a Python number.{_static_hint(name, value)}")
    return float(check_number(name, value, minimum, maximum))


def _static_hint(name: str, value: Any) -> str:
    if not isinstance(value, jax.Array):
        return ""
    return (
        f" It decides the shape of the program: with optax.inject_hyperparams pass it as a static "
        f"argument, static_args=({name!r}, ...)."
    )


def check_transformation(name: str, value: Any, otherwise: str = "") -> None:
    """Refuses an object without an Optax transformation's `init` and `update`."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise ValueError(
            f"`{name}` must be an Optax gradient transformation{otherwise}, got {value!r}."
        )
