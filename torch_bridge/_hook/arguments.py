"""Translates torch's communication hooks and their arguments to jaxcomp's reducers.

`reducer_from_torch` and `powersgd_kwargs_from_torch` are for users who move a training script; a
checkpoint holds only the hook's name. The tables are in torch's order and words, so that they can
be compared with torch's source line by line.

A tutorial that many people copy passes arguments to ``PowerSGDState`` that no release of torch has
had. Each of these is refused here with a sentence that says what to use instead.
"""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

import jax.numpy as jnp
import optax

import jaxcomp

_WRAPPED = re.compile(r"(\w+_compress_wrapper)_hook")
_NARROW = {"fp16": jnp.float16, "bf16": jnp.bfloat16}
# torch's argument, in torch's order -> jaxcomp's, which checks the value; None if jaxcomp needs
# no such argument.
_ARGUMENTS = {
    "process_group": None,
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_step",
    "min_compression_rate": "min_compression_rate",
    "use_error_feedback": "error_feedback",
    "warm_start": "warm_start",
    "orthogonalization_epsilon": "eps",
    "random_seed": "seed",
    "compression_stats_logging_frequency": None,
    "batch_tensors_with_same_shape": None,
}
_POSITIONS = tuple(_ARGUMENTS)
# Arguments that torch does not have -> what to use instead.
_REFUSED = {
    "lr_scheduler": "put the schedule in the optimizer, as in "
    "optax.chain(jaxcomp.powersgd(...), optax.sgd(schedule))",
    "warm_up_beta_factor": "before start_step gradients are averaged exactly, so there is no "
    "residual to scale; later jaxcomp.error_feedback(jaxcomp.powersgd(..., "
    "error_feedback=False), decay=schedule) scales the residual",
    "error_decay": "jaxcomp.error_feedback(jaxcomp.powersgd(..., error_feedback=False), decay=) "
    "scales the residual that is added back; the rest of the residual is lost",
    "feedback_every_n_iters": "jaxcomp.error_feedback(jaxcomp.powersgd(..., error_feedback=False), "
    "every=n) adds the residual back every n updates",
    "error_feedback": "torch calls it use_error_feedback",
    "bytes_per_weight": "jaxcomp.powersgd sends 4 bytes for a value, with comm_dtype=jnp.bfloat16 "
    "2, and with comm_dtype=jnp.int8 1 (without factors use jaxcomp.quantized_allreduce)",
    "comm_device": "leave it out, as XLA sends from the device that has the gradients; to send "
    "less set comm_dtype=jnp.bfloat16 or a lower rank",
    "update_state": "update() returns the new state; nothing is updated in place. To leave a state "
    "as it is, as in an evaluation, keep the old one",
    "enabled": "build the optax.chain without the reducer, or with jaxcomp.allreduce in its place "
    "(Accelerate's LocalSGD(enabled=False) is optax.chain(jaxcomp.allreduce(...), inner))",
}
_KNOWN = (*_POSITIONS, *_REFUSED)
_HOOKS = {
    "ALLREDUCE": "allreduce_hook",
    "FP16_COMPRESS": "fp16_compress_hook",
    "BF16_COMPRESS": "bf16_compress_hook",
    "QUANTIZE_PER_TENSOR": "quantization_pertensor_hook",
    "QUANTIZE_PER_CHANNEL": "quantization_perchannel_hook",
    "POWER_SGD": "powerSGD_hook",
    "POWER_SGD_RANK2": "powerSGD_hook",
    "BATCHED_POWER_SGD": "batched_powerSGD_hook",
    "BATCHED_POWER_SGD_RANK2": "batched_powerSGD_hook",
    "NOOP": "noop_hook",
}
# Hook without a state -> its reducer and the arguments. torch quantizes in buckets of 512 values.
_REDUCERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "allreduce_hook": (jaxcomp.allreduce, {}),
    "fp16_compress_hook": (jaxcomp.allreduce, {"comm_dtype": jnp.float16}),
    "bf16_compress_hook": (jaxcomp.allreduce, {"comm_dtype": jnp.bfloat16}),
    "quantization_pertensor_hook": (jaxcomp.quantized_allreduce, {"block_size": None}),
    "quantization_perchannel_hook": (jaxcomp.quantized_allreduce, {"block_size": 512}),
}
_ELSEWHERE = {
    "post_localSGD_hook": "jaxcomp.local_sgd (or local_sgd_round), with start_step",
    "hook_with_zero_step": "sharded optimizer state: jax.sharding over the optax state",
    "hook_with_zero_step_interleaved": "sharded optimizer state: jax.sharding over the optax state",
}


def hook_name(hook: Any) -> str:
    """Returns a hook's name as text, such as ``"fp16_compress_wrapper(powerSGD_hook)"``.

    Args:
      hook: A function, a ``DDPCommHookType``, or a name, with or without the name of its module.

    Example:
      >>> hook_name("default_hooks.fp16_compress_wrapper(powerSGD_hook)")
      'fp16_compress_wrapper(powerSGD_hook)'
    """
    name = getattr(hook, "__name__", "")
    wrapped = _WRAPPED.fullmatch(name)
    if wrapped:
        return f"{wrapped[1]}({hook_name(inspect.getclosurevars(hook).nonlocals['hook'])})"
    if callable(hook):
        hook = name or type(hook).__name__
    words = []
    for word in str(getattr(hook, "name", hook)).split("("):
        words.append(word.rpartition(".")[2])
    return "(".join(words)


def unwrapped_hook(hook: Any) -> tuple[str, Any]:
    """Returns a hook's name without its compression wrapper, and the wrapper's dtype (or None).

    Example:
      >>> unwrapped_hook("bf16_compress_wrapper(powerSGD_hook)")[0]
      'powerSGD_hook'
    """
    if hook is None:
        return "", None
    words = hook_name(hook).rstrip(")").split("(")
    name = words.pop()
    for word in words:
        if word[:4] in _NARROW:  # fp16_compress_wrapper and bf16_compress_wrapper
            return name, _NARROW[word[:4]]
    return name, None


def powersgd_kwargs_from_torch(*args: Any, hook: Any = None, **arguments: Any) -> dict[str, Any]:
    """Translates the arguments of torch's ``PowerSGDState`` to those of `jaxcomp.powersgd`.

    torch does not have ``feedback_every_n_iters``, ``error_decay``, ``warm_up_beta_factor``,
    ``lr_scheduler``, ``error_feedback``, ``bytes_per_weight``, ``update_state``, ``enabled`` and
    ``comm_device``. They are refused, and the error says what to use instead.

    Args:
      *args: One ``PowerSGDState`` (torch's, or a `PowerSGDRecord` from a checkpoint), or the
        positional arguments of ``PowerSGDState``, process group first.
      hook: The registered hook, if it is wrapped: ``fp16_compress_wrapper(powerSGD_hook)`` and
        ``bf16_compress_wrapper(powerSGD_hook)``, as a function or as a string, set ``comm_dtype``.
        torch then also computes in that dtype; jaxcomp uses it only on the wire.
      **arguments: Keyword arguments of ``PowerSGDState``.

    Returns:
      Arguments for ``jaxcomp.powersgd(axis_name=..., **kwargs)``: those that you passed, or all
      arguments of a state. Use your ``axis_name`` in place of ``process_group``. jaxcomp always
      batches equal shapes, and ``tx.bytes`` has the statistics.

    Raises:
      ValueError: An argument is unknown, refused, or passed twice.

    Example:
        >>> powersgd_kwargs_from_torch(None, 2, start_powerSGD_iter=100)
        {'rank': 2, 'start_step': 100}
    """
    if len(args) == 1 and hasattr(args[0], "matrix_approximation_rank"):
        values = {name: getattr(args[0], name) for name in _POSITIONS if hasattr(args[0], name)}
    elif len(args) > len(_POSITIONS):
        raise ValueError(
            f"PowerSGDState takes {len(_POSITIONS)} positional arguments, got {len(args)}. Pass "
            "them by name."
        )
    else:
        values = dict(zip(_POSITIONS, args, strict=False))
    for name, value in arguments.items():
        # A single argument may be a state, some of whose values the caller replaces by name.
        if name in values and args[1:]:
            raise ValueError(f"{name!r} is given twice, by position and by name; leave one out.")
        if name in _REFUSED and value is not None:
            raise ValueError(
                f"`{name}` is not an argument of torch's PowerSGDState: {_REFUSED[name]}."
            )
        if name not in _KNOWN:
            close = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known are {', '.join(_KNOWN)}."
            raise ValueError(f"{name!r} is not an argument of torch's PowerSGDState. {hint}")
    kwargs = {}
    for name, value in (values | arguments).items():
        ours = _ARGUMENTS.get(name)
        if ours:
            kwargs[ours] = value
    _, dtype = unwrapped_hook(hook)
    if dtype is not None:
        kwargs["comm_dtype"] = dtype
    return kwargs


def reducer_from_torch(
    hook: Any, state: Any = None, *, axis_name: str | tuple[str, ...], **arguments: Any
) -> optax.GradientTransformation:
    """Makes the reducer that replaces one of torch's DDP communication hooks.

    Args:
      hook: A ``DDPCommHookType`` or its name (``'POWER_SGD_RANK2'``), a hook function or its name,
        or a wrapped hook: ``bf16_compress_wrapper(powerSGD_hook)``, also as a string.
      state: The state passed to ``register_comm_hook``: a ``PowerSGDState``, a process group or
        None.
      axis_name: The mapped axis (or axes) of the replicas.
      **arguments: Arguments of ``PowerSGDState``; see `powersgd_kwargs_from_torch`.

    Returns:
      The reducer, the first link of your `optax.chain`.

    Raises:
      ValueError: No reducer replaces this hook; the message says what to use instead.

    Example:
        >>> tx = reducer_from_torch("FP16_COMPRESS", axis_name="data")
    """
    name, dtype = unwrapped_hook(hook)
    wire = {"comm_dtype": dtype}
    if name.endswith("RANK2"):
        arguments.setdefault("matrix_approximation_rank", 2)
    name = _HOOKS.get(name, name)
    if "powerSGD" in name:
        kwargs = powersgd_kwargs_from_torch(state, **arguments) | wire
        if name == "powerSGD_hook":
            return jaxcomp.powersgd(axis_name=axis_name, **kwargs)
        kwargs.pop("min_compression_rate", None)  # torch's batched hook does not read it either
        return jaxcomp.batched_powersgd(axis_name=axis_name, **kwargs)
    if arguments:
        raise ValueError(f"{name} takes no arguments, got {sorted(arguments)}. Leave them out.")
    if name == "noop_hook":
        return optax.identity()
    if name not in _REDUCERS:
        instead = _ELSEWHERE.get(name, f"one of {', '.join(_HOOKS)}")
        raise ValueError(f"There is no reducer for the hook {name!r}; use {instead}.")
    make, fixed = _REDUCERS[name]
    if make is jaxcomp.allreduce:
        fixed = wire | fixed
    return make(axis_name=axis_name, **fixed)
