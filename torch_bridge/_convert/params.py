"""Parameters and running statistics between a torch state dict and a Flax tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Unpack

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import is_tensor, tied, to_tensor
from torch_bridge._pairing.evidence import Apply, Example
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Model, Pairs, named, paired_for
from torch_bridge._pairing.pairs import leaves_from_torch, tensors_from_flax


def params_from_torch(
    model: Model,
    like: Any,
    *,
    apply: Apply | None = None,
    example: Example | None = None,
    pairs: Pairs | None = None,
    **options: Unpack[PairOptions],
) -> Any:
    r"""Fills a Flax tree with the parameters of torch, and running statistics if it has a place.

    Two biases that torch only ever adds (LSTM, RNN, two gates of a GRU) become their sum where Flax
    has one. The output is the same; in training the sum moves half as fast as the two together.

    Args:
      model: Torch state dict (or module): name -> tensor or array.
      like: The tree to fill: linen parameters, linen variables
        ``{'params': ..., 'batch_stats': ...}``, an ``nnx.State`` or an nnx module. Only its
        structure and shapes are used, so ``jax.eval_shape`` is enough.
      apply: ``apply(params, *inputs) -> outputs`` of the Flax model, as for `pair`.
      example: Inputs of the torch module, a tuple of arrays, and its outputs in evaluation mode.
        With both, what names and shapes leave open is tried, and what does not give torch's outputs
        is refused.
      pairs: What `pair` gave, in place of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      A tree of the structure of `like` with NumPy arrays in the dtype of `model` (bfloat16
      included). Leaves that no torch model has (random-number state, caches) are those of `like`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf. Or the Flax
        outputs are not torch's.

    Example:
        >>> import numpy as np
        >>> model = {"fc.weight": np.ones((3, 2), np.float32), "fc.bias": np.zeros(3, np.float32)}
        >>> like = {"out": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
        >>> inputs = np.ones((1, 2), np.float32)
        >>> outputs = inputs @ model["fc.weight"].T + model["fc.bias"]
        >>> def apply(params, x):
        ...     return x @ params["out"]["kernel"] + params["out"]["bias"]
        >>> params = params_from_torch(model, like, apply=apply, example=((inputs,), outputs))
        >>> params["out"]["kernel"].shape
        (2, 3)
    """
    tensors = named(model)
    paired = paired_for(model, like, pairs, options, apply, example)
    return flatten_tree(like).with_leaves(leaves_from_torch(paired.pairs, tensors))


def params_to_torch(params: Any, like: Model, *, pairs: Pairs | None = None) -> dict[str, Any]:
    """Fills a torch state dict with the parameters of a Flax tree, for ``load_state_dict``.

    Where torch has two biases for one of Flax, one of them gets the values and the other zeros.

    Args:
      params: Linen parameters or variables, ``nnx.State`` or nnx module.
      like: Torch state dict (or module) that says which names and shapes there are.
      pairs: What `pair` gave; None where it needs no options.

    Returns:
      name -> value, in the order of `like` and the dtype of `params`: tensors where `like` has
      tensors, else NumPy arrays. What Flax does not have (``num_batches_tracked``, running
      statistics that `params` has no place for, ignored tensors) is that of `like`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf. Or leaves
        differ that are one tensor in torch.

    Example:
      >>> import numpy as np
      >>> like = {"fc.weight": np.zeros((3, 2))}
      >>> params_to_torch({"fc": {"kernel": np.ones((2, 3))}}, like)["fc.weight"].shape
      (3, 2)
    """
    like = named(like)
    paired = paired_for(like, params, pairs)
    arrays = tensors_from_flax(paired.pairs, flatten_tree(params).leaves)
    apart = []
    for name, first in tied(like).items():
        ours, other = arrays.get(name), arrays.get(first)
        if ours is None or other is None or ours is other:
            continue
        if not np.array_equal(ours, other, equal_nan=True):
            apart.append(f"{first} and {name}")
    if apart:  # torch would take the last of them
        raise CheckpointMismatch(
            "Leaves that Flax has trained apart are one (tied) tensor in torch. Tie them in Flax, "
            "or untie them in the torch model and pass its state_dict.",
            ambiguous=apart,
        )
    state = dict(like) | {name: arrays[name] for name in like if name in arrays}
    of_torch = {name: state[name] for name, value in like.items() if is_tensor(value)}
    return state | as_tensors(of_torch)


def as_tensors(values: Mapping[str, Any], copied: Collection[int] = ()) -> dict[str, Any]:
    """Makes tensors of arrays. Arrays that are tied become one tensor; tensors stay as they are.

    Args:
      values: By name.
      copied: ``id`` of those that are somebody else's.
    """
    made = {}
    tensors = {}
    for name, value in values.items():
        key = id(value)
        if key not in made:
            made[key] = value if is_tensor(value) else to_tensor(value, copy=key in copied)
        tensors[name] = made[key]
    return tensors
