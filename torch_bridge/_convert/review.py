"""Reviews a file before a conversion to Flax: what it lacks, and what it may mean.

What stops every conversion is collected, so that one error has it all. What the file may mean and
does not say becomes a warning.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from torch_bridge._base.errors import CheckpointMismatch, Problems
from torch_bridge._base.plain import expression, nested
from torch_bridge._base.schema import PowerSGDRecord, is_optimizer
from torch_bridge._base.terminal import some
from torch_bridge._convert.optimizer import HELD, UNUSED, OptimizerPlan
from torch_bridge._convert.optimizer_groups import ParamNames, read_entries
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint, loss_scale_of, refuse_missing_ranks
from torch_bridge._hook.infer import layout_of
from torch_bridge._hook.load import MODEL_KEYS
from torch_bridge._pairing.leaves import MatrixDimsFn, flatten_tree

# Names of clipping arguments in training scripts. A model called CLIP and a logged norm must not
# match.
_CLIPPING = re.compile(
    r"grad\w*clip|clip_?(grad|norm|val)|clipping|^clip$|max_(grad_)?norm", re.IGNORECASE
)
# Entries beside a model, or in it, that show that it is an average, and whose.
_AVERAGED = (
    (
        {"current_model_state"},
        ", as Lightning's WeightAveraging saves it. To continue the run convert "
        "dataclasses.replace(checkpoint, model=checkpoint.extra['current_model_state'])",
    ),
    (
        {"message_hub", "ema_state_dict"},
        ": mmengine's EMAHook exchanges them. The trained weights are in "
        "checkpoint.extra['ema_state_dict'], with `module.` before their names",
    ),
    (
        {"n_averaged"},
        ": torch's AveragedModel. To continue the run, save the model itself",
    ),
)
# Q has the size of a gradient, and a moment has it too, or at most some ten times more or less. A
# GradScaler's scale is usually 65,536.
_SCALED = 500
_LARGEST = 1e9  # of a norm to which somebody clips
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


def doubts_of_absence(
    checkpoint: Checkpoint, unread: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yields a warning if the file has no hook state, or no optimizer, under the usual names.

    Args:
      checkpoint: The checkpoint.
      unread: What `Checkpoint.unread` returns.
    """
    states = list(unread["PowerSGDState"])
    if not checkpoint.powersgd and (states or "powerSGD" in (checkpoint.hook or "")):
        seems = f"{states[0]} looks like one: " if states else ""
        yield (
            "The checkpoint has no PowerSGDState under the usual names, so that run.reducer is "
            f"an exact average; {seems}save it with save_checkpoint, or as 'comm_hook_state'."
        )
    if checkpoint.optimizer is not None:
        return
    others = list(unread["optimizer"])
    if others:
        yield (
            "The checkpoint has no optimizer under the usual names, so that the chain has none. "
            f"Convert dataclasses.replace(checkpoint, optimizer=...) with one of {some(others)}."
        )
        return
    # Without an optimizer the run would add the plain gradient, which increases the loss.
    yield (
        "The checkpoint has no optimizer, so that run.transformation only averages gradients: "
        "if you add them to the parameters, the loss increases. Put an optimizer behind it: "
        "optax.chain(run.reducer, optax.sgd(...)), with the state (run.reducer_state, "
        "optimizer.init(params))."
    )


def doubts_of_file(
    checkpoint: Checkpoint, unread: Mapping[str, Collection[str]], scheduled: bool
) -> Iterator[str]:
    """Yields a warning for each entry of the file that may change what the other entries mean.

    Args:
      checkpoint: The checkpoint.
      unread: What `Checkpoint.unread` returns.
      scheduled: Whether the user passed a learning rate.
    """
    names = checkpoint.extra.keys() | checkpoint.model.keys()
    for marks, sentence in _AVERAGED:
        if marks <= names:
            yield (
                "The model in the file is an average (EMA or SWA) of the trained weights"
                f"{sentence}."
            )
    for name in MODEL_KEYS:
        place = expression((name,))
        if isinstance(checkpoint.extra.get(name), Mapping):
            yield (
                f"The file has a second model, {place}, and the first one is converted. For the "
                f"other convert dataclasses.replace(checkpoint, model={place})."
            )
    optimizer = checkpoint.optimizer
    if optimizer is None or not is_optimizer(optimizer):
        return
    others = list(unread["optimizer"])
    if others:
        yield (
            f"The file has further optimizers, which are left out: {some(others)}. Convert each "
            "with optimizer_from_torch, and the parameters that it updates."
        )
    schedulers = list(unread["scheduler"])
    # `doubts_of_schedulers` warns if one has written `initial_lr` beside `lr`.
    scheduled = scheduled or any("initial_lr" in group for group in optimizer["param_groups"])
    if schedulers and not scheduled:
        yield (
            f"The file has a learning rate scheduler, {schedulers[0]}, and optax does not read it: "
            "the rate stays as it is. Pass learning_rate=, the same schedule in Optax."
        )
    clipping = []
    for keys, value in nested(checkpoint.extra):
        name = str(keys[-1])
        if isinstance(value, int | float) and 0 < abs(value) < _LARGEST and _CLIPPING.search(name):
            clipping.append(f"{name:.40}={value}")
    if clipping:
        yield (
            f"{some(clipping)} in the file: if the torch loop called clip_grad_norm_, put "
            "optax.clip_by_global_norm(max_norm) between run.reducer and run.optimizer."
        )
    if "step" in optimizer:
        yield (
            "The optimizer has an entry `step`, as torch's PostLocalSGDOptimizer writes it. It "
            "averages the parameters from time to time, and run.reducer averages the gradients in "
            "each step. Wrap run.optimizer in jaxcomp.local_sgd instead."
        )


def doubts_of_dtypes(params: Any, like: Any) -> Iterator[str]:
    """Yields a warning if parameters have 8 or 16 bits, and more in `like`; or 64 without x64."""
    of_like = flatten_tree(like).leaves
    narrow = []
    wide = []
    for path, leaf in flatten_tree(params).leaves.items():
        if 0 < _bits(leaf) < 32 <= _bits(of_like[path]):
            narrow.append("/".join(path))
        if _bits(leaf) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            wide.append("/".join(path))
    if wide:
        yield (
            f"{some(wide)}: in float64, as in the file. JAX rounds them to float32, unless you "
            "first call jax.config.update('jax_enable_x64', True)."
        )
    if narrow:
        yield (
            f"{some(narrow)}: in 8 or 16 bits, as in the file, though `like` has more. To train in "
            "float32 convert dataclasses.replace(checkpoint, model={name: value.astype('float32') "
            "for name, value in checkpoint.model.items()})."
        )


def _bits(leaf: Any) -> int:
    """Returns the bits of one value of a floating-point leaf, and 0 for any other leaf."""
    dtype = getattr(leaf, "dtype", bool)
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0


def doubts_of_steps(
    plan: OptimizerPlan, layout: BucketLayout | None, calls: int | None, step: int | None
) -> Iterator[str]:
    """Yields a warning for each difference between the optimizer's steps and the hook's calls.

    Args:
      plan: The plan of the optimizer.
      layout: The bucket layout, or None if it is unknown.
      calls: The number of calls of the hook; None if the file has no hook state.
      step: The step that the user passed, or None.
    """
    counted = plan.counted or 0
    if step is None and plan.has_schedule and counted not in (0, calls or counted):
        yield (
            f"Adam has counted {counted} steps and the hook {calls}, as with gradient "
            "accumulation, skipped steps or a fresh hook state; the schedule continues from "
            f"{counted}. Pass step= to say where."
        )
    leaves = collections.defaultdict(list)
    for path, part in plan.parts.items():
        behind = "behind" if part.step < counted else ""
        leaves[part.pause or behind].append("/".join(path))
    if leaves[HELD]:
        yield (
            f"{some(leaves[HELD])}: the optimizer has them and DDP's buckets do not, so that they "
            "get no gradient. They are frozen here, too, and their state is kept."
        )
    if layout and layout.names:
        return
    if leaves[UNUSED]:
        yield (
            f"{some(leaves[UNUSED])}: never used, or frozen; the file does not say which, and the "
            "optimizer has no state for them. They are trained as soon as they get a gradient. To "
            "freeze them pass layout=BucketLayout.from_order([names], checkpoint.model), with the "
            "names of the trained parameters."
        )
    if leaves["behind"]:
        yield (
            f"{some(leaves['behind'])}: updated in fewer steps than other parameters, because they "
            "got no gradient in the others. They are trained here. If they are frozen by now, pass "
            "layout=BucketLayout.from_order([names], checkpoint.model), with the names of the "
            "trained parameters."
        )


def doubts_of_scale(
    record: PowerSGDRecord, layout: BucketLayout | None, plan: OptimizerPlan
) -> Iterator[str]:
    """Yields a warning if the hook's factors are in units of a loss scale that is not in the file.

    Args:
      record: The hook's state, from which a known scale has been taken out.
      layout: The layout of its buffers; None if it has none.
      plan: The plan of the optimizer, whose moments have no loss scale.
    """
    ratios = []
    for name, part in (layout.parts(record) if layout else {}).items():
        entry = plan.entries.get(name)
        if entry is None or part.q is None:
            continue
        moment = entry.state.get("exp_avg", entry.state.get("momentum_buffer"))
        if moment is not None:
            size = float(np.linalg.norm(np.asarray(moment, np.float32)))
            factor = float(np.linalg.norm(part.q.astype(np.float32)))
            if size > 0 and np.isfinite([size, factor]).all():
                ratios.append(factor / size)
    if ratios and np.median(ratios) > _SCALED:
        yield (
            f"The hook's factors are {np.median(ratios):,.0f} times as large as the optimizer's "
            "moments. If the loss was scaled (GradScaler, amp), the hook's state is in units of "
            "the scale, which the file does not have; training would diverge. Convert "
            "dataclasses.replace(checkpoint, loss_scale=...). If the loop clipped gradients that "
            "much, all is well."
        )
