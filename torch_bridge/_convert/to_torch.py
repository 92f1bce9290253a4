"""`to_torch`: converts a whole JAX run to a file from which a torch job resumes, in one call."""

from __future__ import annotations

import copy
import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import optax

from jaxcomp import PowerSGDState
from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.framework import import_torch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.tensors import shape_of, to_tensor
from torch_bridge._base.terminal import some, warn
from torch_bridge._convert.optimizer import kept_moments, optimizer_to_torch
from torch_bridge._convert.optimizer_groups import ParamNames
from torch_bridge._convert.params import as_tensors, params_to_torch
from torch_bridge._convert.powersgd import record_of_state
from torch_bridge._convert.to_flax import FlaxRun, refuse_other_than_checkpoint
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.document import make_document
from torch_bridge._hook.infer import layout_of, named_layout
from torch_bridge._job.example import run_example
from torch_bridge._job.save import write_document
from torch_bridge._pairing.evidence import Apply, Evidence, Example
from torch_bridge._pairing.leaves import (
    MatrixDimsFn,
    flatten_tree,
    matrix_dims_of,
    trained,
    without_values,
)
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Pairs, find_or_check_pairs, pairs_in_tree


def to_torch(
    params: Any,
    opt_state: Any,
    like: Checkpoint | FlaxRun,
    *,
    apply: Apply | None = None,
    module: Any = None,
    path: str | os.PathLike[str] | None = None,
    layout: BucketLayout | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    param_names: ParamNames = None,
    pairs: Pairs | None = None,
    **options: Unpack[PairOptions],
) -> dict[str, Any]:
    """Converts a JAX run to a document from which a torch job resumes: the inverse of `to_flax`.

    The document has the format of `save_checkpoint`. ``torch.load(path, weights_only=True)`` reads
    it, with the entries ``state_dict`` and ``optimizer``. `load` and `resume_powersgd` restore the
    hook, on any number of ranks.

    Args:
      params: The Flax parameters; linen variables or an ``nnx.State`` if the model has running
        statistics.
      opt_state: The Optax state, consolidated (`jaxcomp.consolidate`), of all parameters, of the
        trained parameters or of whole variables. Parts that torch does not keep are ignored.
      like: The run that `to_flax` returned, which has all that you passed to `to_flax`. Or the
        torch checkpoint that the run came from; then pass `pairs` or `options`, `layout`,
        `matrix_dims` and `param_names` as you passed them to `to_flax`. Names, hyperparameters,
        the random number generator and everything else that Flax does not keep come from `like`
        unchanged. So a learning rate scheduler does not know the steps that JAX took.
      apply: ``apply(params, *inputs) -> outputs`` of the Flax model, as for `to_flax`. It runs on
        the example in `like` with the parameters in `like`, to pair tensors and leaves or to check
        `pairs`. With `pairs` you can leave it out; without an example in `like` it then does not
        run.
      module: The torch module that will load the document. A copy of it loads the converted
        parameters and is run on the inputs of the example in `like`. Its outputs must be those of
        `apply` with `params`. `module` itself does not change.
      path: A file to write the document to, completely or not at all; an existing file is replaced.
      layout: The bucket layout; None means the layout of `like`.
      matrix_dims: As for `to_flax`.
      param_names: As for `to_flax`.
      pairs: The pairs that `pair` returned, or ``run.pairs`` of `to_flax`, instead of `options`.
        `params` must have every leaf in the pairs.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      The document: dictionaries of tensors and plain values.

    Raises:
      CheckpointMismatch: Parts do not fit `like`, or are missing; the error lists all. Or the
        outputs of `module` are not those of `apply`.
      ValueError: `module` is passed without `apply`, or `like` has no example. Or `like` is a run
        of ``to_flax(..., consume=True)``.
      OSError: The file cannot be written.

    Warns:
      UserWarning: `like` has no place for the state of PowerSGD or of the optimizer, or it holds
        values that ``torch.load(weights_only=True)`` does not read. These are left out.

    Example:
      >>> import numpy as np
      >>> like = Checkpoint({"fc.weight": np.ones((3, 2), np.float32)})
      >>> document = to_torch({"fc": {"kernel": np.zeros((2, 3), np.float32)}}, (), like)
      >>> document["state_dict"]["fc.weight"].shape
      torch.Size([3, 2])
    """
    if isinstance(like, FlaxRun):
        matrix_dims = matrix_dims or like.matrix_dims
        if pairs is None and not options:
            pairs = like.pairs
        if like.checkpoint is None:
            raise ValueError(
                "`like` is a run of to_flax(..., consume=True), which emptied its checkpoint. Read "
                "the file again: pass like=torch_bridge.load(...) and pairs=run.pairs."
            )
        like = like.checkpoint
    refuse_other_than_checkpoint(like, "like")
    import_torch()
    reducers, opt_state = _split(opt_state)
    if like.powersgd and len(reducers) != 1:
        raise CheckpointMismatch(
            f"`opt_state` must hold one jaxcomp.PowerSGDState, as the checkpoint does; it holds "
            f"{len(reducers)}. Pass the whole state of the optax.chain."
        )
    example = like.recorded_example if apply else None
    runner = apply
    if pairs is not None:
        _refuse_others(pairs, params, like.model)
        if example is None:
            runner = None  # a check is not needed
    pairs = find_or_check_pairs(like.model, params, pairs, options, runner, example).pairs
    if layout is None:
        layout = layout_of(like, None, pairs)
    else:  # any order will do, because the state is written anew
        layout = named_layout(layout, like.model)
    lost = []
    if reducers and not (like.powersgd or layout):
        lost.append("PowerSGD")
    if like.optimizer is None and kept_moments(opt_state):
        lost.append("the optimizer")
    if lost:
        warn(
            f"`like` has no place for the state of {' and '.join(lost)}, which is left out. Is it "
            "the checkpoint that the run came from?"
        )
    model = params_to_torch(params, like.model, pairs=pairs)
    model = as_tensors(model, set(map(id, like.model.values())))
    if module is not None:
        _refuse_other_outputs(module, model, params, apply, like.example)
    # Drops the parameters' values, which are not needed any more.
    params = without_values(params)
    ranks = ()
    if reducers and (like.powersgd or layout):
        trained_params = trained(params)
        trained_pairs = pairs_in_tree(trained_params, pairs)
        matrix_dims = matrix_dims or matrix_dims_of(trained_pairs)
        record = record_of_state(
            reducers.pop(0), trained_params, layout, like, matrix_dims, trained_pairs
        )
        for bucket, flat in record.error_dict.items():
            record.error_dict[bucket] = to_tensor(flat, copy=False)
        ranks = (record,) * (like.world_size or 1)  # every rank goes on from the mean error
    optimizer = like.optimizer
    if optimizer is not None:
        optimizer = optimizer_to_torch(
            opt_state,
            params,
            optimizer,
            like.model,
            pairs=pairs,
            param_names=param_names,
            layout=layout,
        )
    extra, lacking = plain_copy(like.extra)
    if lacking:
        warn(
            f"Entries of `like` that torch.load(weights_only=True) does not read are left out: "
            f"{some(lacking)}. Add them in torch."
        )
    converted = dataclasses.replace(
        like,
        model=model,
        powersgd=ranks,
        optimizer=optimizer,
        layout=layout,
        extra=extra,
        example=None,
    )
    document = make_document(converted)
    if path is not None:
        write_document(pathlib.Path(path), document)
    return document


def _refuse_others(pairs: Pairs, params: Any, model: Mapping[str, Any]) -> None:
    """Refuses a tree or a torch model that the pairs were not made for.

    Raises:
      CheckpointMismatch: A paired leaf is missing, and torch would keep its old value. Or tensors
        are missing or have other shapes. The error lists all.
    """
    leaves = flatten_tree(params).leaves
    lacking = {}  # the keys count in all three, because several pairs may have one tensor
    missing = {}
    wrong = {}
    for one in pairs:
        name = one.torch_name
        if one.path not in leaves:
            lacking["/".join(one.path)] = one
        if name not in model:
            missing[name] = one
        elif shape_of(model[name]) != one.torch_shape:
            wrong[f"{name} {shape_of(model[name])}, paired as {one.torch_shape}"] = one
    if lacking:
        raise CheckpointMismatch(
            "`params` lacks leaves that `pairs` names, and torch would keep their old values. Pass "
            "the whole tree that the pairs were made for: linen variables as {'params': ..., "
            "'batch_stats': ...}, an nnx module with its whole state.",
            missing=list(lacking),
            parameters=("pairs",),
        )
    if missing or wrong:
        raise CheckpointMismatch(
            "`like` is not the checkpoint that `pairs` were made for. Pass the one that the run "
            "came from.",
            missing=list(missing),
            mis_shaped=list(wrong),
            parameters=("like",),
        )


def _refuse_other_outputs(
    module: Any, model: dict[str, Any], params: Any, apply: Apply | None, example: Example | None
) -> None:
    """Runs both models on the example's inputs, and refuses outputs that differ.

    torch runs with the converted parameters, and Flax with `params`.

    Raises:
      ValueError: `apply` or the example is missing.
      CheckpointMismatch: The outputs differ by more than rounding.
    """
    if apply is None or example is None:
        raise ValueError(
            "`module` is compared with the Flax model on an example. Pass apply=, and a `like` "
            "with an example, which save_checkpoint(..., example=inputs) stores."
        )
    loaded = copy.deepcopy(module)
    loaded.load_state_dict(model)
    inputs, outputs, _ = run_example(loaded, list(map(to_tensor, example[0])))
    tree = flatten_tree(params)
    evidence = Evidence(apply, (inputs, outputs), tree, model)
    nearest = evidence.nearest(tree.leaves)
    if not nearest.is_rounding:
        raise CheckpointMismatch(
            f"The torch module, with what was converted, gives other outputs than the Flax model: "
            f"they are {nearest}. Is it the module that `like` was saved from?",
            parameters=("apply",),
        )


def _split(opt_state: Any) -> tuple[list[PowerSGDState], Any]:
    """Splits an Optax state into its states of PowerSGD and the rest."""
    reducers = []

    def take(node: Any) -> Any:
        if not isinstance(node, PowerSGDState):
            return node
        reducers.append(node)
        return optax.EmptyState()

    rest = jax.tree.map(take, opt_state, is_leaf=lambda node: isinstance(node, PowerSGDState))
    return reducers, rest
