"""Resumes in the PyTorch job: makes a real hook state, with which compression continues exactly.

The difficulty is the order of parameters. The hook's buffers have no names, only positions in DDP's
buckets, and DDP changes the buckets in its second iteration. `state_from_record` waits until that
is over, `resume_powersgd` makes DDP do it beforehand and moves the buffers to the new order.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.framework import HOOKS, import_torch
from torch_bridge._base.schema import BUFFERS, COUNTERS, PowerSGDRecord
from torch_bridge._base.tensors import to_tensor
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._job.example import undisturbed
from torch_bridge._job.save import (
    awaits_rebuild,
    holds_buffers,
    record_layout,
    require,
)

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel

_FIELDS = ("error", "p", "q")  # of a `BucketPart`


def state_from_record(record: PowerSGDRecord, process_group: Any = None) -> PowerSGDState:
    """Makes a real ``PowerSGDState`` with the contents of `record`.

    The state is safe to resume from. DDP's first iteration (the first two with
    ``static_graph=True``) uses buckets with another order of parameters. So a state that already
    holds buffers gets a ``start_powerSGD_iter`` of at least ``iter + 2``.

    Args:
      record: The contents of the state.
      process_group: The process group, or None for the default group.

    Example:
      >>> import numpy as np
      >>> record = PowerSGDRecord(2, 1_200, {0: np.zeros(36, np.float32)}, {}, {})
      >>> state_from_record(record).start_powerSGD_iter
      1202
    """
    hooks = import_torch(HOOKS)
    values = record.hyperparameters
    if record.error_dict or record.q_memory_dict or record.iter >= record.start_powerSGD_iter:
        values["start_powerSGD_iter"] = max(record.start_powerSGD_iter, record.iter + 2)
    state = hooks.PowerSGDState(process_group, **values)
    for name in COUNTERS:
        setattr(state, name, getattr(record, name))
    for name in BUFFERS:
        arrays = getattr(record, name)
        setattr(state, name, jax.tree.map(to_tensor, dict(arrays)))
    if record.rng is not None:
        state.rng = copy.deepcopy(record.rng)
    return state


def resume_powersgd(
    ddp_model: DistributedDataParallel,
    state: PowerSGDState,
    layout: BucketLayout | None,
    backward: Callable[[], object],
    *,
    hook: Callable[..., Any] | None = None,
) -> None:
    """Registers the hook so that the very next step is compressed.

    If you resume with torch alone, torch compresses before DDP has rebuilt its buckets. A state of
    `state_from_record` alone runs two uncompressed steps first. This function makes DDP rebuild its
    buckets beforehand. It runs `backward` twice (three times with ``static_graph=True``) without
    compression, and restores the buffers, gradients and random number generators. If DDP's new
    order of parameters is not that of `layout`, it reorders the state. Every rank must call it.

    Args:
      ddp_model: A fresh ``DistributedDataParallel`` model, without a hook.
      state: The state that `state_from_record` or `powersgd_to_torch` returned.
      layout: The layout that `state` was made with; None if compression had not begun.
      backward: Runs one forward and backward pass of `ddp_model` that reaches all parameters.
      hook: The hook to register: a wrapped hook (``fp16_compress_wrapper(powerSGD_hook)``), or your
        own function around it. None means torch's ``powerSGD_hook``. Over gloo None means
        `waiting_hook`, because torch's hook hangs there when DDP has several buckets.

    Raises:
      CheckpointMismatch: DDP's buckets hold other parameters than `layout`. Or they are not
        rebuilt, because `backward` does not call `ddp_model`.
      TypeError: `ddp_model` is not a ``DistributedDataParallel`` model.

    Example:
      In a job with the model ``torch.nn.Linear(8, 4)``:

      >>> import numpy as np
      >>> import torch
      >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
      >>> layout = BucketLayout.from_order([["bias", "weight"]], model.module.state_dict())
      >>> record = PowerSGDRecord(1, 20, {0: np.ones(36, np.float32)}, {}, {})
      >>> state = state_from_record(record)
      >>> resume_powersgd(model, state, layout, lambda: model(torch.ones(2, 8)).sum().backward())
      >>> state.iter, state.start_powerSGD_iter
      (20, 20)
    """
    dist = import_torch("torch.distributed")
    require(ddp_model=ddp_model, state=state)
    layout = layout or BucketLayout(())
    count = state.iter
    start = state.start_powerSGD_iter
    begun = holds_buffers(state)
    state.start_powerSGD_iter = sys.maxsize  # nothing is compressed before the rebuild
    over_gloo = dist.get_backend(state.process_group) == "gloo"
    default = waiting_hook if over_gloo else import_torch(HOOKS).powerSGD_hook
    ddp_model.register_comm_hook(state, hook or default)
    # DDP rebuilds its buckets in the second forward pass, and with a static graph in the third.
    with undisturbed(ddp_model.module):
        for _ in range(3 if ddp_model.static_graph else 2):
            backward()
    # Gradients of the rehearsal must not be added to those of the first step.
    for parameter in ddp_model.module.parameters():
        parameter.grad = None
    if awaits_rebuild(ddp_model):
        raise CheckpointMismatch(
            "DDP has not rebuilt its buckets, and the state needs their new order. Let `backward` "
            "run forward and backward through `ddp_model` itself, not inside no_sync()."
        )
    if begun:
        present = record_layout(ddp_model)
        layout = layout.named_as(present.names)
        if present != layout:
            _reorder(state, layout, present)
    state.iter = count
    # The rebuild is over, so a state that had begun need not wait for it any more.
    state.start_powerSGD_iter = count if begun else start


def waiting_hook(state: PowerSGDState, bucket):  # DDP compares annotations with its own classes
    """Calls ``powerSGD_hook`` and waits until the bucket is sent before the next bucket begins.

    Over gloo torch's own hook hangs when DDP has several buckets, because the ranks start the
    all-reduces of the buckets in different orders. Pass this function to ``register_comm_hook``,
    directly or inside ``fp16_compress_wrapper``.

    Args:
      state: The ``PowerSGDState``.
      bucket: DDP's ``GradBucket``.

    Example:
      In a job with the model ``torch.nn.Linear(8, 4)``:

      >>> import torch
      >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
      >>> model.register_comm_hook(state, waiting_hook)
    """
    future = import_torch(HOOKS).powerSGD_hook(state, bucket)
    future.wait()
    return future


def _reorder(state: PowerSGDState, old: BucketLayout, new: BucketLayout) -> None:
    """Moves the buffers of `state` from the layout `old` to `new`, of the same parameters."""
    if sorted(old.names) != sorted(new.names):
        raise CheckpointMismatch(
            "DDP's buckets hold other parameters than the layout. Use the layout that the state "
            "was made with, on the same model.",
            missing=sorted(set(old.names) - set(new.names)),
            unexpected=sorted(set(new.names) - set(old.names)),
        )
    before = old.parts(state)
    device = None
    for name, sizes in new.buffer_sizes(state).items():
        buffers = getattr(state, name)
        if buffers:
            tensor = next(iter(buffers.values()))
            device = tensor.device
            # On the CPU, where NumPy's views, through which they are filled, share their memory.
            buffers = {b: tensor.new_zeros(size, device="cpu") for b, size in sizes.items()}
            setattr(state, name, buffers)
    for name, part in new.parts(state).items():  # views of the new buffers
        for field in _FIELDS:
            view = getattr(part, field)
            array = getattr(before[name], field)
            if view is not None and array is not None:
                view[...] = array
    for name in BUFFERS:
        buffers = getattr(state, name)
        setattr(state, name, jax.tree.map(lambda tensor: tensor.to(device), buffers))
