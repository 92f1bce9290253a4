"""`to_flax`: converts a whole torch run to JAX in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import numpy as np
import optax

from torch_bridge._base.errors import Problems
from torch_bridge._base.terminal import warn
from torch_bridge._convert.optimizer import OptimizerPlan, Rates
from torch_bridge._convert.optimizer_groups import ParamNames
from torch_bridge._convert.params import doubts_of_values
from torch_bridge._convert.powersgd import filled_state
from torch_bridge._convert.review import (
    doubts_of_absence,
    doubts_of_dtypes,
    doubts_of_file,
    doubts_of_scale,
    doubts_of_steps,
    reducer_of,
    reviewed_layout,
)
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint, mean_of_ranks
from torch_bridge._hook.infer import layout_of
from torch_bridge._pairing.decide import Pairing
from torch_bridge._pairing.evidence import Apply, Example, ExampleRun
from torch_bridge._pairing.leaves import MatrixDimsFn, flatten_tree, matrix_dims_of, trained
from torch_bridge._pairing.options import PairOptions
from torch_bridge._pairing.pair import Pairs, find_or_check_pairs, pairs_in_tree
from torch_bridge._pairing.pairs import Pair, leaves_from_torch


@dataclasses.dataclass(frozen=True, repr=False)
class FlaxRun:
    """Holds a training run in JAX, as `to_flax` returns it.

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
      optimizer_state: The optimizer's state. Both states have the structure of ``init`` of the
        parameters, without the statistics that `params` may have.
      step: Steps taken so far: the calls of the hook or, without a hook, Adam's count.
      difference: The largest difference between the outputs of the Flax model and torch's on the
        example, relative to the largest output; None if no example was run. At most 1e-5 (with 16
        bits, 16 units of rounding), and at most 10 times `control` or 8 units of rounding.
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
        tree of the structure of `like`. The model is run on the example with likely pairs, or with
        `pairs`, and parameters that do not give torch's outputs are refused.
      example: The result of `run_example` or, without its record of torch's calls, the inputs of
        the torch module (a tuple of arrays) and its outputs in evaluation mode. None means the
        example that `save_checkpoint` stored in the file.
      axis_name: The mapped axis (or axes) of the replicas.
      layout: The bucket layout, as for `powersgd_from_torch`. A parameter in no bucket gets no
        gradient in torch, so it is frozen here, even if the optimizer has it.
      missing_ranks: As for `powersgd_from_torch`.
      matrix_dims: The function that says how leaves become matrices. None means torch's matrices,
        which are also jaxcomp's default, except for unusual shapes.
      learning_rate: As for `optimizer_from_torch`. A schedule is not in the file, so pass it here.
      param_names: As for `optimizer_from_torch`. Not needed if the optimizer was given only the
        trainable parameters, because the layout has their names.
      consume: True empties `checkpoint` during the conversion, which then needs less memory.
      step: The number of updates so far, from which a schedule continues. None means Adam's count
        or, with SGD, which does not count, the hook's count. The hook counts every reduction since
        its state was made, and gradient accumulation makes that number larger than the updates.
        ``run.step`` is `step` or, if that is None, the hook's count or, without a hook, Adam's.
      pairs: The pairs that `pair` returned, instead of `options`.
      **options: ``rules``, ``flatten`` and the other arguments of `pair`.

    Returns:
      The run.

    Raises:
      ValueError: optax has no equal of the optimizer, or a schedule needs `step`.
      CheckpointMismatch: As in `pair` and `powersgd_from_torch`. Or the Flax model does not give
        torch's outputs. If there are several problems, of any of these kinds, one error lists all.
      TypeError: `checkpoint` is not a `Checkpoint`, or an option does not exist.

    Warns:
      UserWarning: Those of `powersgd_from_torch` and `optimizer_from_torch`, and these:

        - The file has no state of PowerSGD or no optimizer, or has it in an unusual place.
        - It has a second model, further optimizers, a scheduler, or a number about clipping.
        - The model is an average (EMA). Or its parameters have 16 bits, and more in `like`; they
          stay at 16. Or leaves that no torch model has are only shapes in `like`, and stay so.
        - The hook's state seems to be in units of a loss scale that the file does not have.
        - The optimizer has state for leaves in no bucket of DDP, which are frozen. Or it has no
          state or fewer steps for some leaves, and no layout says whether these are frozen.
        - A schedule continues from Adam's count, and the hook has another count.

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
        example = example or checkpoint.recorded_example
    # Which tensor is which leaf, and where in the hook's buffers it is.
    problems = Problems()
    pairing = Pairing(())
    if checkpoint.model:
        with problems.about("which tensor is which leaf"):
            pairing = find_or_check_pairs(checkpoint.model, like, pairs, options, apply, example)
            with problems.about("the bucket layout"):
                layout = layout_of(checkpoint, layout, pairing.pairs)
    if problems.errors or not checkpoint.model:
        # Without pairs the later stages cannot run, and one error shall list all problems.
        reviewed_layout(checkpoint, layout, missing_ranks, param_names, problems)
    problems.raise_all()
    # The parameters, and how the reducer cuts them into matrices.
    params = flatten_tree(like).with_leaves(leaves_from_torch(pairing.pairs, checkpoint.model))
    trained_params = trained(params)
    trained_pairs = pairs_in_tree(trained_params, pairing.pairs)
    matrix_dims = matrix_dims or matrix_dims_of(trained_pairs)
    # The hook with its state, and the optimizer.
    reducer = optax.identity()
    with problems.about("the hook"):
        reducer = reducer_of(checkpoint, axis_name, matrix_dims)
    mean = None
    calls = None
    reducer_state = None
    if checkpoint.powersgd:
        calls = checkpoint.powersgd[0].iter
        with problems.about("the hook's state"):
            mean = mean_of_ranks(checkpoint, missing_ranks)
            reducer_state = filled_state(mean, trained_params, trained_pairs, layout, matrix_dims)
    else:
        reducer_state = reducer.init(trained_params)
    plan = None
    taken = 0
    if checkpoint.optimizer is not None:
        with problems.about("the optimizer"):
            plan = OptimizerPlan.of(
                checkpoint.optimizer,
                checkpoint.model,
                trained_pairs,
                param_names,
                layout,
                learning_rate,
            )
            taken = plan.taken(step, calls)
    problems.raise_all()
    # What the file may mean that it does not say.
    unread = checkpoint.unread()
    doubts = list(doubts_of_absence(checkpoint, unread))
    doubts += doubts_of_file(checkpoint, unread, learning_rate is not None)
    doubts += doubts_of_dtypes(params, like)
    doubts += doubts_of_values(params)
    if plan:
        doubts += doubts_of_steps(plan, layout, calls, step)
        if mean is not None and checkpoint.loss_scale is None:
            doubts += doubts_of_scale(mean, layout, plan)
        doubts += plan.doubts
    mean = None  # frees the errors' memory before the optimizer state is allocated
    for doubt in doubts:
        warn(doubt)
    if consume:
        for record in checkpoint.powersgd:
            record.error_dict.clear()
    optimizer = None
    optimizer_state = None
    named_groups = None
    if plan:
        optimizer = plan.transformation(trained_params)
        optimizer_state = plan.state(optimizer.init(trained_params), taken)
        named_groups = plan.with_names()
    completed = None
    if consume:
        checkpoint.model.clear()
        (checkpoint.optimizer or {}).clear()
    else:
        completed = dataclasses.replace(checkpoint, layout=layout, optimizer=named_groups)
        if example is not None:  # `to_torch` can run both models on it
            ran = ExampleRun.of(example)
            completed = dataclasses.replace(
                completed, example=(ran.inputs, ran.outputs), calls=dict(ran.calls)
            )
    if step is None:
        step = taken if calls is None else calls
    difference = None
    control = None
    if pairing.difference:
        difference = pairing.difference.largest
        control = pairing.difference.control
    return FlaxRun(
        params=params,
        reducer=reducer,
        reducer_state=reducer_state,
        optimizer=optimizer,
        optimizer_state=optimizer_state,
        step=step,
        difference=difference,
        control=control,
        pairs=pairing.pairs,
        checkpoint=completed,
        matrix_dims=matrix_dims,
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
