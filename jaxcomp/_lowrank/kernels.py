"""Pallas kernels for NVIDIA GPUs: what XLA does not fuse, for many leaves of one shape at once.

XLA writes the sum of gradient and residual before it multiplies, reads the old residual only to
keep it where a gradient is not finite, and launches a kernel for every leaf, or copies leaves into
a stack (`stacks`). Here the sum is written as it is multiplied, the old residual is not read in a
finite step, and all leaves of one shape are one launch, where they lie. Each leaf is an array of
matrices ``(batch, a, b)`` in memory order; `_lowrank` elsewhere has the same arithmetic in plain
JAX, which every other device runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxcomp._base.typing import Array
from jaxcomp._lowrank.cholesky_qr import inverse_factor
from jaxcomp._mesh.axes import alike

# Up to this rank a product is a sum of scaled columns, one accumulator for each; above, the GPU's
# matrix unit takes it, in tiles of at least 16.
_SCALED_COLUMNS_RANK = 8
# Accumulators of more columns do not fit into the registers.
MOST_COLUMNS = 128
# Programs that fill the largest GPU of today (132 multiprocessors) a few times over.
_PROGRAMS = 528
# Arguments of one launch: three arrays for each of so many leaves fit into the 4 kB that there are.
MOST_LEAVES = 32
# Three passes of TensorFloat-32 lose nothing that float32 would keep.
_EXACT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How the work on leaves ``(batch, free, contracted)`` is cut into programs."""

    free: int
    contracted: int
    tile_free: int
    tile_contracted: int
    splits: int  # of the contracted axis, each with a partial sum of its own

    @classmethod
    def of(cls, matrices: int, free: int, contracted: int, last: bool, rank: int) -> _Grid:
        """For a contraction over the last axis in memory, or the one before it."""
        if rank > _SCALED_COLUMNS_RANK:
            tile_free, tile_contracted = 64, 32
        else:
            tile_free, tile_contracted = (16, 128) if last else (64, 32)
        programs = matrices * pl.cdiv(free, tile_free)
        chunks = pl.cdiv(contracted, tile_contracted)
        splits = min(chunks, pl.cdiv(_PROGRAMS, programs))
        return cls(free, contracted, tile_free, tile_contracted, splits)

    @property
    def steps(self) -> int:
        """Tiles along the contracted axis that one program goes through."""
        return pl.cdiv(pl.cdiv(self.contracted, self.tile_contracted), self.splits)


@functools.partial(jax.jit, static_argnames=("contract_last", "interpret"))
def multiply(
    parts: Sequence[tuple[Array, ...]],
    factors: Array,
    *,
    contract_last: bool,
    scale: Array | None = None,
    interpret: bool = False,
) -> tuple[list[Array], Array]:
    """Each leaf times its factor; of a leaf in two parts the sum, which is written too.

    Args:
      parts: For every leaf ``(total,)`` or ``(gradient, residual)``, each ``(batch, a, b)``.
      factors: ``(leaves * batch, contracted, r)``, float32.
      contract_last: Whether the contracted axis is ``b`` or ``a``.
      scale: float32 scalar, by what the residual is multiplied as it is added.
      interpret: Run as plain JAX operations, on any device.

    Returns:
      The sums, in float32 and in the place of gradients that are, or nothing for leaves in one
      part; and the products ``(leaves * batch, free, r)``.
    """
    leaves, (batch, *shape) = len(parts), parts[0][0].shape
    rank, summed = factors.shape[-1], len(parts[0]) == 2
    contracted, free = shape[::-1] if contract_last else shape
    grid = _Grid.of(leaves * batch, free, contracted, contract_last, rank)
    arrays = [part[k] for k in range(len(parts[0])) for part in parts]
    scales = [jnp.reshape(jnp.asarray(scale, jnp.float32), (1,))] if summed else []
    arguments = alike([*arrays, factors, *scales])
    out_shapes = [((batch, *shape), jnp.float32)] * (leaves if summed else 0)
    out_shapes.append(((leaves * batch, grid.splits, free, rank), jnp.float32))

    def powersgd_multiply(*refs: Any) -> None:
        inputs, outputs = refs[: len(arguments)], refs[len(arguments) :]
        _multiply_body(inputs, outputs, leaves, batch, grid, contract_last, rank, interpret)

    in_place = summed and parts[0][0].dtype == jnp.float32
    *sums, product = _call(
        powersgd_multiply,
        arguments,
        out_shapes,
        grid=(pl.cdiv(free, grid.tile_free), grid.splits, leaves * batch),
        aliases={i: i for i in range(leaves)} if in_place else {},
        leaves=leaves,
        interpret=interpret,
    )
    return sums, product[:, 0] if grid.splits == 1 else product.sum(axis=1)


def _multiply_body(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    leaves: int,
    batch: int,
    grid: _Grid,
    contract_last: bool,
    rank: int,
    interpret: bool,
) -> None:
    summed = len(outputs) > 1
    matrix, split = pl.program_id(2), pl.program_id(1)
    leaf, item = matrix // batch, matrix % batch
    parts = inputs[:leaves], inputs[leaves : 2 * leaves] if summed else ()
    factor, product = inputs[2 * leaves if summed else leaves], outputs[-1]
    scale = inputs[-1][0] if summed else 1.0
    free = pl.program_id(0) * grid.tile_free + jnp.arange(grid.tile_free)
    columns = rank if rank <= _SCALED_COLUMNS_RANK else max(16, pl.next_power_of_2(rank))

    def step(i: Array, sums: Any) -> Any:
        start = (split * grid.steps + i) * grid.tile_contracted
        contracted = start + jnp.arange(grid.tile_contracted)
        rows, cols = (free, contracted) if contract_last else (contracted, free)
        sizes = (grid.free, grid.contracted)[:: 1 if contract_last else -1]
        inside = (rows < sizes[0])[:, None] & (cols < sizes[1])[None]
        at = _offsets(item, rows, cols, sizes)
        x = _tile(parts[0], leaf, at, inside)
        if summed:
            x += scale * _tile(parts[1], leaf, at, inside)
            _store(outputs[:leaves], leaf, at, inside, x)
        if rank <= _SCALED_COLUMNS_RANK:
            at = (matrix * grid.contracted + contracted) * rank
            found = [_load(factor, at + k, contracted < grid.contracted) for k in range(rank)]
            found = [f[None] if contract_last else f[:, None] for f in found]
            return tuple(total + x * f for total, f in zip(sums, found, strict=True))
        ranks = jnp.arange(columns)
        mask = (contracted < grid.contracted)[:, None] & (ranks < rank)[None]
        at = (matrix * grid.contracted + contracted)[:, None] * rank + ranks[None]
        f = _load(factor, at, mask)
        return sums + _dot(x if contract_last else x.T, f, interpret)

    if rank <= _SCALED_COLUMNS_RANK:
        tile = (grid.tile_free, grid.tile_contracted)[:: 1 if contract_last else -1]
        sums = lax.fori_loop(0, grid.steps, step, (jnp.zeros(tile, jnp.float32),) * rank)
        for k, total in enumerate(sums):
            column = total.sum(axis=1 if contract_last else 0)
            at = ((matrix * grid.splits + split) * grid.free + free) * rank + k
            _put(product, at, column, free < grid.free)
        return
    start = jnp.zeros((grid.tile_free, columns), jnp.float32)
    total = lax.fori_loop(0, grid.steps, step, start)
    ranks = jnp.arange(columns)
    mask = (free < grid.free)[:, None] & (ranks < rank)[None]
    at = ((matrix * grid.splits + split) * grid.free + free)[:, None] * rank + ranks[None]
    _put(product, at, total, mask)


@functools.partial(jax.jit, static_argnames=("leaves", "dtype", "interpret"))
def outer(
    first: Array,
    second: Array,
    leaves: int,
    dtype: Any,
    *,
    interpret: bool = False,
) -> list[Array]:
    """``A B^T`` for each of so many leaves, from factors ``(leaves * batch, a or b, r)``.

    Returns:
      Arrays ``(batch, a, b)``.
    """
    batch, sizes = first.shape[0] // leaves, (first.shape[1], second.shape[1])
    rank = first.shape[-1]
    tiles = _outer_tiles(rank)

    def powersgd_outer(first: Any, second: Any, *outputs: Any) -> None:
        matrix, rows, cols, inside = _position(tiles, sizes)
        product = _outer_tile(first, second, matrix, rows, cols, sizes, rank, interpret)
        at = _offsets(matrix % batch, rows, cols, sizes)
        _store(outputs, matrix // batch, at, inside, product)

    return _call(
        powersgd_outer,
        alike([first, second]),
        [((batch, *sizes), dtype)] * leaves,
        grid=_outer_grid(tiles, sizes, leaves * batch),
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames="interpret")
def unsent(
    totals: Sequence[Array],
    olds: Sequence[Array],
    first: Array,
    second: Array,
    commit: Array,
    kept: Array | None,
    *,
    interpret: bool = False,
) -> list[Array]:
    """``total - A B^T + kept * old`` in the place of `olds`, or these unless `commit`.

    Args:
      totals: Arrays ``(batch, a, b)``, float32.
      olds: Arrays of these shapes and any floating dtype.
      first: ``(leaves * batch, a, r)``, float32.
      second: ``(leaves * batch, b, r)``.
      commit: Bool scalar.
      kept: Scalar; None for 0.
      interpret: Run as plain JAX operations, on any device.

    Returns:
      Arrays of the shapes and dtypes of `olds`.
    """
    leaves, (batch, *sizes) = len(totals), totals[0].shape
    rank, dtype = first.shape[-1], olds[0].dtype
    tiles = _outer_tiles(rank)
    share = 0.0 if kept is None else kept
    flags = jnp.stack([commit.astype(jnp.float32), jnp.asarray(share, jnp.float32)])
    arguments = alike([*totals, *olds, first, second, flags])

    def body(*refs: Any) -> None:
        totals, olds, rest = refs[:leaves], refs[leaves : 2 * leaves], refs[2 * leaves :]
        first, second, flags, *news = rest
        matrix, rows, cols, inside = _position(tiles, sizes)
        leaf, at = matrix // batch, _offsets(matrix % batch, rows, cols, sizes)
        commit, kept = flags[0] > 0, flags[1]
        lost = _tile(totals, leaf, at, inside)
        lost -= _outer_tile(first, second, matrix, rows, cols, sizes, rank, interpret)
        # Read where it is needed only, which spares a seventh of all traffic.
        wanted = inside & ~(commit & (kept == 0))
        old = _tile(olds, leaf, at, wanted)
        new = jnp.where(commit, (lost + kept * old).astype(dtype), old.astype(dtype))
        _store(news, leaf, at, inside, new)

    # benchmarks/gpu_program reads off the name which operands a finite step does not read.
    body.__name__ = f"powersgd_unsent_unread_{leaves}_{2 * leaves}" if kept is None else "unsent"
    return _call(
        body,
        arguments,
        [((batch, *sizes), dtype)] * leaves,
        grid=_outer_grid(tiles, sizes, leaves * batch),
        aliases={leaves + i: i for i in range(leaves)},
        leaves=leaves,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames="interpret")
def inverse_factors(
    gram: Array, lost_below: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """`cholesky_qr.inverse_factors` of float32 matrices, all of them in one launch."""
    number, rank, _ = gram.shape
    padded = pl.next_power_of_2(rank)
    arguments = alike([gram, jnp.reshape(lost_below, (1,))])

    def powersgd_inverse_factors(gram: Any, lost_below: Any, inverse: Any, lost: Any) -> None:
        matrix, index = pl.program_id(0), jnp.arange(padded)
        at = (matrix * rank + index)[:, None] * rank + index[None]
        inside = (index < rank)[:, None] & (index < rank)[None]
        # Rows of the identity beside those that there are.
        unit = (index[:, None] == index[None]).astype(jnp.float32)
        given = jnp.where(inside, _load(gram, at, inside), unit)
        found, flags = inverse_factor(given, lost_below[0])
        _put(inverse, at, found, inside)
        _put(lost, matrix * rank + index, flags.astype(jnp.float32), index < rank)

    inverse, lost = _call(
        powersgd_inverse_factors,
        arguments,
        [(gram.shape, jnp.float32), ((number, rank), jnp.float32)],
        grid=(number,),
        # Two matrices that stay in registers.
        warps=max(1, min(16, padded * padded // 1024)),
        interpret=interpret,
    )
    return inverse, lost > 0


@functools.partial(jax.jit, static_argnames=("sizes", "interpret"))
def separate(flat: Array, sizes: tuple[int, ...], *, interpret: bool = False) -> list[Array]:
    """Pieces of a flat vector that follow each other, each copied to an array of its own."""
    ends = list(itertools.accumulate(sizes))
    tile = min(1024, pl.next_power_of_2(max(sizes)))

    def powersgd_separate(flat: Any, *outputs: Any) -> None:
        index = pl.program_id(0) * tile + jnp.arange(tile)
        for i, (ref, end, size) in enumerate(zip(outputs, ends, sizes, strict=True)):

            def copy(ref: Any = ref, start: int = end - size, size: int = size) -> None:
                _put(ref, index, _load(flat, start + index, index < size), index < size)

            pl.when(pl.program_id(1) == i)(copy)

    return _call(
        powersgd_separate,
        [flat],
        [((size,), flat.dtype) for size in sizes],
        grid=(pl.cdiv(max(sizes), tile), len(sizes)),
        interpret=interpret,
    )


def _call(
    body: Callable[..., None],
    arguments: Sequence[Array],
    out_shapes: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: tuple[int, ...],
    aliases: dict[int, int] | None = None,
    warps: int = 4,
    leaves: int = 1,
    interpret: bool,
) -> list[Array]:
    # Not at the top: importing it registers a dialect, and nothing but these kernels needs it.
    from jax.experimental.pallas import triton

    kind = getattr(jax.typeof(arguments[0]), "manual_axis_type", None)
    typed = {} if kind is None else {"manual_axis_type": kind}
    flat = [jax.ShapeDtypeStruct((math.prod(x),), dtype, **typed) for x, dtype in out_shapes]
    results = pl.pallas_call(
        body,
        grid=grid,
        out_shape=flat,
        input_output_aliases=aliases or {},
        # Triton would load ahead for every leaf, whichever it is, and have no shared memory left.
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1 if leaves > 1 else 3),
        interpret=interpret,
    )(*(x.reshape(-1) for x in arguments))
    return [x.reshape(shape) for x, (shape, _) in zip(results, out_shapes, strict=True)]


def _load(ref: Any, at: Array, mask: Array) -> Array:
    from jax.experimental.pallas import triton

    return triton.load(ref.at[at], mask=mask, other=0.0)


def _put(ref: Any, at: Array, value: Array, mask: Array) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref.at[at], value.astype(ref.dtype), mask=mask)


def _offsets(item: Array, rows: Array, cols: Array, sizes: Sequence[int]) -> Array:
    """Where the values of a tile lie in a leaf ``(batch, *sizes)``."""
    return (item * sizes[0] + rows)[:, None] * sizes[1] + cols[None]


def _tile(refs: Sequence[Any], leaf: Array, at: Array, mask: Array) -> Array:
    """A tile of one of several leaves, in float32; zeros where `mask` is not set."""
    branches = [functools.partial(_load, ref, at, mask) for ref in refs]
    value = branches[0]() if len(refs) == 1 else lax.switch(leaf, branches)
    return value.astype(jnp.float32)


def _store(refs: Sequence[Any], leaf: Array, at: Array, mask: Array, value: Array) -> None:
    for i, ref in enumerate(refs):
        store = functools.partial(_put, ref, at, value, mask)
        if len(refs) == 1:
            store()
        else:
            pl.when(leaf == i)(store)


def _dot(a: Array, b: Array, interpret: bool) -> Array:
    precision = lax.Precision.HIGHEST if interpret else _EXACT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _outer_tiles(rank: int) -> tuple[int, int]:
    return (16, 128) if rank <= _SCALED_COLUMNS_RANK else (64, 64)


def _outer_grid(
    tiles: tuple[int, int], sizes: Sequence[int], matrices: int
) -> tuple[int, int, int]:
    return pl.cdiv(sizes[1], tiles[1]), pl.cdiv(sizes[0], tiles[0]), matrices


def _position(tiles: tuple[int, int], sizes: Sequence[int]) -> tuple[Array, Array, Array, Array]:
    """Which matrix, and which rows and columns of it, with a mask for those that there are."""
    rows = pl.program_id(1) * tiles[0] + jnp.arange(tiles[0])
    cols = pl.program_id(0) * tiles[1] + jnp.arange(tiles[1])
    return pl.program_id(2), rows, cols, (rows < sizes[0])[:, None] & (cols < sizes[1])[None]


def _outer_tile(
    first: Any,
    second: Any,
    matrix: Array,
    rows: Array,
    cols: Array,
    sizes: Sequence[int],
    rank: int,
    interpret: bool,
) -> Array:
    total = jnp.zeros((rows.size, cols.size), jnp.float32)
    starts = (matrix * sizes[0] + rows) * rank, (matrix * sizes[1] + cols) * rank
    inside = rows < sizes[0], cols < sizes[1]
    if rank <= _SCALED_COLUMNS_RANK:
        for k in range(rank):
            a, b = (
                _load(*x)
                for x in zip((first, second), (x + k for x in starts), inside, strict=True)
            )
            total += a[:, None] * b[None]
        return total
    width = 32 if rank > 16 else 16

    def step(i: Array, total: Array) -> Array:
        ranks = i * width + jnp.arange(width)
        used = ranks < rank
        a = _load(first, starts[0][:, None] + ranks[None], inside[0][:, None] & used[None])
        b = _load(second, starts[1][None] + ranks[:, None], used[:, None] & inside[1][None])
        return total + _dot(a, b, interpret)

    return lax.fori_loop(0, pl.cdiv(rank, width), step, total)
