"""The optimizers behind a reducer, with the schedule of all these studies."""

from __future__ import annotations

from typing import Any

import jax
import optax

OPTIMIZERS = ("adamw", "muon", "sgd", "lion", "adafactor")
_MUON = 10.0  # its learning rate, times that of the parameters that Adam trains beside it
# What each calls the decay of its first moment, where that is not `momentum`.
_MOMENTUM = {"adamw": "b1", "lion": "b1", "muon": "beta"}


def schedule(steps: int, highest: float) -> optax.Schedule:
    """Returns the rates: 10% linear warm-up, and a cosine decay to 5% of the highest rate."""
    warm = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(0.0, highest, warm, max(2, steps), 0.05 * highest)


def optimizer(
    name: str, steps: int, rate: float, momentum: float | None = None
) -> optax.GradientTransformation:
    """Makes clipping and an optimizer with `schedule`; its state holds the highest rate.

    Args:
      name: A name in `OPTIMIZERS`.
      steps: The number of steps in the run.
      rate: The highest learning rate; for Muon the rate of its Adam, a tenth of Muon's own.
      momentum: The decay of the first moment; None for Optax's default, and 0.9 for SGD.
    """
    decaying = schedule(steps, 1.0)
    options: dict[str, Any] = {}
    if momentum is not None:
        options[_MOMENTUM.get(name, "momentum")] = momentum
    if name == "muon":
        # For the matrices of the blocks; embeddings, output and norms go to Adam.
        each: dict[Any, optax.GradientTransformation] = {
            "muon": optax.contrib.muon(schedule(steps, _MUON), **options),
            "adam": optax.adam(decaying, nesterov=True),
        }
        made = optax.partition(each, _in_blocks)
    elif name == "sgd":
        made = optax.sgd(decaying, options.get("momentum", 0.9))
    elif name == "adafactor":
        made = optax.adafactor(decaying, **options)
    else:
        made = getattr(optax, name)(decaying, weight_decay=0.01, **options)
    # One compiled program serves all rates.
    scaled = optax.inject_hyperparams(optax.scale)(step_size=rate)
    return optax.chain(optax.clip_by_global_norm(1.0), made, scaled)


def _in_blocks(params: Any) -> Any:
    def one(path: Any, leaf: Any) -> str:
        return "muon" if path[0].key.startswith("block") and leaf.ndim == 2 else "adam"

    return jax.tree_util.tree_map_with_path(one, params)
