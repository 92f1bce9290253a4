"""Finds out what each output of a gradient function is: a batch runs beside its two halves.

A mean of the whole batch is the mean of the halves' values, a sum their sum, and rows are those of
the first half, then those of the second. What is none of these over the examples, or what this
batch does not tell from another kind, is said to be so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._training.arguments import split_axis
from jaxcomp._training.on_mesh import only_replica

# Rounding of a few dozen operations in float32, as a share of the largest value.
_ROUNDING = 64 * float(jnp.finfo(jnp.float32).eps)
# What depends on the order of the examples by more than this is not rounding.
_MOST_ROUNDING = 0.02


class Runs(NamedTuple):
    """Value and auxiliary output of one small batch, as NumPy arrays."""

    whole: PyTree
    swapped: PyTree  # of the whole batch with its halves exchanged
    halves: PyTree  # with an axis of two in front


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is found of one output; a leaf of a tree."""

    word: str | int | None  # for `aux`; None where none fits
    remark: str = ""


def run_batch_and_halves(
    function: Callable[[PyTree], PyTree], arrays: PyTree, specs: PyTree, axis_name: AxisName
) -> Runs:
    """Runs a function of one replica's arguments on a batch and on its halves.

    Args:
      function: From arrays to ``(value,)`` or ``(value, auxiliary)``.
      arrays: Its arguments.
      specs: How each of them is split.
      axis_name: The axis of the replicas. One replica has the whole batch; each of two has a half.
    """
    first, *others = axis_tuple(axis_name)

    def half(x: Any, spec: Any) -> Any:
        axis = split_axis(spec)
        return x if axis is None else jnp.stack(jnp.split(jnp.asarray(x), 2, axis))

    def swap(x: Any, spec: Any) -> Any:
        axis = split_axis(spec)
        return x if axis is None else jnp.roll(x, x.shape[axis] // 2, axis)

    # On one device, whatever mesh the arrays lie on.
    arrays = jax.tree.map(_on_host, arrays)
    in_axes = jax.tree.map(lambda spec: None if split_axis(spec) is None else 0, specs)
    alone = jax.jit(only_replica(function, (first, *others)))
    both = jax.vmap(only_replica(function, others), in_axes=(in_axes,), axis_name=first)
    runs = Runs(
        alone(arrays),
        alone(jax.tree.map(swap, arrays, specs)),
        jax.jit(both)(jax.tree.map(half, arrays, specs)),
    )
    return jax.tree.map(_to_numpy, runs)


def _on_host(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if is_key or not getattr(x, "is_fully_addressable", True):
        return x
    return np.asarray(x)


def _to_numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def verdicts_of(runs: Runs, shares: tuple[float, float]) -> PyTree:
    """Judges each leaf of value and auxiliary output; a half counts by its share in a mean."""
    return jax.tree.map(functools.partial(_verdict, shares), *runs)


def _verdict(
    shares: tuple[float, float], whole: np.ndarray, swapped: np.ndarray, halves: np.ndarray
) -> Verdict:
    floating = jnp.issubdtype(whole.dtype, jnp.floating)
    precision = _ROUNDING
    if floating:
        precision = max(precision, 2 * float(jnp.finfo(whole.dtype).eps))
    whole = whole.astype(np.float64)
    first, second = halves.astype(np.float64)
    scale = max(map(_largest, (whole, first, second)))
    rounding = precision * scale
    if not np.isfinite(scale):
        return Verdict(None, "not finite in this batch: take another one")
    if whole.shape != first.shape:
        return _of_rows(whole, first, second, rounding)
    by_order = _largest(whole - swapped.astype(np.float64))
    if by_order > _MOST_ROUNDING * scale:
        return Verdict(None, "neither: depends on the order of the examples, or is drawn at random")
    rounding += 4 * by_order
    apart = _largest(first - second)
    expected = {
        "mean": (shares[0] * first + shares[1] * second) / sum(shares),
        "sum": first + second,
        "larger": np.maximum(first, second),
        "smaller": np.minimum(first, second),
    }
    misses = {kind: _largest(whole - value) for kind, value in expected.items()}
    if floating and precision == _ROUNDING and apart == 0 and misses["mean"] <= rounding < scale:
        return Verdict("mean", "the same in both halves")
    fitting = [kind for kind in ("mean", "sum") if misses[kind] <= rounding]
    # A mean that is rounded to 16 bits may come as near, but one of two numbers is not rounded.
    fitting += [kind for kind in ("larger", "smaller") if misses[kind] == 0]
    if len(fitting) > 1:
        alike = " or ".join(fitting)
        return Verdict(None, f"{alike} of both halves: take another batch, or say it yourself")
    if fitting == ["sum"]:
        return Verdict("sum")
    if fitting == ["mean"] and floating:
        # By so much a curved function of a mean misses, as exp(loss).
        if apart**2 / 8 > rounding * scale:
            return Verdict("mean")
        return Verdict("mean", f"as far as halves that differ by {apart / scale:.1g} show")
    for kind in ("larger", "smaller"):
        if misses[kind] <= rounding:
            return Verdict(None, f'neither: the {kind} of both. "stack" it, and take that of all')
    miss, nearest = min((misses[kind], kind) for kind in ("mean", "sum"))
    off = f'nearest is "{nearest}", {miss / scale:.1g} of the largest value off'
    return Verdict(None, f'neither: {off}. "stack" it, or return what it is made of')


def _of_rows(whole: np.ndarray, first: np.ndarray, second: np.ndarray, rounding: float) -> Verdict:
    """Judges what grows with the batch."""
    for axis in range(whole.ndim):
        joined = np.concatenate([first, second], axis)
        if joined.shape == whole.shape:
            break
    else:
        return Verdict(None, f"neither: {first.shape} of each half became {whole.shape}")
    if _largest(whole - joined) <= rounding:
        return Verdict(axis or "join", f"rows along axis {axis}")
    if _largest(np.sort(whole, axis=None) - np.sort(joined, axis=None)) <= rounding:
        return Verdict(
            None,
            "neither: the rows in another order. Return them in that of the batch, parts that lie "
            "one behind the other as outputs of their own",
        )
    return Verdict(None, f"neither: rows along axis {axis} that depend on other examples")


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def table_of(runs: Runs, verdicts: PyTree) -> str:
    """Returns a line for each output, the loss first, and the line to write."""
    table = [("output", "type", "aux", "")]
    leaves = jax.tree_util.tree_leaves_with_path(runs.whole)
    for (path, leaf), verdict in zip(leaves, jax.tree.leaves(verdicts), strict=True):
        name = "the loss"
        if path[0].idx:  # of the pair (value, auxiliary)
            name = leaf_name(path[1:])
        word = "-"
        if verdict.word is not None:
            word = repr(verdict.word)
        table.append((name, f"{leaf.dtype.name}{list(leaf.shape)}", word, verdict.remark))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines: list[str] = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def check_loss_is_mean(runs: Runs, verdicts: PyTree) -> None:
    """Refuses a loss that is not the mean of the examples that it is given.

    Raises:
      ValueError: If the halves have half the value each.
    """
    if jax.tree.leaves(verdicts)[0].word != "sum":
        return
    whole = jax.tree.leaves(runs.whole)[0]
    first, second = jax.tree.leaves(runs.halves)[0]
    raise ValueError(
        f"The loss of a batch is {whole:.4g}, and of its halves {first:.4g} and {second:.4g}: it "
        "is a sum, or divides by a constant, as the size of the global batch. Divide by the number "
        "of examples that it is given, x.shape[0]."
    )
