"""Moves PyTorch DDP checkpoints with PowerSGD to Flax/JAX and back, without loss.

Functions that make torch tensors or run in a torch job need torch. Without torch they raise a
``ModuleNotFoundError`` that says what to install. All other functions work without torch.

`torch_bridge.types` has the classes that you need only in annotations.
"""

from torch_bridge._base.errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._base.schema import PowerSGDRecord
from torch_bridge._convert.optimizer import optimizer_from_torch, optimizer_to_torch
from torch_bridge._convert.params import params_from_torch, params_to_torch
from torch_bridge._convert.powersgd import powersgd_from_torch, powersgd_to_torch
from torch_bridge._convert.sampling import sharded_indices
from torch_bridge._convert.to_flax import to_flax
from torch_bridge._convert.to_torch import to_torch
from torch_bridge._hook.arguments import powersgd_kwargs_from_torch, reducer_from_torch
from torch_bridge._hook.buckets import BucketLayout
from torch_bridge._hook.checkpoint import Checkpoint
from torch_bridge._hook.infer import infer_layout
from torch_bridge._hook.load import load
from torch_bridge._job.example import run_example
from torch_bridge._job.resume import resume_powersgd, state_from_record, waiting_hook
from torch_bridge._job.save import record_layout, save_checkpoint
from torch_bridge._pairing.leaves import matrix_dims_of, torch_matrix_dims
from torch_bridge._pairing.pair import pair

__all__ = [
    "BucketLayout",
    "Checkpoint",
    "CheckpointMismatch",
    "PowerSGDRecord",
    "UnsafeCheckpoint",
    "infer_layout",
    "load",
    "matrix_dims_of",
    "optimizer_from_torch",
    "optimizer_to_torch",
    "pair",
    "params_from_torch",
    "params_to_torch",
    "powersgd_from_torch",
    "powersgd_kwargs_from_torch",
    "powersgd_to_torch",
    "record_layout",
    "reducer_from_torch",
    "resume_powersgd",
    "run_example",
    "save_checkpoint",
    "sharded_indices",
    "state_from_record",
    "to_flax",
    "to_torch",
    "torch_matrix_dims",
    "waiting_hook",
]
