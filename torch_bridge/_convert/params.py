"""Parameters and running statistics between a torch state dict and a Flax tree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.names import clean_names
from torch_bridge._base.tensors import is_tensor, shape_of, to_tensor
from torch_bridge._pairing.leaves import flatten as flatten_tree
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Model, Pairs, named, pairs_for
from torch_bridge._pairing.pairs import Pair


def leaves_from_torch(
    pairs: Pairs, tensors: Mapping[str, Any], *, mean: bool = False
) -> dict[tuple[str, ...], np.ndarray]:
    """The Flax leaves that a set of torch tensors gives, by path.

    Args:
      pairs: As `pair` found them.
      tensors: Name -> tensor, of the shapes of the pairs.
      mean: Where several tensors are one leaf (the two biases of an LSTM), take their mean, as is
        right for gradients and what is made of them, instead of their sum.

    Raises:
      CheckpointMismatch: If a tensor is missing, or holds values that Flax has no place for.
    """
    missing = sorted({p.torch_name for p in pairs} - tensors.keys())
    if missing:
        raise CheckpointMismatch("Tensors of the torch model are not there.", missing=missing)
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    for pair in pairs:
        part = pair.to_flax(tensors[pair.torch_name])
        if pair.must_be_zero and not mean and np.any(part):
            raise CheckpointMismatch(
                f"{pair.torch_name} has a hidden bias for the gate n, which flax.nnx.GRUCell "
                "does not have. Use flax.linen.GRUCell, or set these values to zero in torch."
            )
        if mean and pair.terms > 1:
            part = part / np.asarray(pair.terms, part.dtype)
        if pair.columns is None and pair.terms == 1:
            leaves[pair.path] = part
            continue
        leaf = leaves.setdefault(pair.path, np.zeros(pair.shape, part.dtype))
        leaf[(..., slice(*pair.columns)) if pair.columns else ...] += part
    return leaves


def tensors_from_flax(
    pairs: Pairs, leaves: Mapping[tuple[str, ...], Any], *, mean: bool = False
) -> dict[str, np.ndarray]:
    """The torch tensors that a set of Flax leaves gives, by name, aliases included.

    Args:
      pairs: As `pair` found them.
      leaves: Path -> leaf.
      mean: Every tensor of a sum gets the leaf, the inverse of `leaves_from_torch` with
        ``mean=True``. Without it the first one gets the values and the others get zeros.
    """
    tensors: dict[str, np.ndarray] = {}
    for pair in pairs:
        part = pair.to_torch(pair.take(leaves[pair.path]))
        if not (pair.carries or mean):
            part = np.zeros_like(part)
        if pair.rows is None:
            tensors[pair.torch_name] = part
        else:
            whole = tensors.get(pair.torch_name)
            if whole is None:
                whole = tensors[pair.torch_name] = np.zeros(pair.torch_shape, part.dtype)
            whole[slice(*pair.rows)] = part
    for pair in pairs:
        for alias in pair.aliases:
            tensors[alias] = tensors[pair.torch_name]
    return tensors


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
        >>> model = {"fc.weight": np.ones((3, 2)), "fc.bias": np.zeros(3)}
        >>> like = {"fc": {"kernel": np.empty((2, 3)), "bias": np.empty(3)}}
        >>> params_from_torch(model, like)["fc"]["kernel"].shape
        (2, 3)
    """
    model = named(model)
    found = pairs_of_whole(model, like, pairs, options)
    return flatten_tree(like).replace(leaves_from_torch(found, model))


def pairs_of_whole(
    model: Mapping[str, Any], like: Any, pairs: Pairs | None, options: PairOptions
) -> tuple[Pair, ...]:
    """`pairs_for` what converts a whole model, and must not leave running statistics behind."""
    found = pairs_for(model, like, pairs, **options)
    if pairs is None:
        refuse_lost_statistics(model, like, options.get("ignore"))
    return found


def refuse_lost_statistics(model: Mapping[str, Any], like: Any, ignore: str | None) -> None:
    """Refuse a Flax tree without a place for the running statistics of a torch model.

    Raises:
      CheckpointMismatch: They would be lost on the way to JAX, or stale on the way back.
    """
    if flatten_tree(like).has_statistics:
        return
    homeless = [
        f"{name} {shape_of(model[name])}"
        for name, clean in clean_names(list(model)).items()
        if clean.endswith(("running_mean", "running_var"))
        and not (ignore and re.fullmatch(ignore, clean))
    ]
    if homeless:
        raise CheckpointMismatch(
            "The Flax tree has no place for running statistics. Pass linen variables with "
            "'batch_stats' (or an nnx.State with BatchStat), or ignore=r'.*running_(mean|var)'.",
            unexpected=homeless,
            parameters=("ignore",),
        )


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
      >>> like = {"fc.weight": np.zeros((3, 2))}
      >>> params_to_torch({"fc": {"kernel": np.ones((2, 3))}}, like)["fc.weight"].shape
      (3, 2)
    """
    like = named(like)
    tree = flatten_tree(params)
    leaves = dict(zip(tree.paths, tree.values, strict=True))
    arrays = tensors_from_flax(pairs_for(like, params, pairs), leaves)
    converted: dict[int, Any] = {}
    state = {}
    for name, value in like.items():
        array = arrays.get(name)
        if array is None:
            state[name] = value
        elif not is_tensor(value):
            state[name] = array
        else:  # tied tensors stay one tensor
            if id(array) not in converted:
                converted[id(array)] = to_tensor(array, copy=False)
            state[name] = converted[id(array)]
    return state
