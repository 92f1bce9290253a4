"""Why a rank costs more in a wider model and with a larger batch: the spectrum of the momentum."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from benchmarks.common.tables import markdown
from benchmarks.convergence.training import Config, after_a_quarter
from benchmarks.optimizers.settings import Setting, first_momentum

_RANK = 21
_HEADER = ["width", "tokens a step", "stable rank", "for 90%", f"beyond {_RANK}"]
_USUAL = Config()
_WIDTHS = {64: 2e-3, 128: 2e-3, 256: 1e-3, 512: 5e-4}  # learning rates, not searched for this
_SETTINGS = (
    *((replace(_USUAL, width=w, heads=w // 32), rate) for w, rate in _WIDTHS.items()),
    *((replace(_USUAL, batch_size=size), rate) for size, rate in ((1, 2e-3), (16, 4e-3))),
)


def table() -> str:
    """Of the kernels of the blocks, after a quarter of an exact run with AdamW, by their size.

    The stable rank is the sum of the squares of the singular values by the largest. How many
    directions carry 90% of that sum, and which share lies beyond the first 21.
    """
    rows = list[list[str]]()
    for config, rate in _SETTINGS:
        _, state = after_a_quarter(config, Setting("adamw", rate, 0.8).build(config))
        blocks = {k: v for k, v in first_momentum(state).items() if k.startswith("block")}
        kernels = [np.asarray(x) for x in jax.tree.leaves(blocks) if np.ndim(x) == 2]
        measured = [_spread(np.linalg.svd(x, compute_uv=False) ** 2) for x in kernels]
        stable, most, beyond = np.average(measured, 0, weights=[x.size for x in kernels])
        tokens = config.replicas * config.batch_size * config.context
        row = [f"{config.width}", f"{tokens:,}", f"{stable:.1f}", f"{most:.0f}", f"{beyond:.1%}"]
        rows.append(row)
    return markdown(_HEADER, rows)


def _spread(squares: np.ndarray) -> tuple[float, float, float]:
    shares = squares.cumsum() / squares.sum()
    return 1 / shares[0], 1.0 + np.searchsorted(shares, 0.9), 1 - shares[_RANK - 1]
