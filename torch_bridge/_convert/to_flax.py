"""`to_flax`: a whole torch run in JAX, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
import optax

import jaxcomp
from jaxcomp.extend import plan_leaves
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._convert.optimizer_from_torch import ParamNames, optimizer_plan
from torch_bridge._convert.optimizer_groups import trained_names
from torch_bridge._convert.params import paired_whole, params_from_torch
from torch_bridge._convert.powersgd_from_torch import powersgd_from_torch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint, checked
from torch_bridge._pairing.leaves import flatten, trained
from torch_bridge._pairing.matrix_dims import MatrixDimsFn, matrix_dims_of
from torch_bridge._pairing.pair import PairOptions, Rules, paired
from torch_bridge._pairing.pairing import Pairing


class FlaxRun(NamedTuple):
    """A training run as `to_flax` hands it over.

    Attributes:
      params: A tree of the structure of `like`, running statistics included.
      transformation: The complete ``optax.chain(reducer, optimizer)``.
      opt_state: Its state, consolidated; the tree of ``transformation.init(params)``, where linen
        variables and an ``nnx.State`` with statistics give the parameters only.
      step: Steps taken so far.

    Example:
      >>> run = FlaxRun({}, optax.identity(), optax.EmptyState(), 20)
      >>> params, transformation, opt_state, step = run
    """

    params: Any
    transformation: optax.GradientTransformation
    opt_state: Any
    step: int


def to_flax(
    checkpoint: Checkpoint,
    like: Any,
    *,
    axis_name: str | tuple[str, ...] = "data",
    layout: BucketLayout | None = None,
    missing_ranks: str = "error",
    matrix_dims: MatrixDimsFn | None = None,
    learning_rate: optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None = None,
    param_names: ParamNames = None,
    consume: bool = False,
    rules: Rules = (),
    pairings: Sequence[Pairing] | None = None,
    **options: Unpack[PairOptions],
) -> FlaxRun:
    """A torch checkpoint as parameters, Optax transformation, its state and the step.

    The reducer is `jaxcomp.powersgd` with the arguments of the file, or `jaxcomp.allreduce` where
    the file has no state of PowerSGD; the optimizer is left out where the file has none.

    Args:
      checkpoint: What `load` read.
      like: The Flax tree to fill, of which only structure and shapes are used: linen parameters,
        linen variables, an ``nnx.State`` or an nnx module.
      axis_name: The mapped axis (or axes) along which the replicas lie.
      layout: As for `powersgd_from_torch`.
      missing_ranks: As for `powersgd_from_torch`.
      matrix_dims: How leaves become matrices. None: as jaxcomp does by default, or as torch does
        where the two cut a leaf apart.
      learning_rate: As for `optimizer_from_torch`: a schedule is not in the file.
      param_names: As for `optimizer_from_torch`; an optimizer that was given the trainable
        parameters alone needs none, since they are in the layout.
      consume: Empty `checkpoint` part by part, so that nothing is in memory twice.
      rules: As for `params_from_torch`.
      pairings: What `pair` gave, in place of `rules` and `options`.
      **options: ``flatten``, ``unflatten`` and the other arguments of `pair`.

    Returns:
      The four parts, by name.

    Raises:
      ValueError: The optimizer has no equal in optax.
      CheckpointMismatch: As `params_from_torch` and `powersgd_from_torch`.
      TypeError: `checkpoint` is something else, or there is no such option.

    Warns:
      UserWarning: The optimizer seems to be elsewhere in the file, in `Checkpoint.extra`.

    Example:
      >>> checkpoint = Checkpoint({"fc.weight": np.ones((3, 2), np.float32)})
      >>> like = {"fc": {"kernel": jax.ShapeDtypeStruct((2, 3), np.float32)}}
      >>> params, transformation, opt_state, step = to_flax(checkpoint, like)
      >>> params["fc"]["kernel"].shape, step
      ((2, 3), 0)
      >>> jax.tree.structure(opt_state) == jax.tree.structure(transformation.init(params))
      True
    """
    model = _names(checked(checkpoint), layout)
    _warn_of_unread(checkpoint)
    found = paired_whole(model, like, pairings, rules, options)
    params = params_from_torch(checkpoint.model, like, pairings=found)
    chosen = trained(params)
    links = _links(
        checkpoint, chosen, found, axis_name, layout, matrix_dims, param_names, learning_rate
    )
    states: list[Any] = []
    if not checkpoint.powersgd:
        states.append(links[0][0].init(chosen))
    else:
        states.append(
            powersgd_from_torch(
                checkpoint,
                chosen,
                layout=layout,
                missing_ranks=missing_ranks,
                matrix_dims=links[0][1],
                pairings=found,
            )
        )
        if consume:
            for record in checkpoint.powersgd:
                record.error_dict.clear()
    states += [fill(tx.init(chosen)) for tx, fill in links[1:]]
    if consume:
        checkpoint.model.clear()
        (checkpoint.optimizer or {}).clear()
    return FlaxRun(params, _chained(links), tuple(states), _step(checkpoint))


def shapes_of_run(
    checkpoint: Checkpoint,
    like: Any,
    pairings: Sequence[Pairing],
    layout: BucketLayout | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    param_names: ParamNames = None,
) -> FlaxRun:
    """What `to_flax` would give, with arrays that have a shape and a dtype and take no memory."""
    leaves = {
        p.path: np.broadcast_to(np.zeros((), checkpoint.model[p.torch_name].dtype), p.shape)
        for p in pairings
    }
    params = flatten(like).replace(leaves)
    chosen = trained(params)
    links = _links(checkpoint, chosen, pairings, "data", layout, matrix_dims, param_names)
    shapes = jax.eval_shape(_chained(links).init, chosen)
    empty = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), shapes)
    return FlaxRun(params, _chained(links), empty, _step(checkpoint))


def _links(
    checkpoint: Checkpoint,
    params: Any,
    pairings: Sequence[Pairing],
    axis_name: str | tuple[str, ...],
    layout: BucketLayout | None,
    matrix_dims: MatrixDimsFn | None,
    param_names: ParamNames,
    learning_rate: optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None = None,
) -> list[tuple[optax.GradientTransformation, Any]]:
    """The reducer with its matrices, and the optimizer with what fills its state."""
    pairings = paired(checkpoint.model, params, pairings, (), {})
    if checkpoint.powersgd:
        kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0], hook=checkpoint.hook)
        matrix_dims = matrix_dims or cut_of_torch(params, pairings, kwargs)
        reducer = jaxcomp.powersgd(axis_name=axis_name, matrix_dims=matrix_dims, **kwargs)
    else:
        hook = checkpoint.hook  # None: what DDP does without one
        known = hook is not None and "powerSGD" not in hook
        reducer = reducer_from_torch(hook if known else "allreduce_hook", axis_name=axis_name)
    links: list[tuple[optax.GradientTransformation, Any]] = [(reducer, matrix_dims)]
    if checkpoint.optimizer is not None:
        if param_names is None:
            layout = layout or checkpoint.layout
            param_names = trained_names(checkpoint.optimizer, checkpoint.model, layout)
        links.append(
            optimizer_plan(
                checkpoint.optimizer,
                checkpoint.model,
                params,
                pairings,
                param_names,
                learning_rate,
                step=_step(checkpoint) or None,
            )
        )
    return links


def _chained(
    links: Sequence[tuple[optax.GradientTransformation, Any]],
) -> optax.GradientTransformation:
    return optax.chain(*(transformation for transformation, _ in links))


def _warn_of_unread(checkpoint: Checkpoint) -> None:
    """Without its optimizer a run would follow the plain gradient, and uphill."""
    if checkpoint.optimizer is None and (names := checkpoint.unread_optimizers):
        warnings.warn(
            f"The checkpoint has no optimizer where one is looked for, so that the chain has none; "
            f"checkpoint.extra[{names[0]!r}] looks like one, or a list of them. Go on from "
            f"dataclasses.replace(checkpoint, optimizer=...) with its state_dict.",
            stacklevel=3,
        )


def _step(checkpoint: Checkpoint) -> int:
    return checkpoint.powersgd[0].iter if checkpoint.powersgd else 0


def _names(checkpoint: Checkpoint, layout: BucketLayout | None) -> Mapping[str, Any]:
    layout = layout or checkpoint.layout
    return checkpoint.model or (layout.shapes() if layout else {})


def cut_of_torch(
    params: Any, pairings: Sequence[Pairing], kwargs: Mapping[str, Any]
) -> MatrixDimsFn | None:
    """Torch's matrices, where jaxcomp's default rule makes others of a leaf; else None."""
    wanted = matrix_dims_of([p for p in pairings if p.slot is None])
    arguments = (params, kwargs["rank"], kwargs["min_compression_rate"])
    for ours, theirs in zip(plan_leaves(*arguments), plan_leaves(*arguments, wanted), strict=True):
        one, other = ours.view, theirs.view
        if (one is None) != (other is None):
            return wanted
        if one is not None and other is not None:
            wide = {axis for axis, size in enumerate(ours.shape) if size > 1}
            if wide & set(one.dims.rows) != wide & set(other.dims.rows):
                return wanted
    return None
