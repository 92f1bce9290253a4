"""Checks everything that a conversion needs of a file, and collects all that is missing."""

from __future__ import annotations

import optax

import jaxcomp
from torch_bridge._base.errors import CheckpointMismatch, Problems
from torch_bridge._convert.optimizer_groups import ParamNames, read_entries
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint, loss_scale_of, refuse_missing_ranks
from torch_bridge._hook.infer import layout_of
from torch_bridge._pairing.leaves import MatrixDimsFn

_NO_MODEL = (
    "The file has no model (state_dict). Load it together with the model's file, "
    "load([model, optimizer]), or save one file with {'state_dict': model.state_dict(), "
    "'optimizer': optimizer.state_dict()}."
)


def reviewed_layout(
    checkpoint: Checkpoint,
    layout: BucketLayout | None,
    missing_ranks: str,
    param_names: ParamNames,
    problems: Problems,
) -> BucketLayout | None:
    """Returns the bucket layout, and collects what stops a conversion to any Flax model.

    What only the pairs of tensors and leaves can solve is not collected: which tensors are buffers
    or frozen.

    Args:
      checkpoint: The checkpoint.
      layout: The user's layout, or None.
      missing_ranks: As for `to_flax`.
      param_names: As for `to_flax`.
      problems: Gets the errors.
    """
    known = layout or checkpoint.layout
    if not checkpoint.model:
        with problems.about("the model"):
            raise CheckpointMismatch(_NO_MODEL)
    with problems.about("the hook"):
        reducer_of(checkpoint, "data", None)
    if checkpoint.powersgd:
        with problems.about("the errors of the other ranks"):
            refuse_missing_ranks(checkpoint, missing_ranks)
        with problems.about("the loss scale"):
            loss_scale_of(checkpoint)
        with problems.about("the bucket layout"):
            try:
                known = layout_of(checkpoint, layout, None)
            except CheckpointMismatch as error:
                if not error.mis_shaped:  # else a buffer may be the reason that no layout fits
                    raise
    if checkpoint.optimizer is not None and checkpoint.model:
        with problems.about("the optimizer"):
            read_entries(checkpoint.optimizer, checkpoint.model, param_names, None, known)
    return known


def reducer_of(
    checkpoint: Checkpoint, axis_name: str | tuple[str, ...], matrix_dims: MatrixDimsFn | None
) -> optax.GradientTransformation:
    """Returns the reducer that averages gradients as the torch job did.

    Raises:
      ValueError: The hook has no reducer.
    """
    hook = checkpoint.hook or ""
    if checkpoint.powersgd:
        kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0], hook=hook or None)
        return jaxcomp.powersgd(axis_name=axis_name, matrix_dims=matrix_dims, **kwargs)
    if not hook or "powerSGD" in hook:  # no hook: DDP's mean. No state: `doubts_of_absence` warns.
        return jaxcomp.allreduce(axis_name=axis_name)
    return reducer_from_torch(hook, axis_name=axis_name)
