"""Finds out what each output of a gradient function is: a batch runs beside its two halves.

A mean of the whole batch is the mean of the halves' values, a sum their sum, and rows are those of
the first half, then those of the second. What is none of these over the examples is said to be so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp._base.leaves import leaf_name
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._training.arguments import split_axis
from jaxcomp._training.outputs import line_to_write

# Rounding of a few dozen operations in float32, as a share of the largest value.
_ROUNDING = 64 * float(jnp.finfo(jnp.float32).eps)
# What depends on the order of the examples by more than this is not rounding.
_MOST_ROUNDING = 0.02
# An average that misses by no more than this is worth naming as the nearest one.
_NEAR = 0.1


class Runs(NamedTuple):
    """Value and auxiliary output of one small batch, as NumPy arrays."""

    whole: PyTree
    swapped: PyTree  # of the whole batch with its halves exchanged
    halves: PyTree  # with an axis of two in front
    shares: tuple[float, float]  # how much each half counts in a mean


class Verdict(NamedTuple):
    """What one output is."""

    word: str | int | None  # for `aux`; None where none fits
    remark: str


def run_batch_and_halves(
    function: Callable[[PyTree], PyTree],
    arrays: PyTree,
    specs: PyTree,
    shares: tuple[float, float],
    axis_name: AxisName,
) -> Runs:
    """Runs a function of one replica's arguments on a batch and on its halves.

    Args:
      function: From arrays to ``value`` or ``(value, auxiliary)``.
      arrays: Its arguments.
      specs: How each of them is split.
      shares: How much each half counts.
      axis_name: Of the replicas: one of them has the whole batch; of two each has a half.
    """
    first, *others = axis_tuple(axis_name)
    for name in others:  # a replica may ask for its index along each axis
        function = _with_axis(function, name)

    def half(x: Any, spec: Any) -> Any:
        axis = split_axis(spec)
        return x if axis is None else jnp.stack(jnp.split(jnp.asarray(x), 2, axis))

    def swap(x: Any, spec: Any) -> Any:
        axis = split_axis(spec)
        return x if axis is None else jnp.roll(x, x.shape[axis] // 2, axis)

    # On one device, whatever mesh the arrays lie on.
    arrays = jax.tree.map(_on_host, arrays)
    in_axes = jax.tree.map(lambda spec: None if split_axis(spec) is None else 0, specs)
    alone = jax.jit(_with_axis(function, first))
    both = jax.jit(jax.vmap(function, in_axes=(in_axes,), axis_name=first))
    runs = (
        alone(arrays),
        alone(jax.tree.map(swap, arrays, specs)),
        both(jax.tree.map(half, arrays, specs)),
    )
    whole, swapped, halves = (jax.tree.map(_to_numpy, run) for run in runs)
    return Runs(whole, swapped, halves, shares)


def _on_host(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x if is_key or not getattr(x, "is_fully_addressable", True) else np.asarray(x)


def _with_axis(function: Callable[[PyTree], PyTree], name: str) -> Callable[[PyTree], PyTree]:
    """Returns the function of a single replica along one more axis."""

    def run(arrays: PyTree) -> PyTree:
        outputs = jax.vmap(lambda _: function(arrays), axis_name=name)(jnp.zeros(1))
        return jax.tree.map(lambda x: x[0], outputs)

    return run


def _to_numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def verdicts_of(runs: Runs) -> list[Verdict]:
    """Says what each leaf of value and auxiliary output is."""
    verdicts: list[Verdict] = []
    wholes = jax.tree.leaves(runs.whole)
    swapped_wholes = jax.tree.leaves(runs.swapped)
    both_halves = jax.tree.leaves(runs.halves)
    for whole, swapped, halves in zip(wholes, swapped_wholes, both_halves, strict=True):
        verdicts.append(_verdict(whole, swapped, halves[0], halves[1], runs.shares))
    return verdicts


def _verdict(
    whole: np.ndarray,
    swapped: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    shares: tuple[float, float],
) -> Verdict:
    floating = jnp.issubdtype(whole.dtype, jnp.floating)
    precision = float(jnp.finfo(whole.dtype).eps) if floating else 0.0
    whole = whole.astype(np.float64)
    swapped = swapped.astype(np.float64)
    first = first.astype(np.float64)
    second = second.astype(np.float64)
    if not np.isfinite(_largest(whole) + _largest(first) + _largest(second)):
        return Verdict(None, "not finite in this batch: take another one")
    scale = max(_largest(whole), _largest(first), _largest(second))
    rounding = max(_ROUNDING, 2 * precision) * scale
    if whole.shape != first.shape:
        return _of_rows(whole, first, second, rounding)
    by_order = _largest(whole - swapped)
    if by_order > _MOST_ROUNDING * scale:
        return Verdict(None, "neither: depends on the order of the examples, or is drawn at random")
    if scale == 0 and whole.size:
        return Verdict(None, "0 in both halves: take another batch, or say it yourself")
    mean = (shares[0] * first + shares[1] * second) / sum(shares)
    misses = {"mean": _largest(whole - mean), "sum": _largest(whole - (first + second))}
    rounding += 4 * by_order
    if max(misses.values()) <= rounding and whole.size:
        return Verdict(None, "0 in the whole batch: take another one, or say it yourself")
    if misses["sum"] <= rounding and whole.size:
        if not (_largest(first) and _largest(second)):
            # So is the larger of both, a norm, or whether any example is so.
            return Verdict(None, "0 in one half: take another batch, or say it yourself")
        return Verdict("sum", "")
    if misses["mean"] <= rounding:
        return _of_a_mean(first, second, rounding, scale, floating=floating)
    return _of_neither(whole, first, second, misses, rounding, scale)


def _of_a_mean(
    first: np.ndarray, second: np.ndarray, rounding: float, scale: float, *, floating: bool
) -> Verdict:
    """Says how sure it is that a value is a mean."""
    if np.array_equal(first, second):
        if not floating:
            remark = 'the same in both halves: take another batch, or "stack" it'
            return Verdict(None, remark)
        return Verdict("mean", "the same in both halves")
    if not floating:
        return Verdict(None, 'neither: a mean of integers. "stack" it, or return a float')
    apart = _largest(first - second) / scale
    # By so much a curved function of a mean misses, as exp(loss).
    if apart**2 / 8 * scale <= rounding:
        return Verdict("mean", f"as far as halves that differ by {apart:.1g} show")
    return Verdict("mean", "")


def _of_neither(
    whole: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    misses: dict[str, float],
    rounding: float,
    scale: float,
) -> Verdict:
    """Says what comes nearest to a value that is neither mean nor sum."""
    for name, extreme in (("larger", np.maximum), ("smaller", np.minimum)):
        if _largest(whole - extreme(first, second)) <= rounding:
            return Verdict(None, f'neither: the {name} of both. "stack" it, take that of all')
    nearest = min(misses, key=lambda word: misses[word])
    if misses[nearest] <= _NEAR * scale:
        off = misses[nearest] / scale
        return Verdict(None, f'neither: nearest is "{nearest}", {off:.1g} of the largest value off')
    return Verdict(None, 'neither: "stack" it, or return what it is made of')


def _of_rows(whole: np.ndarray, first: np.ndarray, second: np.ndarray, rounding: float) -> Verdict:
    """Judges what grows with the batch."""
    growing = [axis for axis in range(whole.ndim) if whole.shape[axis] != first.shape[axis]]
    if len(growing) != 1 or whole.shape[growing[0]] != 2 * first.shape[growing[0]]:
        return Verdict(None, f"neither: {first.shape} of each half became {whole.shape}")
    axis = growing[0]
    joined = np.concatenate([first, second], axis)
    if _largest(whole - joined) <= rounding:
        return Verdict("join" if axis == 0 else axis, f"rows along axis {axis}")
    same_values = np.sort(whole, axis=None) - np.sort(joined, axis=None)
    if _largest(same_values) <= rounding:
        return Verdict(
            None,
            "neither: the rows in another order. Return them in that of the batch, parts that lie "
            "one behind the other as outputs of their own",
        )
    return Verdict(None, f"neither: rows along axis {axis} that depend on other examples")


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def table_of(runs: Runs, verdicts: list[Verdict]) -> str:
    """Returns a line for each output, the loss first, and the line to write."""
    paths = jax.tree_util.tree_flatten_with_path(runs.whole)[0]
    lines = [("output", "type", "aux", "")]
    for (path, leaf), verdict in zip(paths, verdicts, strict=True):
        # Behind the index of the pair (value, auxiliary).
        name = leaf_name(path[1:]) if len(path) > 1 or (path and path[0].idx) else "the loss"
        kind = f"{leaf.dtype.name}{list(leaf.shape)}"
        word = "-" if verdict.word is None else repr(verdict.word)
        lines.append((name, kind, word, verdict.remark))
    names, kinds, words, _ = zip(*lines, strict=True)
    first = max(map(len, names))
    second = max(map(len, kinds))
    third = max(map(len, words))
    rows: list[str] = []
    for name, kind, word, remark in lines:
        row = f"{name:<{first}}  {kind:<{second}}  {word:<{third}}  {remark}"
        rows.append(row.rstrip())
    if isinstance(runs.whole, tuple):
        choices = [verdict.word for verdict in verdicts[1:]]
        rows.append(line_to_write(choices, runs.whole[1]))
    return "\n".join(rows)


def check_loss_is_mean(runs: Runs, verdict: Verdict) -> None:
    """Refuses a loss that is not the mean of the examples that it is given.

    Raises:
      ValueError: If the halves have half the value each.
    """
    if verdict.word != "sum":
        return
    whole = jax.tree.leaves(runs.whole)[0]
    first, second = jax.tree.leaves(runs.halves)[0]
    raise ValueError(
        f"The loss of a batch is {whole:.4g}, and of its halves {first:.4g} and {second:.4g}: it "
        "is a sum, or divides by a constant, as the size of the global batch. Divide by the number "
        "of examples that it is given, x.shape[0]."
    )
