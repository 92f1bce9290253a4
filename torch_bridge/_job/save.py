"""Runs inside the PyTorch job: records the bucket layout and saves a complete checkpoint.

A file of ``torch.save`` lacks two things that a conversion needs: the errors of the other ranks,
and the order of the parameters in DDP's buckets. Only the running job has them. The functions
import torch when they are called, so ``import torch_bridge`` works without torch.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from torch_bridge._base.errors import CheckpointMismatch
from torch_bridge._base.files import replacing
from torch_bridge._base.framework import import_torch
from torch_bridge._base.plain import plain_copy
from torch_bridge._base.schema import BUFFERS, PowerSGDRecord, record_from_slots
from torch_bridge._base.tensors import to_numpy
from torch_bridge._base.terminal import printable, some, warn
from torch_bridge._hook.arguments import hook_name
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.document import make_document
from torch_bridge._job.example import example_inputs, run_example

if TYPE_CHECKING:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.nn.parallel import DistributedDataParallel


def record_layout(
    ddp_model: DistributedDataParallel, state: PowerSGDState | None = None
) -> BucketLayout:
    """Returns the bucket layout that DDP uses now. Any rank can call it after compression began.

    DDP rebuilds its buckets in the second iteration, with ``static_graph=True`` in the third.

    Args:
      ddp_model: The ``DistributedDataParallel`` model.
      state: The hook's ``PowerSGDState``; the layout is checked against the state's buffers.

    Returns:
      The layout, with the names of ``ddp_model.module.named_parameters()``.

    Raises:
      CheckpointMismatch: The state was made for buckets of other sizes, or DDP has not rebuilt its
        buckets yet. Or a parameter is complex.
      TypeError: `ddp_model` is not a ``DistributedDataParallel`` model.

    Warns:
      UserWarning: Parameters were frozen after DDP had made its buckets.

    Example:
      In a job with the model ``torch.nn.Linear(8, 4)``:

      >>> record_layout(ddp_model).sizes
      (36,)
    """
    require(ddp_model=ddp_model, state=state)
    parameters = dict(ddp_model.module.named_parameters())
    layout = BucketLayout.from_order(_present_order(ddp_model), parameters)
    complex_ones = [name for name in layout.names if parameters[name].is_complex()]
    if complex_ones:
        raise CheckpointMismatch(
            "DDP stores a complex parameter in its buckets as twice as many real numbers, and the "
            "hook compresses another matrix than the parameter. Such a hook state cannot be "
            "converted; save the checkpoint with state=None.",
            unexpected=complex_ones,
        )
    frozen = sorted(set(layout.names) - set(_trained(ddp_model)))
    if frozen:
        warn(
            f"{some(frozen)}: frozen after DDP had made its buckets, so the buckets still contain "
            "them. A layout does not show that. Freeze them in JAX, too, with optax.set_to_zero in "
            "an optax.multi_transform."
        )
    if state is None:
        return layout
    wrong = layout.misfits(state)
    if wrong:
        raise CheckpointMismatch(
            "The hook state belongs to other buckets than those that DDP uses now. Call "
            "record_layout in the run that made the state, after compression began.",
            mis_shaped=wrong,
        )
    if holds_buffers(state) and awaits_rebuild(ddp_model):
        raise CheckpointMismatch(
            "The hook state comes from an earlier job, and DDP has not rebuilt its buckets in this "
            "one: their order is not the state's. Wait for two iterations, or for three with "
            "static_graph=True; torch_bridge.resume_powersgd runs them beforehand."
        )
    return layout


def _trained(ddp_model: DistributedDataParallel) -> list[str]:
    """Returns the names of the parameters that are not frozen, in the order of their definition.

    A tied parameter occurs once. DDP made its buckets of the parameters that were not frozen then.
    """
    ignored = getattr(ddp_model, "parameters_to_ignore", ())
    trained = []
    for name, parameter in ddp_model.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            trained.append(name)
    return trained


def _present_order(ddp_model: DistributedDataParallel) -> list[list[str]]:
    """Returns the parameter names in each of DDP's buckets, in their order."""
    order = []
    names = _trained(ddp_model)
    rebuilt = _logged(ddp_model).get("rebuilt_per_bucket_param_indices")
    # Indices count the parameters that were not frozen when DDP was made.
    if rebuilt and len(rebuilt.replace(",", " ").split()) == len(names):
        for bucket in rebuilt.split(","):
            indices = map(int, bucket.split())
            order.append(list(map(names.__getitem__, indices)))
        return order
    # The buckets are not rebuilt, or DDP did not log them. For a moment this call takes as much
    # memory as all gradients.
    known: dict[Any, str] = {p: name for name, p in ddp_model.module.named_parameters()}
    for bucket in ddp_model.reducer._get_zeros_like_grad_buckets():
        order.append([known[parameter] for parameter in bucket.parameters()])
    return order


# Argument -> an attribute that it must have, the object that it must be, and what not to pass
# instead. Attributes are checked, not classes, because a model from torch.compile works as well.
_WANTED = {
    "ddp_model": (
        "_get_ddp_logging_data",
        "the DistributedDataParallel model",
        "not the module in it",
    ),
    "state": (
        "error_dict",
        "the PowerSGDState",
        "pass None for any other hook. The state of post_localSGD_hook holds nothing to save but "
        "the step",
    ),
    "optimizer": ("state_dict", "the optimizer itself", "not its state_dict()"),
    "scaler": ("get_scale", "the GradScaler itself", "not its state_dict()"),
}


def require(**arguments: Any) -> None:
    """Refuses arguments of the wrong kind; every argument but `ddp_model` may be None.

    Raises:
      TypeError: An argument is of another kind; the message names it.
    """
    for name, value in arguments.items():
        attribute, kind, instead = _WANTED[name]
        absent = value is None and name != "ddp_model"
        if not absent and not hasattr(value, attribute):
            raise TypeError(f"`{name}` must be {kind}, got a {type(value).__name__}; {instead}.")


def awaits_rebuild(ddp_model: DistributedDataParallel) -> bool:
    """Returns whether DDP will still rebuild its buckets."""
    rebuilds = ddp_model.static_graph or not ddp_model.find_unused_parameters
    return rebuilds and not _logged(ddp_model).get("has_rebuilt_buckets")


def _logged(ddp_model: DistributedDataParallel) -> Mapping[str, Any]:
    """Returns DDP's log of its buckets; renews it first, because DDP logs before it rebuilds."""
    if ddp_model.logger is not None:
        ddp_model.logger.set_runtime_stats_and_log()
    return ddp_model._get_ddp_logging_data()


def holds_buffers(state: PowerSGDState) -> bool:
    """Returns whether the state holds errors or factors, so that compression has begun."""
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
    """Writes one complete checkpoint: model, optimizer, hook state with every rank's error, layout.

    Every rank must call it. Rank 0 receives the errors of the other ranks, one rank after the
    other. For each rank it needs CPU memory of one model. It writes one file, under another name
    first, so a crash leaves the previous checkpoint complete. The file holds only tensors and plain
    values, so both ``torch.load(path, weights_only=True)`` and `load` read it.

    Args:
      path: The file to write; an existing file is replaced.
      ddp_model: The ``DistributedDataParallel`` model.
      state: The hook's ``PowerSGDState``, or None for another hook or no hook.
      optimizer: The optimizer, or None. Its ``state_dict()`` is saved, with the parameter names of
        each group, as torch writes them for an optimizer of ``named_parameters()``.
      extra: Further tensors, arrays and plain values, also in dictionaries and lists, such as
        ``{"epoch": 3}``. The `extra` of rank 0 is saved.
      example: Inputs of the model, a tensor or a tuple of tensors; a few rows are enough. The file
        stores them with the model's outputs in evaluation mode. With these a conversion finds out
        which layer is which, and compares the outputs. The file also records in which order the
        parameters are used, and the four largest and four smallest values of each array that a
        parameter is applied to. With this record a conversion finds the layers one after the other.
        Rank 0 runs the module once; its modes, buffers, gradients and random number generators stay
        as they were. ``torch.compile`` is off in this run.
      scaler: The ``GradScaler`` of the training loop, or None. Under a scaler the errors are in
        units of its scale, and a conversion divides by it. Its ``state_dict()`` is saved as
        ``extra["scaler"]``, unless `extra` has such an entry.

    Raises:
      TypeError: The model, optimizer, scaler or example is of another kind.
      CheckpointMismatch: The state was made for other buckets, or DDP has not rebuilt its buckets
        yet; raised on every rank.
      RuntimeError: Rank 0 could not write the file; raised on every rank, with the reason.

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
    require(ddp_model=ddp_model, state=state, optimizer=optimizer, scaler=scaler)
    inputs = None
    if example is not None:
        inputs = example_inputs(example)
    group = getattr(state, "process_group", None) or ddp_model.process_group
    errors = []
    if state is not None and holds_buffers(state):
        layout = record_layout(ddp_model, state)
    else:  # no bucket has a state yet, but the names say which parameters are not frozen
        parameters = dict(ddp_model.module.named_parameters())
        layout = BucketLayout.from_order([_trained(ddp_model)], parameters)
    if state is not None:
        errors = _gather_errors(state, group)
    problem = [None]  # broadcast, so that no rank goes on believing in a file that is not there
    if dist.get_rank(group) == 0:
        try:
            module = ddp_model.module
            hook = None
            hooks = getattr(ddp_model, "_comm_hooks", ())  # torch has no public name for these
            if hooks:
                hook = hook_name(hooks[-1][0])
            scale = None
            beside = dict(extra or {})
            if scaler is not None:
                scale = scaler.get_scale()
                beside.setdefault("scaler", scaler.state_dict())
            groups = None
            if optimizer is not None:
                groups = _plain(_named_groups(optimizer, module), "the optimizer")
            recorded = None
            calls = {}
            if inputs is not None:
                arrays, outputs, calls = run_example(module, inputs)
                recorded = (arrays, outputs)
            checkpoint = Checkpoint(
                model=_plain(module.state_dict(), "the model"),
                powersgd=_records(state, errors),
                optimizer=groups,
                layout=layout,
                extra=_plain(beside, "`extra`"),
                world_size=dist.get_world_size(group),
                hook=hook,
                example=recorded,
                loss_scale=scale,
                calls=calls,
            )
            write_document(pathlib.Path(path), make_document(checkpoint))
        except Exception as error:  # of any class, because the other ranks wait for the message
            problem = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(problem, src=dist.get_global_rank(group, 0), group=group)
    if problem[0] is not None:
        raise RuntimeError(f"Rank 0 could not write {path}: {problem[0]}")


def _named_groups(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> dict[str, Any]:
    """Returns the optimizer's ``state_dict()``, with the names of each group's parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}  # by identity
    document = dict(optimizer.state_dict())
    groups = []
    for group, live in zip(document["param_groups"], optimizer.param_groups, strict=True):
        held = list(map(names.get, live["params"]))
        if None in held:  # the optimizer has parameters of another module
            return document
        groups.append(dict(group, param_names=held))
    document["param_groups"] = groups
    return document


def _plain(entries: Mapping[str, Any], whose: str) -> dict[str, Any]:
    kept, lacking = plain_copy(entries)
    if lacking:
        raise ValueError(
            f"torch.load(weights_only=True) does not read {printable(', '.join(lacking))} of "
            f"{whose}. Pass plain values instead: str(path), vars(args), scheduler.state_dict()"
        )
    return kept


def _gather_errors(state: PowerSGDState, group: Any) -> list[dict[int, torch.Tensor]]:
    """Returns the errors of all ranks, in rank order, on rank 0; an empty list on other ranks."""
    torch = import_torch()
    dist = import_torch("torch.distributed")
    errors = jax.tree.map(torch.Tensor.detach, dict(sorted(state.error_dict.items())))
    if dist.get_rank(group) != 0:
        root = dist.get_global_rank(group, 0)
        for error in errors.values():
            dist.send(error.contiguous(), dst=root, group=group)
        return []
    # One rank after the other, because a gather would hold the errors of all on the device.
    gathered = [jax.tree.map(lambda error: error.cpu(), errors)]
    for other in range(1, dist.get_world_size(group)):
        received = {}
        for bucket, error in errors.items():
            # All ranks have buckets of the same sizes; only the values differ.
            buffer = torch.empty_like(error, memory_format=torch.contiguous_format)
            dist.recv(buffer, src=dist.get_global_rank(group, other), group=group)
            received[bucket] = buffer.cpu()
        gathered.append(received)
    return gathered


def _records(
    state: PowerSGDState | None, errors: Sequence[Mapping[int, torch.Tensor]]
) -> tuple[PowerSGDRecord, ...]:
    """Returns the record of each rank; on the CPU its arrays share memory with the state."""
    if state is None:
        return ()
    slots = {}
    for field in dataclasses.fields(PowerSGDRecord):
        slots[field.name] = getattr(state, field.name)
    for name in BUFFERS:
        slots[name] = jax.tree.map(to_numpy, slots[name])
    record = record_from_slots(slots)
    # The errors stay tensors, because `write_document` needs tensors.
    records = []
    for error in errors:
        records.append(dataclasses.replace(record, error_dict=error))
    return tuple(records)


def write_document(path: pathlib.Path, document: Any) -> None:
    """Writes a file with ``torch.save``, completely or not at all.

    Raises:
      OSError: The disk is full, for example.
    """
    torch = import_torch()
    with replacing(path) as file:
        try:
            torch.save(document, file)
        except RuntimeError as error:
            # torch's error about its archive hides the system's error about the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
