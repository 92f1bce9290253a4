"""Finds out what each output of a gradient function is, by running a batch and its two halves.

`DataParallel.outputs` calls it, once and outside of `jax.jit`. A mean over the batch is the mean of
the halves' values. A sum is the sum of the halves' values. Rows are the rows of the first half
followed by those of the second. The table also shows outputs that are none of these, and outputs
whose kind this batch does not decide.

Comparing numbers needs a measure of rounding. The batch with its halves swapped has the same means
and sums, so what changes by swapping is rounding, unless it is a dependence on the order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcomp._base.leaves import in_words, is_key, leaf_name
from jaxcomp._base.stats import aligned
from jaxcomp._base.typing import AxisName, PyTree
from jaxcomp._mesh.collectives import axis_tuple
from jaxcomp._mesh.meshes import split_axis
from jaxcomp._training.on_mesh import only_replica
from jaxcomp._training.outputs import described, has_mean

# Rounding of a few dozen operations in float32, as a fraction of the largest value.
_ROUNDING = 64 * float(jnp.finfo(jnp.float32).eps)
# A larger dependence on the order of the examples is not rounding.
_MOST_ROUNDING = 0.02


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Holds the result for one output; a leaf of a tree."""

    word: str | int | None  # the entry for `aux`; None if no word fits
    remark: str = ""


def examined(
    function: Callable[[PyTree], PyTree],
    arrays: PyTree,
    specs: PyTree,
    axis_name: AxisName,
    weights: np.ndarray,
) -> PyTree:
    """Finds the word for each auxiliary output, and prints a table of all outputs.

    Args:
      function: A function of one replica's arguments that returns ``(value,)`` or
        ``(value, auxiliary)``.
      arrays: The arguments, with a whole batch.
      specs: The PartitionSpec of each array.
      axis_name: The axis or axes of the replicas.
      weights: The weight of each half of the batch in a mean.

    Returns:
      The tree for ``aux=``; None if there is no auxiliary output.

    Raises:
      ValueError: If the loss is not a mean over its examples.
    """
    # Run on one device, whatever mesh the arrays are on.
    arrays = jax.tree.map(_on_host, arrays)
    swapped_arrays = jax.tree.map(_swapped, arrays, specs)
    whole = _on_replicas(function, arrays, specs, axis_name, 1)
    swapped = _on_replicas(function, swapped_arrays, specs, axis_name, 1)
    halves = _on_replicas(function, arrays, specs, axis_name, 2)
    equal = jax.tree.map(_same, arrays, swapped_arrays)
    judge = functools.partial(_verdict, weights, not all(jax.tree.leaves(equal)))
    verdicts = jax.tree.map(judge, whole, swapped, halves)
    table = [("output", "type", "aux", "")]
    for (path, verdict), x in zip(
        jax.tree.leaves_with_path(verdicts), jax.tree.leaves(whole), strict=True
    ):
        name = leaf_name(path[1:])
        if len(table) == 1:
            name = "the loss"
        word = repr(verdict.word)
        if verdict.word is None:
            word = "-"
        table.append((name, described(x[0]), word, verdict.remark))
    print(aligned("<<<<", table))
    if verdicts[0].word == "sum":
        (loss,) = whole[0]
        first, second = halves[0]
        raise ValueError(
            f"The loss of a batch is {loss:.4g}, and of its halves {first:.4g} and {second:.4g}: "
            "it is a sum, or is divided by a constant, such as the size of the global batch. "
            "Divide by the number of examples that it is given, x.shape[0]."
        )
    if len(verdicts) == 1:
        return None
    words = jax.tree.map(lambda verdict: verdict.word, verdicts[1])
    print(f"aux={words!r}")
    return words


def _on_replicas(
    function: Callable[[PyTree], PyTree],
    arrays: PyTree,
    specs: PyTree,
    axis_name: AxisName,
    replicas: int,
) -> PyTree:
    """Runs a function on a batch that is split between `replicas`; returns NumPy arrays."""
    # All replicas lie along the first axis; the function may name the others too.
    first, *others = axis_tuple(axis_name)

    def parts(x: Any, spec: Any) -> Any:
        axis = split_axis(spec)
        if axis is None:
            return x
        return x.reshape(*x.shape[:axis], replicas, -1, *x.shape[axis + 1 :])

    in_axes = jax.tree.map(split_axis, specs)
    mapped = jax.vmap(only_replica(function, others), (in_axes,), 0, first, replicas)
    results = jax.jit(mapped)(jax.tree.map(parts, arrays, specs))
    return jax.tree.map(lambda x: np.asarray(in_words(x)), results)


def _swapped(x: Any, spec: Any) -> Any:
    """Swaps the halves of a batch."""
    axis = split_axis(spec)
    if axis is None:
        return x
    return jnp.roll(x, x.shape[axis] // 2, axis)


def _on_host(x: Any) -> Any:
    if is_key(x):  # NumPy has none
        return x
    if not getattr(x, "is_fully_addressable", True):  # other processes hold parts of it
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _same(x: Any, y: Any) -> bool:
    return np.array_equal(in_words(x), in_words(y))


def _verdict(
    weights: np.ndarray,
    distinct: bool,
    whole: np.ndarray,
    swapped: np.ndarray,
    halves: np.ndarray,
) -> Verdict:
    """Compares an output of the whole batch with those of the swapped batch and of the halves.

    Args:
      weights: The weight of each half in a mean.
      distinct: True if the halves have different examples.
      whole: The output of the whole batch.
      swapped: That of the batch with its halves swapped.
      halves: Those of both halves.
    """
    averages = has_mean(whole)
    precision = _ROUNDING
    if averages:
        precision = max(precision, 2 * float(jnp.finfo(whole.dtype).eps))  # of a 16-bit output
    wide: Any = np.float64
    if np.iscomplexobj(whole):
        wide = np.complex128
    (whole,) = whole.astype(wide)
    (swapped,) = swapped.astype(wide)
    first, second = halves.astype(wide)
    scale = max(map(_largest, (whole, first, second)))
    if not np.isfinite(scale):
        return Verdict(None, "not finite in this batch: take another one")
    rounding = precision * scale
    if whole.shape != first.shape:
        return _of_rows(whole, first, second, rounding)
    by_order = _largest(whole - swapped)
    if by_order > _MOST_ROUNDING * scale:
        return Verdict(None, "neither: depends on the order of the examples, or is drawn at random")
    apart = _largest(first - second)
    if by_order > rounding and by_order > apart / 4:
        # A value of one place in the batch, or a mean in 16 bits: swapping moves both as much as
        # the halves differ.
        return Verdict(
            None,
            "changes with the order of the examples as much as between the halves: take a batch "
            "whose halves differ more, or say it yourself",
        )
    # Two orders are a small sample of the rounding of sums, so with a margin.
    rounding += 4 * by_order
    expected = {
        "mean": np.average((first, second), axis=0, weights=weights),
        "sum": first + second,
        "larger": np.maximum(first, second),
        "smaller": np.minimum(first, second),
    }
    misses = {kind: _largest(whole - value) for kind, value in expected.items()}
    # Equal values decide nothing between a mean and a maximum, but a floating output that is the
    # same for different examples is averaged without harm.
    constant = distinct and apart == 0 and averages and precision == _ROUNDING
    if constant and misses["mean"] <= rounding < scale:
        return Verdict("mean", "the same in both halves")
    # A mean in 16 bits may be off by rounding, but the larger or smaller value is exact.
    tolerances = {"mean": rounding, "sum": rounding, "larger": 0, "smaller": 0}
    fitting = [kind for kind, miss in misses.items() if miss <= tolerances[kind]]
    # Equal halves tell no mean from a nonlinear function of one.
    undecided = len(fitting) > 1 or (fitting == ["mean"] and not distinct)
    if undecided:
        remark = f"{' or '.join(fitting)} of both halves: take another batch, or say it yourself"
        if not scale:
            remark = (
                "zero in the batch and in both halves, which fits every word: take parameters "
                "after some steps or another batch, or say it yourself"
            )
        if apart == 0 and not averages:
            remark += '; "mean" keeps what is always the same, as a counter or a key'
        return Verdict(None, remark)
    if fitting == ["sum"]:
        return Verdict("sum")
    if fitting == ["mean"] and averages:  # an integer would be rounded
        # A nonlinear function of a mean, such as exp(loss), differs from a mean by about this.
        if apart**2 / 8 > rounding * scale:
            return Verdict("mean")
        return Verdict("mean", f"as far as halves that differ by {apart / scale:.1g} show")
    nearest = min(misses, key=misses.__getitem__)
    remedy = '"stack" it, or return what it is made of'
    # Without weights a mean over unequal counts is near the mean of the halves, but not equal.
    if nearest == "mean" and weights[0] == weights[1]:
        remedy = f"If it is a mean over a count, such as tokens, pass weight=; else {remedy}"
    return Verdict(
        None,
        f"neither: nearest is the {nearest} of both halves, {misses[nearest] / scale:.1g} of the "
        f"largest value off. {remedy}",
    )


def _of_rows(whole: np.ndarray, first: np.ndarray, second: np.ndarray, rounding: float) -> Verdict:
    """Finds the axis of rows in an output whose shape grows with the batch."""
    for axis in range(whole.ndim):
        joined = np.concatenate([first, second], axis)
        if joined.shape != whole.shape:  # another axis grows with the batch
            continue
        if _largest(whole - joined) <= rounding:
            return Verdict(axis or "join", f"rows along axis {axis}")
        if _largest(np.sort(whole, axis=None) - np.sort(joined, axis=None)) <= rounding:
            return Verdict(
                None,
                "neither: the rows in another order. Return them in that of the batch, parts that "
                "lie one behind the other as outputs of their own",
            )
        return Verdict(None, f"neither: rows along axis {axis} that depend on other examples")
    return Verdict(None, f"neither: {first.shape} of each half became {whole.shape}")


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))
