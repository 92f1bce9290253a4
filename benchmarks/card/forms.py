"""Compares every form of every reducer on a GPU and on the CPU: both must agree to rounding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from benchmarks.card.updates import AXIS, mesh_of
from benchmarks.common.runs import Run

# How far the two may be apart, of the largest value: rounding that an orthogonalisation enlarges.
EXACT = 1e-3
# Of values that are sent or kept in bfloat16: four units of its rounding.
BFLOAT16 = 4 * 2.0**-8
# One and a half steps of integers: rounding decides now and then which of two neighbours is sent,
# and the rest comes on top.
INT8 = 1.5 / 127
INT6 = 1.5 / 31
KINDS = ("random", "zero", "collinear", "1e-30", "1e35", "nan")
SHAPES = {
    "dense": (300, 270),
    "twin": (300, 270),
    "large": (1200, 1000),
    "embedding": (5003, 130),
    "conv": (3, 3, 64, 96),
    "bias": (9,),
}
_STEPS = 4


class Form(NamedTuple):
    """A reducer, its inputs, and the expected precision."""

    reducer: Any
    allowed: float = EXACT  # how far GPU and CPU may be apart
    dtype: str = "float32"  # of the gradients


def forms(quick: bool = False) -> dict[str, Form]:
    """Lists the forms by name, the most used first."""
    powersgd = partial(jaxcomp.powersgd, axis_name=AXIS, start_step=0, min_compression_rate=0.0)
    quantized = jaxcomp.quantized_allreduce(axis_name=AXIS)
    every = {
        "rank 4": Form(powersgd(4)),
        "rank 32": Form(powersgd(32)),
        "rank 128": Form(powersgd(128)),
        "rank 32, int6": Form(powersgd(32, comm_dtype="int6"), INT6),
        "gradients in bfloat16": Form(powersgd(4), BFLOAT16, "bfloat16"),
        "allreduce": Form(jaxcomp.allreduce(axis_name=AXIS)),
    }
    if quick:
        return every
    return every | {
        "rank 1": Form(powersgd(1)),
        "rank 2": Form(powersgd(2)),
        "rank 8": Form(powersgd(8)),
        "start_step 2": Form(powersgd(4, start_step=2)),
        "no warm start": Form(powersgd(4, warm_start=False)),
        "no error feedback": Form(powersgd(4, error_feedback=False)),
        "eps 1e-8": Form(powersgd(4, eps=1e-8)),
        "sent in bfloat16": Form(powersgd(4, comm_dtype="bfloat16"), BFLOAT16),
        "sent in int8": Form(powersgd(4, comm_dtype="int8"), INT8),
        "sent in int6": Form(powersgd(4, comm_dtype="int6"), INT6),
        "residual in bfloat16": Form(powersgd(4, residual_dtype="bfloat16"), BFLOAT16),
        "int8 all-reduce": Form(quantized, INT8),
        "error feedback of int8": Form(jaxcomp.error_feedback(quantized), INT8),
    }


def gradients(kind: str, seed: int, small: bool) -> dict[str, np.ndarray]:
    """Draws gradients, also hard ones: zeros, of rank one, at both ends of float32."""
    rng = np.random.default_rng(seed)
    grads = {}
    for name, shape in SHAPES.items():
        x = rng.normal(size=np.minimum(shape, 24) if small else shape)
        if kind == "zero":
            x = np.zeros_like(x)
        elif kind == "collinear" and x.ndim > 1:
            x = np.broadcast_to(x[..., :1], x.shape)
        elif kind.startswith("1e"):
            x = x * float(kind)
        elif kind == "nan" and name == "twin":
            x[3, 4] = np.nan
        grads[name] = np.asarray(x, np.float32)
    return grads


def steps_on(device: Any, form: Form, small: bool) -> Iterator[tuple[str, list[Any], Any]]:
    """Yields, for each kind of gradients, the outputs of some steps and the final residual."""
    mesh = mesh_of([device])

    def loss(params: Any, grads: Any) -> Any:
        # Its gradient is what it is given.
        return sum(jnp.sum(params[name] * grads[name][0]) for name in params)

    averaged = jaxcomp.value_and_grad(loss, form.reducer, mesh=mesh)
    whole = jax.NamedSharding(mesh, jax.P())
    shapes = gradients("zero", 0, small)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, form.dtype), shapes)
    params = jax.device_put(params, whole)
    step = jax.jit(averaged)
    for kind in KINDS:
        state = averaged.init(params)
        outputs = []
        for seed in range(_STEPS):
            drawn = gradients(kind, seed, small)
            grads = jax.tree.map(lambda x: jnp.asarray(x[None], form.dtype), drawn)
            (_, means), state = step(state, params, jax.device_put(grads, whole))
            outputs.append(jax.device_get(means))
        kept = jax.device_get(jaxcomp.consolidate(state))
        yield kind, outputs, getattr(kept, "residual", None)


def apart(one: Any, other: Any, largest: float = 0.0) -> float:
    """Returns the largest difference of two trees, relative to their largest value.

    It is infinite if one tree has a NaN where the other has none.
    """
    worst = 0.0
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        both = np.array([first, second], np.float64)
        missing = np.isnan(both)
        if (missing[0] != missing[1]).any():
            return float("inf")
        both = np.nan_to_num(both)
        scale = max(np.abs(both).max(initial=0), largest)
        if scale:
            worst = max(worst, float(np.abs(both[0] - both[1]).max(initial=0) / scale))
    return worst


def compare(name: str, form: Form, small: bool) -> Run:
    """Compares a form on the first device with itself on the CPU, for every kind of gradients."""
    row: Run = {"kind": "form", "form": name, "allowed": form.allowed, "apart": {}}
    start = time.monotonic()
    try:
        here = steps_on(jax.devices()[0], form, small)
        on_cpu = steps_on(jax.devices("cpu")[-1], form, small)
        for (kind, outputs, residual), (_, expected, kept) in zip(here, on_cpu, strict=True):
            drawn = gradients(kind, 0, small)
            scale = max(float(np.nanmax(np.abs(x))) for x in drawn.values())
            # Of a gradient of low rank only rounding is left: compared with the gradient. What
            # four steps keep may be four times as far apart as what one step sends.
            kept_apart = apart(residual, kept, scale) / _STEPS
            row["apart"][kind] = max(apart(outputs, expected), kept_apart)
        row["right"] = max(row["apart"].values()) <= form.allowed
    except Exception as error:  # the next form may work
        row["right"] = False
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def rows(small: bool, quick: bool, devices: int) -> Iterator[Run]:
    """Yields a row for each form."""
    del devices
    for name, form in forms(quick).items():
        yield compare(name, form, small)
