"""`to_flax`: converts a whole torch run to JAX in one call."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from torch_bridge._base.terminal import some
from torch_bridge._convert.optimizer import HELD, UNUSED, OptimizerPlan, Rates, has_schedule
from torch_bridge._convert.optimizer_groups import ParamNames, doubts_about, with_names
from torch_bridge._convert.powersgd import filled_state
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint, mean_of_ranks
from torch_bridge._hook.infer import layout_of
from torch_bridge._pairing.evidence import Apply, Example
from torch_bridge._pairing.leaves import MatrixDimsFn, flatten, matrix_dims_of, trained
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Pairs, paired_for, pairs_of
from torch_bridge._pairing.pairs import Pair, leaves_from_torch

# Names of clipping arguments in training scripts. A model called CLIP and a logged norm must not
# match.
_CLIPPING = re.compile(
    r"grad\w*clip|clip_?(grad|norm|val)|clipping|^clip$|max_(grad_)?norm", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, repr=False)
class FlaxRun:
    """A training run in JAX, as `to_flax` returns it.

    ``params, transformation, opt_state, step = run`` unpacks it. Operations of the torch loop
    between ``backward()`` and ``step()``, such as clipping, go between reducer and optimizer:
    ``optax.chain(run.reducer, optax.clip_by_global_norm(1.0), run.optimizer)`` with the state
    ``(run.reducer_state, optax.EmptyState(), run.optimizer_state)``.

    For the way back, `to_torch` takes the run as its `like`.

    Attributes:
      params: A tree of the structure of `like`, running statistics included.
      reducer: The transformation that averages the gradients.
      reducer_state: The reducer's state, consolidated.
      optimizer: The optimizer, or None if the file has none.
      optimizer_state: The optimizer's state. Both states have the structure of ``init(params)``;
        of linen variables, or an ``nnx.State`` with statistics, of the parameters alone.
      step: Steps taken so far: the calls of the hook or, without a hook, Adam's count.
      difference: The largest difference between the outputs of the Flax model and torch's on the
        example, relative to the largest output; None if no example was run. At most 1e-5, and at
        most 10 times `control`.
      control: The same for two runs of the Flax model, the second one with parameters and inputs
        changed by one rounding.
      pairs: The pairs of torch tensors and Flax leaves, which `to_torch` takes.
      checkpoint: The checkpoint that was converted, with the same arrays. What the file lacked is
        filled in: the bucket layout and the names in the optimizer's groups. None after
        ``consume=True``.
      matrix_dims: The function that says how leaves become matrices.

    Example:
      >>> run = FlaxRun({}, optax.identity(), optax.EmptyState(), None, None, 20)
      >>> params, transformation, opt_state, step = run
      >>> run
      FlaxRun(step=20, 0 leaves of 0 values, without optimizer, difference=None, control=None)
    """

    params: Any
    reducer: optax.GradientTransformation
    reducer_state: Any
    optimizer: optax.GradientTransformation | None
    optimizer_state: Any
    step: int
    difference: float | None = None
    pairs: tuple[Pair, ...] = ()
    control: float | None = None
    checkpoint: Checkpoint | None = None
    matrix_dims: MatrixDimsFn | None = None

    @property
    def transformation(self) -> optax.GradientTransformation:
        """Returns the complete ``optax.chain(reducer, optimizer)``."""
        return optax.chain(*filter(None, (self.reducer, self.optimizer)))

    @property
    def opt_state(self) -> tuple[Any, ...]:
        """Returns the state of `transformation`."""
        if self.optimizer is None:
            return (self.reducer_state,)
        return (self.reducer_state, self.optimizer_state)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.params, self.transformation, self.opt_state, self.step))

    def __repr__(self) -> str:
        """Returns a summary in one line, because the arrays would fill thousands of lines."""
        leaves = jax.tree.leaves(self.params)
        values = sum(map(np.size, leaves))
        optimizer = "without" if self.optimizer is None else "with"
        return (
            f"FlaxRun(step={self.step}, {len(leaves)} leaves of {values:,} values, {optimizer} "
            f"optimizer, difference={self.difference}, control={self.control})"
        )


def to_flax(
    checkpoint: Checkpoint,
    like: Any,
    *,
    apply: Apply | None = None,
    example: Example | None = None,
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
    """Converts a torch checkpoint to parameters, an Optax transformation, its state and the step.

    The reducer is `jaxcomp.powersgd` with the arguments in the file, or `jaxcomp.allreduce` if the
    file has no state of PowerSGD. If the file has no optimizer, the run has none.

    Args:
      checkpoint: The checkpoint that `load` returned.
      like: The Flax tree to fill: linen parameters, linen variables, an ``nnx.State`` or an nnx
        module. Only its structure and shapes are used.
      apply: ``apply(params, *inputs) -> outputs``, the Flax model in evaluation mode; `params` is a
        tree of the structure of `like`. The model is run on the example: pairs that names and
        shapes leave open are tried, and parameters that do not give torch's outputs are refused.
      example: Inputs of the torch module, a tuple of arrays, and its outputs in evaluation mode.
        None means the example in the file, which `save_checkpoint` stores.
      axis_name: The mapped axis (or axes) of the replicas.
      layout: The bucket layout, as for `powersgd_from_torch`. A parameter in no bucket gets no
        gradient in torch, so it is frozen here, even if the optimizer has it.
      missing_ranks: As for `powersgd_from_torch`.
      matrix_dims: The function that says how leaves become matrices. None means torch's matrices,
        which are also jaxcomp's default, except for unusual shapes.
      learning_rate: As for `optimizer_from_torch`. A schedule is not in the file, so pass it here.
      param_names: As for `optimizer_from_torch`. Not needed if the optimizer was given only the
        trainable parameters, because the layout has their names.
      consume: Whether to empty `checkpoint` part by part, so that no array is in memory twice.
      step: The number of updates so far, from which a schedule continues. None means Adam's count
        or, with SGD, which does not count, the hook's count. The hook counts every reduction since
        its state was made, and gradient accumulation makes that number larger than the updates.
        ``run.step`` is `step` or, if that is None, the hook's count.
      pairs: The pairs that `pair` returned, instead of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      The run.

    Raises:
      ValueError: optax has no equal of the optimizer, or a schedule needs `step`.
      CheckpointMismatch: As in `pair` and `powersgd_from_torch`. Or the Flax model does not give
        torch's outputs.
      TypeError: `checkpoint` is not a `Checkpoint`, or an option does not exist.

    Warns:
      UserWarning: The warnings of `powersgd_from_torch`. Or the file has no state of PowerSGD or no
        optimizer, or has it in an unusual place (`Checkpoint.extra`). Or an entry of the file is
        about clipping. Or parameters have 16 bits in the file and more in `like`; they stay at 16.
        Or the optimizer has state for leaves in no bucket of DDP, which are frozen. Or it has state
        for some leaves only, and no layout says whether the others are frozen. Or a schedule
        continues from Adam's count, and the hook has another count.

    Example:
      >>> import jax
      >>> import numpy as np
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
    refuse_other_than_checkpoint(checkpoint, "checkpoint")
    if apply:
        example = example or checkpoint.example
    paired = paired_for(checkpoint.model, like, pairs, options, apply, example)
    params = flatten(like).with_leaves(leaves_from_torch(paired.pairs, checkpoint.model))
    trained_params = trained(params)
    trained_pairs = pairs_of(trained_params, paired.pairs)
    layout = layout_of(checkpoint, layout, paired.pairs)
    matrix_dims = matrix_dims or matrix_dims_of(trained_pairs)
    reducer = _reducer(checkpoint, axis_name, matrix_dims)
    plan = None
    counted = 0
    if checkpoint.optimizer is not None:
        plan = OptimizerPlan.of(
            checkpoint.optimizer, checkpoint.model, trained_pairs, param_names, layout
        )
        counted = plan.counted
    if checkpoint.powersgd:
        calls = checkpoint.powersgd[0].iter
        mean = mean_of_ranks(checkpoint, missing_ranks)
        state = filled_state(mean, trained_params, trained_pairs, layout, matrix_dims)
        del mean  # frees the errors' memory before the optimizer state is allocated
    else:
        calls = counted
        state = reducer.init(trained_params)
    doubts = list(_doubts(checkpoint, params, like))
    taken = calls
    if plan and checkpoint.optimizer:
        calls_of_hook = None
        if checkpoint.powersgd:
            calls_of_hook = calls
        taken = plan.taken(learning_rate, step, calls_of_hook)
        doubts += _doubts_of_steps(plan, layout, calls, learning_rate, step)
        scheduled = learning_rate is not None
        doubts += doubts_about(
            checkpoint.optimizer, plan.entries, checkpoint.model, param_names, scheduled
        )
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    if consume:
        for record in checkpoint.powersgd:
            record.error_dict.clear()
    optimizer = None
    optimizer_state = None
    if plan:
        optimizer = plan.transformation(trained_params, learning_rate)
        optimizer_state = plan.state(optimizer.init(trained_params), taken)
    completed = None
    if consume:
        checkpoint.model.clear()
        (checkpoint.optimizer or {}).clear()
    else:
        named_groups = checkpoint.optimizer
        if plan:
            named_groups = with_names(named_groups, plan.entries)
        completed = dataclasses.replace(checkpoint, layout=layout, optimizer=named_groups)
    if step is None:
        step = calls
    difference = None
    control = None
    if paired.apart is not None:
        difference = paired.apart.largest
        control = paired.apart.control
    return FlaxRun(
        params,
        reducer,
        state,
        optimizer,
        optimizer_state,
        step,
        difference,
        paired.pairs,
        control,
        completed,
        matrix_dims,
    )


def refuse_other_than_checkpoint(value: Any, name: str) -> None:
    """Refuses an argument that is not a `Checkpoint`, such as the path of a file.

    Raises:
      TypeError: `value` is something else; the message has the argument's name.
    """
    if not isinstance(value, Checkpoint):
        raise TypeError(
            f"`{name}` must be a torch_bridge.Checkpoint, got a {type(value).__name__}. Pass what "
            "torch_bridge.load returned."
        )


def _reducer(
    checkpoint: Checkpoint, axis_name: str | tuple[str, ...], matrix_dims: MatrixDimsFn
) -> optax.GradientTransformation:
    """Returns the reducer that averages gradients as the torch job did."""
    hook = checkpoint.hook or ""
    if checkpoint.powersgd:
        kwargs = powersgd_kwargs_from_torch(checkpoint.powersgd[0], hook=hook or None)
        return jaxcomp.powersgd(axis_name=axis_name, matrix_dims=matrix_dims, **kwargs)
    if not hook or "powerSGD" in hook:  # no hook: DDP's mean. No state: `_doubts` warns.
        return jaxcomp.allreduce(axis_name=axis_name)
    return reducer_from_torch(hook, axis_name=axis_name)


def _doubts(checkpoint: Checkpoint, params: Any, like: Any) -> Iterator[str]:
    """Yields a warning for each part that the file lacks, or may have in an unusual place."""
    of_like = flatten(like).leaves
    narrow = []
    for path, leaf in flatten(params).leaves.items():
        if 0 < _bits(leaf) < 32 <= _bits(of_like[path]):
            narrow.append("/".join(path))
    if narrow:
        yield (
            f"{some(narrow)}: in 16 bits, as in the file, though `like` has more. To train in "
            "float32 convert dataclasses.replace(checkpoint, model={name: value.astype('float32') "
            "for name, value in checkpoint.model.items()})."
        )
    unread = checkpoint.unread_states
    if not checkpoint.powersgd and (unread or "powerSGD" in (checkpoint.hook or "")):
        seems = f"checkpoint.extra[{unread[0]!r}] looks like one: " if unread else ""
        yield (
            "The checkpoint has no PowerSGDState under the usual names, so that run.reducer is "
            f"an exact average; {seems}save it with save_checkpoint, or as 'comm_hook_state'."
        )
    if checkpoint.optimizer is not None:
        clipping = _clipping(checkpoint.extra)
        if clipping:
            yield (
                f"{some(clipping)} in the file: if the torch loop called clip_grad_norm_, put "
                "optax.clip_by_global_norm(max_norm) between run.reducer and run.optimizer."
            )
    elif checkpoint.unread_optimizers:
        yield (
            "The checkpoint has no optimizer under the usual names, so that the chain has none; "
            f"checkpoint.extra[{checkpoint.unread_optimizers[0]!r}] looks like one, or a list of "
            "them. Convert dataclasses.replace(checkpoint, optimizer=...) with its state_dict."
        )
    else:  # without an optimizer the run would add the plain gradient, which increases the loss
        yield (
            "The checkpoint has no optimizer, so that run.transformation only averages gradients: "
            "if you add them to the parameters, the loss increases. Put an optimizer behind it: "
            "optax.chain(run.reducer, optax.sgd(...)), with the state (run.reducer_state, "
            "optimizer.init(params))."
        )


def _bits(leaf: Any) -> int:
    """Returns the bits of one value of a floating-point leaf, and 0 for any other leaf."""
    dtype = getattr(leaf, "dtype", bool)
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0


def _clipping(entries: Mapping[Any, Any]) -> list[str]:
    """Lists the numbers in a file, such as the job's arguments, whose names are about clipping."""
    names = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            names += _clipping(value)
        elif isinstance(value, int | float) and value and _CLIPPING.search(str(name)):
            names.append(f"{name!s:.40}={value}")
    return names


def _doubts_of_steps(
    plan: OptimizerPlan, layout: BucketLayout | None, calls: int, rates: Rates, step: int | None
) -> Iterator[str]:
    """Yields a warning for each difference between the optimizer's steps and the hook's calls.

    Args:
      plan: The plan of the optimizer.
      layout: The bucket layout, or None if it is unknown.
      calls: The number of calls of the hook.
      rates: The learning rates, of which a schedule continues from a step.
      step: The step that the user passed, or None.
    """
    if step is None and plan.counted not in (0, calls) and has_schedule(rates):
        yield (
            f"Adam has counted {plan.counted} steps and the hook {calls}, as with gradient "
            "accumulation, skipped steps or a fresh hook state; the schedule continues from "
            f"{plan.counted}. Pass step= to say where."
        )
    held = plan.paused(HELD)
    if held:
        yield (
            f"{some(held)}: the optimizer has them and DDP's buckets do not, so that they get no "
            "gradient. They are frozen here, too, and their state is kept."
        )
    unused = plan.paused(UNUSED)
    if unused and not (layout and layout.names):
        yield (
            f"{some(unused)}: never used, or frozen; the file does not say which, and the "
            "optimizer has no state for them. They are trained as soon as they get a gradient. To "
            "freeze them pass layout=BucketLayout.from_order([names], checkpoint.model), with the "
            "names of the trained parameters."
        )
