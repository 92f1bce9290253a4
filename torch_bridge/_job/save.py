"""What runs inside the PyTorch job: record the layout, save everything, and go on exactly.

torch is imported when a function is called, so that ``import torch_bridge`` works without it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.files import replacing
from torch_bridge._base.framework import import_torch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.schema import BUFFERS, PowerSGDRecord, record_from_slots
from torch_bridge._base.tensors import to_numpy
from torch_bridge._base.terminal import printable
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.document import make_document
from torch_bridge._hook.registered import hook_name
from torch_bridge._job.example import example_inputs, run_example

if TYPE_CHECKING:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel


def record_layout(
    ddp_model: DistributedDataParallel, state: PowerSGDState | None = None
) -> BucketLayout:
    """The bucket layout that DDP uses now. Call it on any rank, any time after compression began.

    DDP rebuilds its buckets in the second iteration, with ``static_graph=True`` in the third.

    Args:
      ddp_model: The ``DistributedDataParallel`` model.
      state: Its ``PowerSGDState``; the layout is checked against the state's buffers.

    Returns:
      The layout, by the names of ``ddp_model.module.named_parameters()``.

    Raises:
      CheckpointMismatch: The state was made for other buckets: of another size, or those that DDP
        has yet to rebuild.
      TypeError: Another model than DDP's is given.

    Example:
      In a job with the model ``torch.nn.Linear(8, 4)``:

      >>> record_layout(ddp_model).sizes
      (36,)
    """
    require_ddp(ddp_model)
    require_powersgd(state)
    ignored = getattr(ddp_model, "parameters_to_ignore", ())
    # The order in which DDP numbers them: definition order, tied ones once, frozen ones not at all.
    parameters = {
        name: parameter
        for name, parameter in ddp_model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    names = list(parameters)
    complex_ones = [name for name in names if parameters[name].is_complex()]
    if complex_ones:
        raise CheckpointMismatch(
            "DDP lays complex parameters into its buckets as twice as many real numbers, which the "
            "hook compresses as another matrix. Their hook state cannot be converted; save the "
            "checkpoint with state=None.",
            unexpected=complex_ones,
        )
    if rebuilt := _logged(ddp_model).get("rebuilt_per_bucket_param_indices"):
        order = [[names[int(index)] for index in bucket.split()] for bucket in rebuilt.split(",")]
    else:  # not rebuilt, or not logged; this takes the memory of all gradients for a moment
        known = {id(parameter): name for name, parameter in parameters.items()}
        buckets = ddp_model.reducer._get_zeros_like_grad_buckets()
        order = [[known[id(parameter)] for parameter in b.parameters()] for b in buckets]
    layout = BucketLayout.from_order(order, parameters)
    if state is None:
        return layout
    if wrong := layout.misfits(state):
        raise CheckpointMismatch(
            "The hook state was made for other buckets than DDP uses now. Call record_layout in "
            "the run that made the state, after compression began.",
            mis_shaped=wrong,
        )
    if holds_buffers(state) and awaits_rebuild(ddp_model):
        raise CheckpointMismatch(
            "The hook state comes from an earlier job, and DDP has not rebuilt its buckets in this "
            "one: their order is not the state's. Wait for two iterations, or for three with "
            "static_graph=True; torch_bridge.resume_powersgd runs them beforehand."
        )
    return layout


def require_ddp(ddp_model: Any) -> None:
    """Refuse the bare module, which knows nothing of buckets.

    Raises:
      TypeError: It is no ``DistributedDataParallel`` model.
    """
    # Not isinstance: what torch.compile makes of one serves as well.
    if not hasattr(ddp_model, "_get_ddp_logging_data"):
        raise TypeError(
            f"`ddp_model` must be the DistributedDataParallel model, got a "
            f"{type(ddp_model).__name__}; not the module in it."
        )


def require_powersgd(state: Any) -> None:
    """Refuses the state of another hook; None stands for no state.

    Raises:
      TypeError: It is no ``PowerSGDState``.
    """
    if state is None or hasattr(state, "error_dict"):
        return
    raise TypeError(
        f"`state` must be the PowerSGDState, got a {type(state).__name__}. Pass None where the "
        "hook is another: of post_localSGD_hook there is nothing to save but the step."
    )


def awaits_rebuild(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP will cut other buckets than it has now."""
    rebuilds = ddp_model.static_graph or not ddp_model.find_unused_parameters
    return rebuilds and not _logged(ddp_model).get("has_rebuilt_buckets")


def _logged(ddp_model: DistributedDataParallel) -> Mapping[str, Any]:
    """What DDP says of its buckets; it logs before it rebuilds, so bring the log up to date."""
    if ddp_model.logger is not None:
        ddp_model.logger.set_runtime_stats_and_log()
    return ddp_model._get_ddp_logging_data()


def holds_buffers(state: PowerSGDState) -> bool:
    """Whether compression has begun."""
    return bool(state.error_dict or state.q_memory_dict)


# --- saving ---------------------------------------------------------------------------------


def save_checkpoint(
    path: str | os.PathLike[str],
    ddp_model: DistributedDataParallel,
    state: PowerSGDState | None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    example: torch.Tensor | Sequence[torch.Tensor] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Write one complete checkpoint: model, optimizer, hook state with every rank's error, layout.

    Every rank must call it. Rank 0 receives the errors one by one (its memory grows by one model
    per rank, on the CPU) and writes a single file: under another name first, so that a crash
    leaves the previous checkpoint whole. The file holds tensors and plain values only, so
    ``torch.load(path, weights_only=True)`` reads it as well as `load`.

    Args:
      path: The file; an existing one is replaced.
      ddp_model: The ``DistributedDataParallel`` model.
      state: Its ``PowerSGDState``, or None if it has none.
      optimizer: The optimizer, whose ``state_dict()`` is saved, with the names of the parameters of
        each group, as torch writes them for an optimizer of ``named_parameters()``.
      extra: Further tensors, arrays, plain values, and dictionaries and lists of these, such as
        ``{"epoch": 3}``. That of rank 0 is saved.
      example: Inputs of the model, a tensor or a tuple of them; a few rows are enough, and all are
        stored, with what the model makes of them in evaluation mode. By them a conversion finds out
        which layer is which, and proves that the outputs are the same. Rank 0 runs the module
        once, beside the training: modes, buffers, gradients and random numbers stay as they were.
      scaler: The ``GradScaler`` under which the hook runs, if there is one. Errors are in units of
        its scale, which a conversion takes out; its ``state_dict()`` is saved as
        ``extra["scaler"]``, if that is not there.

    Raises:
      TypeError: The model, optimizer, scaler or example is of another kind.
      CheckpointMismatch: The state was made for other buckets, or for those that DDP has yet to
        rebuild; on every rank.
      RuntimeError: Rank 0 could not write the file; on every rank, with the reason.

    Example:
      In a job with the model ``torch.nn.Linear(8, 4)``:

      >>> import tempfile
      >>> from torch_bridge import load
      >>> path = tempfile.mkdtemp() + "/checkpoint.pt"
      >>> save_checkpoint(path, ddp_model, state, optimizer=optimizer, extra={"epoch": 3})
      >>> list(load(path).model), load(path).extra
      (['weight', 'bias'], {'epoch': 3})
    """
    dist = import_torch("torch.distributed")
    require_ddp(ddp_model)
    if optimizer is not None and not hasattr(optimizer, "state_dict"):
        raise TypeError(
            f"`optimizer` must be the optimizer itself, got a {type(optimizer).__name__}; not its "
            "state_dict()."
        )
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"`scaler` must be the GradScaler itself, got a {type(scaler).__name__}; not its "
            "state_dict()."
        )
    inputs = None if example is None else example_inputs(example)
    group: Any = getattr(state, "process_group", None) or ddp_model.process_group
    require_powersgd(state)
    begun = state is not None and holds_buffers(state)
    layout = record_layout(ddp_model, state) if begun else None
    errors = [] if state is None else _gather_errors(state, group)
    hooks = getattr(ddp_model, "_comm_hooks", ())  # torch says it nowhere else
    problem: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            record = None if state is None else _record_of(state)
            groups = None if optimizer is None else _named_groups(optimizer, ddp_model)
            beside = dict(extra or {})
            if scaler is not None:
                beside.setdefault("scaler", scaler.state_dict())
            ran = None if inputs is None else run_example(ddp_model.module, inputs)
            records = []
            if record is not None:
                records = [dataclasses.replace(record, error_dict=error) for error in errors]
            checkpoint = Checkpoint(
                model=_plain(ddp_model.module.state_dict(), "the model"),
                powersgd=tuple(records),
                optimizer=None if groups is None else _plain(groups, "the optimizer"),
                layout=layout,
                extra=_plain(beside, "`extra`"),
                world_size=dist.get_world_size(group),
                hook=hook_name(hooks[-1][0]) if hooks else None,
                example=ran,
                loss_scale=None if scaler is None else scaler.get_scale(),
            )
            write_document(pathlib.Path(path), make_document(checkpoint))
        except Exception as error:  # whatever it is, the other ranks wait
            problem = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, src=dist.get_global_rank(group, 0), group=group)
    if problem[0] is not None:
        raise RuntimeError(f"Rank 0 could not write {path}: {problem[0]}")


def _named_groups(
    optimizer: torch.optim.Optimizer, ddp_model: DistributedDataParallel
) -> dict[str, Any]:
    """Its ``state_dict()``, which says which parameter is in which group."""
    names = {id(parameter): name for name, parameter in ddp_model.module.named_parameters()}
    document = dict(optimizer.state_dict())
    groups = getattr(optimizer, "param_groups", ())
    held = [[names.get(id(parameter)) for parameter in group["params"]] for group in groups]
    if held and all(name is not None for group in held for name in group):
        pairs = zip(document.get("param_groups", ()), held, strict=False)
        document |= {"param_groups": [{**group, "param_names": own} for group, own in pairs]}
    return document


def _plain(entries: Mapping[str, Any], whose: str) -> dict[str, Any]:
    kept, lacking = plain_copy(entries)
    if lacking:
        raise ValueError(
            f"torch.load(weights_only=True) does not read {printable(', '.join(lacking))} of "
            f"{whose}. Pass plain values: str(path), vars(args), scheduler.state_dict()"
        )
    return kept


def _gather_errors(state: PowerSGDState, group: Any) -> list[dict[int, torch.Tensor]]:
    """Every rank's error on rank 0, in rank order; an empty list elsewhere."""
    torch, dist = import_torch(), import_torch("torch.distributed")
    own = {bucket: error.detach() for bucket, error in sorted(state.error_dict.items())}
    rank, root = dist.get_rank(group), dist.get_global_rank(group, 0)
    if rank != 0:
        for error in own.values():
            dist.send(error.contiguous(), dst=root, group=group)
        return []
    gathered = [{bucket: error.cpu() for bucket, error in own.items()}]
    for other in range(1, dist.get_world_size(group)):
        received = {}
        for bucket, error in own.items():
            buffer = torch.empty_like(error, memory_format=torch.contiguous_format)
            dist.recv(buffer, src=dist.get_global_rank(group, other), group=group)
            received[bucket] = buffer.cpu()
        gathered.append(received)
    return gathered


def _record_of(state: PowerSGDState) -> PowerSGDRecord:
    """The contents of a live ``PowerSGDState``; tensors on the CPU share their memory with it."""
    slots = {field.name: getattr(state, field.name) for field in dataclasses.fields(PowerSGDRecord)}
    for name in BUFFERS:
        slots[name] = {bucket: to_numpy(tensor) for bucket, tensor in slots[name].items()}
    return record_from_slots(slots)


def write_document(path: pathlib.Path, document: Any) -> None:
    """Writes a file by ``torch.save``, whole or not at all.

    Raises:
      OSError: The disk is full, for example.
    """
    torch = import_torch()
    with replacing(path) as file:
        try:
            torch.save(document, file)
        except RuntimeError as error:
            # What torch says of its own archive hides what the system said of the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
