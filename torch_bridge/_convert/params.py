"""Parameters and running statistics between a torch state dict and a Flax tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Unpack

from torch_bridge._base.tensors import is_tensor, to_tensor
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import leaves_from_torch, tensors_from_flax
from torch_bridge._pairing.questions import PairOptions


def params_from_torch(
    model: Model, like: Any, *, pairs: Pairs | None = None, **options: Unpack[PairOptions]
) -> Any:
    r"""A Flax tree with the parameters, and where it has a place the running statistics, of torch.

    Two biases that torch only ever adds (LSTM, RNN, two gates of a GRU) become their sum where Flax
    has one. The output is the same; in training the sum moves half as fast as the two together.

    Args:
      model: Torch state dict (or module): name -> tensor or array.
      like: The tree to fill: linen parameters, linen variables
        ``{'params': ..., 'batch_stats': ...}``, an ``nnx.State`` or an nnx module. Only its
        structure and shapes are used, so ``jax.eval_shape`` is enough.
      pairs: What `pair` gave, in place of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      A tree of the structure of `like` with NumPy arrays in the dtype of `model` (bfloat16
      included). Leaves that no torch model has (random-number state, caches) are those of `like`.

    Raises:
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf.

    Example:
        >>> import numpy as np
        >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
        >>> like = {"fc": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
        >>> params_from_torch(model, like)["fc"]["kernel"].shape
        (2, 3)
    """
    model = named(model)
    found = pairs_for(model, like, pairs, options)
    return flatten_tree(like).with_leaves(leaves_from_torch(found, model))


def params_to_torch(params: Any, like: Model, *, pairs: Pairs | None = None) -> dict[str, Any]:
    """A torch state dict with the parameters of a Flax tree, ready for ``load_state_dict``.

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
      CheckpointMismatch: With every missing, unexpected, mis-shaped and ambiguous leaf.

    Example:
      >>> import numpy as np
      >>> like = {"fc.weight": np.zeros((3, 2))}
      >>> params_to_torch({"fc": {"kernel": np.ones((2, 3))}}, like)["fc.weight"].shape
      (3, 2)
    """
    like = named(like)
    arrays = tensors_from_flax(pairs_for(like, params, pairs), flatten_tree(params).leaves)
    state = {name: arrays.get(name, value) for name, value in like.items()}
    return state | as_tensors({n: state[n] for n, value in like.items() if is_tensor(value)})


def as_tensors(values: Mapping[str, Any], copied: Collection[int] = ()) -> dict[str, Any]:
    """Arrays as tensors, of which tied ones stay one; tensors as they are.

    Args:
      values: By name.
      copied: ``id`` of those that are somebody else's.
    """
    made: dict[int, Any] = {}
    for value in values.values():
        if id(value) not in made:
            copy = id(value) in copied
            made[id(value)] = value if is_tensor(value) else to_tensor(value, copy=copy)
    return {name: made[id(value)] for name, value in values.items()}
