"""`to_flax`: a whole torch run in JAX, in one call."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
import optax

import jaxcomp
from jaxcomp.extend import plan_leaves
from torch_bridge._base.terminal import printable
from torch_bridge._convert.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._convert.optimizer_from_torch import Filler, ParamNames, Rates, optimizer_plan
from torch_bridge._convert.optimizer_groups import steps_taken, trained_names
from torch_bridge._convert.powersgd_from_torch import powersgd_from_torch
from torch_bridge._convert.source import layout_name
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._pairing.leaves import flatten, trained
from torch_bridge._pairing.matrix_dims import MatrixDimsFn, matrix_dims_of
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Pairs, pairs_of, pairs_of_whole
from torch_bridge._pairing.pairs import leaves_from_torch


@dataclasses.dataclass(frozen=True)
class FlaxRun:
    """A training run as `to_flax` hands it over.

    ``params, transformation, opt_state, step = run`` unpacks it. Whatever the torch loop did
    between ``backward()`` and ``step()``, such as clipping, goes between the two parts:
    ``optax.chain(run.reducer, optax.clip_by_global_norm(1.0), run.optimizer)`` with the state
    ``(run.reducer_state, optax.EmptyState(), run.optimizer_state)``.

    Attributes:
      params: A tree of the structure of `like`, running statistics included.
      reducer: What averages the gradients.
      reducer_state: Its state, consolidated.
      optimizer: The optimizer, None where the file has none.
      optimizer_state: Its state. Both states are as ``init(params)`` makes them, where linen
        variables and an ``nnx.State`` with statistics give the parameters only.
      step: Steps taken so far: the calls of the hook, or what Adam counted where there is none.

    Example:
      >>> run = FlaxRun({}, optax.identity(), optax.EmptyState(), None, None, 20)
      >>> params, transformation, opt_state, step = run
    """

    params: Any
    reducer: optax.GradientTransformation
    reducer_state: Any
    optimizer: optax.GradientTransformation | None
    optimizer_state: Any
    step: int

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The complete ``optax.chain(reducer, optimizer)``."""
        links = [self.reducer] if self.optimizer is None else [self.reducer, self.optimizer]
        return optax.chain(*links)

    @property
    def opt_state(self) -> tuple[Any, ...]:
        """Its state."""
        reducer = (self.reducer_state,)
        return reducer if self.optimizer is None else (*reducer, self.optimizer_state)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.params, self.transformation, self.opt_state, self.step))


def to_flax(
    checkpoint: Checkpoint,
    like: Any,
    *,
    axis_name: str | tuple[str, ...] = "data",
    layout: BucketLayout | None = None,
    missing_ranks: str = "error",
    matrix_dims: MatrixDimsFn | None = None,
    learning_rate: Rates = None,
    param_names: ParamNames = None,
    consume: bool = False,
    step: int | None = None,
    pairs: Pairs | None = None,
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
      pairs: What `pair` gave, in place of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      The run.

    Raises:
      ValueError: The optimizer has no equal in optax.
      CheckpointMismatch: As `pair` and `powersgd_from_torch`.
      TypeError: `checkpoint` is something else, or there is no such option.

    Warns:
      UserWarning: Whatever `powersgd_from_torch` warns of. No file tells of ``clip_grad_norm_``.
        The optimizer seems to be elsewhere in the file, in `Checkpoint.extra`. The optimizer has
        leaves that are in no bucket of DDP, with state, which are frozen; or leaves without state
        where others have some, and no layout says whether they are frozen. A schedule goes on at
        Adam's count, and the hook has another.

    Example:
      >>> checkpoint = Checkpoint({"fc.weight": np.ones((3, 2), np.float32)})
      >>> like = {"fc": {"kernel": jax.ShapeDtypeStruct((2, 3), np.float32)}}
      >>> run = to_flax(checkpoint, like)
      >>> run.params["fc"]["kernel"].shape, run.step
      ((2, 3), 0)
      >>> jax.tree.structure(run.transformation.init(run.params)) == jax.tree.structure(
      ...     run.opt_state
      ... )
      True
    """
    found = pairs_of_whole(checked(checkpoint).model, like, pairs, options)
    params = flatten(like).replace(leaves_from_torch(found, checkpoint.model))
    chosen = trained(params)
    inner = pairs_of(flatten(chosen), found)
    counted = steps_taken(checkpoint.optimizer)
    hook = checkpoint.powersgd[0].iter if checkpoint.powersgd else counted
    _warn_of_what_is_not_in_it(checkpoint)
    if step is None and counted not in (0, hook):
        _warn_of_two_counts(learning_rate, counted, hook)
    reducer, matrix_dims = _reducer(checkpoint, chosen, inner, axis_name, matrix_dims)
    updates = (counted or hook) if step is None else step
    optimizer, filler = _optimizer(
        checkpoint, chosen, inner, layout, param_names, learning_rate, updates
    )
    if checkpoint.powersgd:
        state = powersgd_from_torch(
            checkpoint,
            chosen,
            pairs=found,
            layout=layout,
            missing_ranks=missing_ranks,
            matrix_dims=matrix_dims,
        )
    else:
        state = reducer.init(chosen)
    if consume:
        for record in checkpoint.powersgd:
            record.error_dict.clear()
    optimizer_state = None
    if optimizer is not None and filler is not None:
        _warn_of_what_is_frozen(filler, checkpoint, layout or checkpoint.layout)
        optimizer_state = filler.fill(optimizer.init(chosen))
    if consume:
        checkpoint.model.clear()
        (checkpoint.optimizer or {}).clear()
    return FlaxRun(
        params, reducer, state, optimizer, optimizer_state, hook if step is None else step
    )


def checked(checkpoint: Any, name: str = "checkpoint") -> Checkpoint:
    """The same, if it is a checkpoint.

    Raises:
      TypeError: It is something else, such as the path of one.
    """
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    raise TypeError(
        f"`{name}` must be a torch_bridge.Checkpoint, got a {type(checkpoint).__name__}. Pass what "
        "torch_bridge.load returned."
    )


def shapes_of_run(
    checkpoint: Checkpoint,
    like: Any,
    pairs: Pairs,
    layout: BucketLayout | None = None,
    matrix_dims: MatrixDimsFn | None = None,
    param_names: ParamNames = None,
) -> FlaxRun:
    """What `to_flax` would give, with arrays that have a shape and a dtype and take no memory."""
    leaves = {p.path: _empty(p.shape, checkpoint.model[p.torch_name].dtype) for p in pairs}
    params = flatten(like).replace(leaves)
    chosen = trained(params)
    inner = pairs_of(flatten(chosen), pairs)
    reducer, _ = _reducer(checkpoint, chosen, inner, "data", matrix_dims)
    optimizer, _ = _optimizer(checkpoint, chosen, inner, layout, param_names, None, 0)
    states = [
        None
        if link is None
        else jax.tree.map(lambda x: _empty(x.shape, x.dtype), jax.eval_shape(link.init, chosen))
        for link in (reducer, optimizer)
    ]
    return FlaxRun(params, reducer, states[0], optimizer, states[1], 0)


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _reducer(
    checkpoint: Checkpoint,
    params: Any,
    pairs: Pairs,
    axis_name: str | tuple[str, ...],
    matrix_dims: MatrixDimsFn | None,
) -> tuple[optax.GradientTransformation, MatrixDimsFn | None]:
    """What averages the gradients, and the matrices that it sees."""
    hook = checkpoint.hook
    if checkpoint.powersgd:
        kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0], hook=hook)
        matrix_dims = matrix_dims or cut_of_torch(params, pairs, kwargs)
        return jaxcomp.powersgd(axis_name=axis_name, matrix_dims=matrix_dims, **kwargs), matrix_dims
    if hook is None or "powerSGD" in hook:  # what DDP does without one
        return jaxcomp.allreduce(axis_name=axis_name), None
    return reducer_from_torch(hook, axis_name=axis_name), None


def _optimizer(
    checkpoint: Checkpoint,
    params: Any,
    pairs: Pairs,
    layout: BucketLayout | None,
    param_names: ParamNames,
    learning_rate: Rates,
    step: int,
) -> tuple[optax.GradientTransformation | None, Filler | None]:
    """The optimizer and what fills its state; what DDP has in no bucket is frozen."""
    if checkpoint.optimizer is None:
        return None, None
    layout, frozen = layout or checkpoint.layout, set[str]()
    if layout is not None and layout.names:  # else written before compression began
        known, aliases = layout.entries, checkpoint.aliases
        frozen = {p.torch_name for p in pairs if layout_name(p, known, aliases) is None}
    if param_names is None:
        param_names = trained_names(checkpoint.optimizer, checkpoint.model, layout)
    return optimizer_plan(
        checkpoint.optimizer,
        checkpoint.model,
        params,
        pairs,
        param_names,
        learning_rate,
        step=step,
        frozen=frozen,
    )


def _warn_of_what_is_frozen(
    filler: Filler, checkpoint: Checkpoint, layout: BucketLayout | None
) -> None:
    """Where the optimizer and the buckets disagree, or the file leaves it open."""
    if held := filler.paused("held"):
        warnings.warn(
            f"{printable(', '.join(held))}: the optimizer has them and DDP's buckets do not, so "
            "that they get no gradient. They are frozen here too; their state is kept.",
            stacklevel=3,
        )
    # An inferred layout is accepted only where every parameter is in a bucket.
    said = (layout and layout.names) or any(record.buckets for record in checkpoint.powersgd)
    if (unused := filler.paused("unused")) and not said:
        warnings.warn(
            f"{printable(', '.join(unused))}: never used, or frozen; the file does not say which, "
            "and the optimizer has no state for them. They are trained as soon as they get a "
            "gradient. To freeze them pass layout=BucketLayout.from_order([names], "
            "checkpoint.model), with the names of what is trained.",
            stacklevel=3,
        )


def _warn_of_what_is_not_in_it(checkpoint: Checkpoint) -> None:
    """Without its optimizer a run would follow the plain gradient, and uphill."""
    if checkpoint.optimizer is not None:
        warnings.warn(
            "No file tells whether the torch loop clipped gradients. If it called clip_grad_norm_, "
            "put optax.clip_by_global_norm(max_norm) between run.reducer and run.optimizer.",
            stacklevel=3,
        )
    elif names := checkpoint.unread_optimizers:
        warnings.warn(
            f"The checkpoint has no optimizer where one is looked for, so that the chain has none; "
            f"checkpoint.extra[{names[0]!r}] looks like one, or a list of them. Go on from "
            f"dataclasses.replace(checkpoint, optimizer=...) with its state_dict.",
            stacklevel=3,
        )


def _warn_of_two_counts(learning_rate: Rates, counted: int, hook: int) -> None:
    """A schedule could go on where Adam is, or where the hook is."""
    rates = learning_rate if isinstance(learning_rate, Sequence) else [learning_rate]
    if any(map(callable, rates)):
        warnings.warn(
            f"Adam has counted {counted} steps and the hook {hook}, as with gradient accumulation, "
            f"skipped steps or a fresh hook state; the schedule goes on at {counted}. Pass step= "
            "to say where.",
            stacklevel=3,
        )


def cut_of_torch(params: Any, pairs: Pairs, kwargs: Mapping[str, Any]) -> MatrixDimsFn | None:
    """Torch's matrices, where jaxcomp's default rule makes others of a leaf; else None."""
    wanted = matrix_dims_of([p for p in pairs if p.columns is None])
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
