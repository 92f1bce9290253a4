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
from torch_bridge._base.terminal import printable
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._convert.optimizer_from_torch import Filler, ParamNames, optimizer_plan
from torch_bridge._convert.optimizer_groups import steps_taken, trained_names
from torch_bridge._convert.params import paired_whole, params_from_torch
from torch_bridge._convert.powersgd_from_torch import powersgd_from_torch
from torch_bridge._convert.source import layout_name
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
      step: Steps taken so far: the calls of the hook, or what Adam counted where there is none.

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
    step: int | None = None,
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
      layout: As for `powersgd_from_torch`. What is in no bucket gets no gradient in torch, and is
        frozen here, whether the optimizer was given it or not.
      missing_ranks: As for `powersgd_from_torch`.
      matrix_dims: How leaves become matrices. None: as jaxcomp does by default, or as torch does
        where the two cut a leaf apart.
      learning_rate: As for `optimizer_from_torch`: a schedule is not in the file.
      param_names: As for `optimizer_from_torch`; an optimizer that was given the trainable
        parameters alone needs none, since they are in the layout.
      consume: Empty `checkpoint` part by part, so that nothing is in memory twice.
      step: Updates taken so far, where a schedule goes on; None for Adam's own count, and for the
        hook's with SGD, which counts none. The hook counts every reduction since its state was
        made, which differs with gradient accumulation.
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

    Warns:
      UserWarning: As `powersgd_from_torch`. Or the optimizer has leaves that are in no bucket of
        DDP, with state, which are frozen; or leaves without state where others have some, and no
        layout says whether they are frozen. Or a schedule goes on at Adam's count, and the hook
        has another.

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
    if step is None:
        _say_where_a_schedule_goes_on(checkpoint, learning_rate)
    updates = _updates(checkpoint) if step is None else step
    links = _links(
        checkpoint,
        chosen,
        found,
        axis_name,
        layout,
        matrix_dims,
        param_names,
        learning_rate,
        updates,
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
    for tx, filler in links[1:]:
        _say_what_is_frozen(filler, checkpoint, layout)
        states.append(filler.fill(tx.init(chosen)))
    if consume:
        checkpoint.model.clear()
        (checkpoint.optimizer or {}).clear()
    taken = _step(checkpoint) if step is None else step
    return FlaxRun(params, _chained(links), tuple(states), taken)


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
    step: int = 0,
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
        layout = layout or checkpoint.layout
        if param_names is None:
            param_names = trained_names(checkpoint.optimizer, checkpoint.model, layout)
        links.append(
            optimizer_plan(
                checkpoint.optimizer,
                checkpoint.model,
                params,
                pairings,
                param_names,
                learning_rate,
                step=step,
                frozen=_frozen(checkpoint, layout, pairings),
            )
        )
    return links


def _frozen(
    checkpoint: Checkpoint, layout: BucketLayout | None, pairings: Sequence[Pairing]
) -> set[str]:
    """Torch parameters that DDP has in no bucket, as they get no gradient."""
    if layout is None or not layout.names:  # none of them: written before compression began
        return set()
    known, aliases = layout.entries, checkpoint.aliases
    return {p.torch_name for p in pairings if layout_name(p, known, aliases) is None}


def _say_what_is_frozen(
    filler: Filler, checkpoint: Checkpoint, layout: BucketLayout | None
) -> None:
    """Warns where the optimizer and the buckets disagree, or the file leaves it open."""
    held = filler.paused("held")
    if held:
        warnings.warn(
            f"{printable(', '.join(held))}: the optimizer has them and DDP's buckets do not, so "
            "that they get no gradient. They are frozen here too; their state is kept.",
            stacklevel=3,
        )
    # An inferred layout is accepted only where every parameter is in a bucket.
    layout = layout or checkpoint.layout
    said = (layout and layout.names) or any(record.buckets for record in checkpoint.powersgd)
    waiting = filler.paused("waiting")
    if waiting and not said:
        warnings.warn(
            f"{printable(', '.join(waiting))}: never used, or frozen; the file does not say which, "
            "and the optimizer has no state for them. They are trained as soon as they get a "
            "gradient. To freeze them pass layout=BucketLayout.from_order([names], "
            "checkpoint.model), with the names of what is trained.",
            stacklevel=3,
        )


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
    """Steps of the run so far."""
    return checkpoint.powersgd[0].iter if checkpoint.powersgd else _updates(checkpoint)


def _updates(checkpoint: Checkpoint) -> int:
    """Updates so far. The hook counts reductions, and from 0 again with a fresh state."""
    hook = checkpoint.powersgd[0].iter if checkpoint.powersgd else 0
    return steps_taken(checkpoint.optimizer) or hook


def _say_where_a_schedule_goes_on(
    checkpoint: Checkpoint,
    learning_rate: optax.ScalarOrSchedule | Sequence[optax.ScalarOrSchedule] | None,
) -> None:
    """Warns where the hook would have it go on elsewhere."""
    rates = learning_rate if isinstance(learning_rate, Sequence) else [learning_rate]
    counted = steps_taken(checkpoint.optimizer)
    hook = checkpoint.powersgd[0].iter if checkpoint.powersgd else counted
    if counted not in (0, hook) and any(map(callable, rates)):
        warnings.warn(
            f"Adam has counted {counted} steps and the hook {hook}, as with gradient accumulation, "
            f"skipped steps or a fresh hook state; the schedule goes on at {counted}. Pass step= "
            "to say where.",
            stacklevel=3,
        )


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
