"""The optimizers behind a reducer, with the schedule that all these studies have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

MUON = 10.0  # its learning rate, times that of the parameters that Adam trains beside it
OPTIMIZERS = ("adamw", "muon", "sgd", "lion", "adafactor")


def schedule(steps: int, highest: float) -> optax.Schedule:
    """10% linear warm-up, and a cosine decay to 5% of the highest learning rate."""
    warm = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(0.0, highest, warm, max(2, steps), 0.05 * highest)


def optimizer(
    name: str, steps: int, rate: float, momentum: float | None = None
) -> optax.GradientTransformation:
    """Clipping and an optimizer with `schedule`.

    Args:
      name: Of `OPTIMIZERS`.
      steps: Length of the run.
      rate: The highest learning rate; of Muon that of the Adam beside it, and a tenth of its own.
      momentum: Decay of the first moment; None for Optax's default.
    """

    def given(key: str) -> dict[str, Any]:
        return {} if momentum is None else {key: momentum}

    decaying = schedule(steps, rate)
    each: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(decaying, weight_decay=0.01, **given("b1")),
        "muon": lambda: _muon(schedule(steps, MUON * rate), decaying, given("beta")),
        "sgd": lambda: optax.sgd(decaying, momentum=0.9 if momentum is None else momentum),
        "lion": lambda: optax.lion(decaying, weight_decay=0.01, **given("b1")),
        "adafactor": lambda: optax.adafactor(decaying, momentum=momentum),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), each[name]())


def _muon(
    muon: optax.Schedule, adam: optax.Schedule, given: dict[str, Any]
) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks; embeddings, output and norms go to Adam."""
    each: dict[Any, optax.GradientTransformation] = {
        "muon": optax.contrib.muon(muon, **given),
        "adam": optax.adam(adam, nesterov=True),
    }
    return optax.partition(each, _in_blocks)


def _in_blocks(params: Any) -> Any:
    def one(path: Any, leaf: Any) -> str:
        return "muon" if path[0].key.startswith("block") and leaf.ndim == 2 else "adam"

    return jax.tree_util.tree_map_with_path(one, params)
