"""Converts parameters and running statistics between a torch state dict and a Flax tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Unpack

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.tensors import is_tensor, tied, to_tensor
from torch_bridge._base.terminal import some, warn
from torch_bridge._pairing.evidence import Apply, Example
from torch_bridge._pairing.leaves import flatten_tree
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Model, Pairs, find_or_check_pairs, named, pairs_of
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
    r"""Fills a Flax tree with torch's parameters and, if the tree has them, running statistics.

    torch has two biases in an LSTM, an RNN and two gates of a GRU, and only uses their sum. Where
    Flax has one bias, it gets the sum. The outputs are the same. In training, the one bias moves
    half as fast as the sum of the two.

    Args:
      model: Torch state dict (or module): name -> tensor or array.
      like: The tree to fill: linen parameters, linen variables
        ``{'params': ..., 'batch_stats': ...}``, an ``nnx.State`` or an nnx module. Only its
        structure and shapes are used, so ``jax.eval_shape`` is enough.
      apply: ``apply(params, *inputs) -> outputs`` of the Flax model, as for `pair`.
      example: What `run_example` returns, or another example, as for `pair`. With `apply` and
        `example` the Flax model is run with likely pairs, and parameters that do not give torch's
        outputs are refused.
      pairs: The pairs that `pair` returned, instead of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      A tree of the structure of `like` with NumPy arrays in the dtype of `model` (bfloat16
      included). Leaves that no torch model has (random-number state, caches) come from `like`.

    Raises:
      CheckpointMismatch: Leaves are missing, unexpected, mis-shaped or ambiguous; the error lists
        all. Or the Flax model does not give torch's outputs.

    Warns:
      UserWarning: Leaves that no torch model has are only shapes in `like`, and stay so.

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
    pairing = find_or_check_pairs(model, like, pairs, options, apply, example)
    params = flatten_tree(like).with_leaves(leaves_from_torch(pairing.pairs, tensors))
    for doubt in doubts_of_values(params):
        warn(doubt)
    return params


def doubts_of_values(params: Any) -> Iterator[str]:
    """Yields a warning if leaves that torch does not have are shapes without values in `params`."""
    empty = leaves_without_values(params)
    if empty:
        yield (
            f"{some(empty)}: torch has no values for these leaves, and `like` has only their "
            "shapes. Fill them before you run the model: the random states of an nnx model (for "
            "dropout) with flax.nnx.reseed(model, default=0), which names each stream. Or pass a "
            "`like` that has values."
        )


def leaves_without_values(params: Any) -> list[str]:
    """Lists the paths of the leaves that torch does not have and that are only shapes."""
    tree = flatten_tree(params)
    empty = []
    for path, leaf in tree.leaves.items():
        if path not in tree.shapes and hasattr(leaf, "shape") and not hasattr(leaf, "__array__"):
            empty.append("/".join(path))
    return empty


def params_to_torch(params: Any, like: Model, *, pairs: Pairs | None = None) -> dict[str, Any]:
    """Fills a torch state dict with the parameters of a Flax tree, for ``load_state_dict``.

    Where torch has two biases and Flax has one, one bias gets the values and the other gets zeros.

    Args:
      params: Linen parameters or variables, ``nnx.State`` or nnx module.
      like: Torch state dict (or module) with the names and shapes to fill.
      pairs: The pairs that `pair` returned; None if `pair` needs no options.

    Returns:
      name -> value, in the order of `like` and the dtype of `params`: tensors where `like` has
      tensors, else NumPy arrays. Values that Flax does not have (``num_batches_tracked``, running
      statistics without a place in `params`, ignored tensors) come from `like`.

    Raises:
      CheckpointMismatch: Leaves are missing, unexpected, mis-shaped or ambiguous; the error lists
        all. Or two leaves differ that are one (tied) tensor in torch.

    Example:
      >>> import numpy as np
      >>> like = {"fc.weight": np.zeros((3, 2))}
      >>> params_to_torch({"fc": {"kernel": np.ones((2, 3))}}, like)["fc.weight"].shape
      (3, 2)
    """
    like = named(like)
    pairs = pairs_of(like, params, pairs)
    arrays = tensors_from_flax(pairs, flatten_tree(params).leaves)
    apart = []
    for name, first in tied(like).items():
        ours = arrays.get(name)
        other = arrays.get(first)
        if ours is None or other is None or ours is other:
            continue
        if not np.array_equal(ours, other, equal_nan=True):
            apart.append(f"{first} and {name}")
    if apart:  # load_state_dict would keep the last one
        raise CheckpointMismatch(
            "Leaves that Flax has trained apart are one (tied) tensor in torch. Tie them in Flax, "
            "or untie them in the torch model and pass that model's state_dict.",
            ambiguous=apart,
        )
    state = {}
    of_torch = {}
    for name, value in like.items():
        state[name] = arrays.get(name, value)
        if is_tensor(value):
            of_torch[name] = state[name]
    return state | as_tensors(of_torch)


def as_tensors(values: Mapping[str, Any], copied: Collection[int] = ()) -> dict[str, Any]:
    """Makes tensors of arrays. One array under two names becomes one tensor; tensors stay.

    Args:
      values: Arrays or tensors, by name.
      copied: ``id`` of the arrays to copy, because another object uses their memory.
    """
    made = {}
    tensors = {}
    for name, value in values.items():
        key = id(value)
        if key not in made:
            made[key] = value if is_tensor(value) else to_tensor(value, copy=key in copied)
        tensors[name] = made[key]
    return tensors
