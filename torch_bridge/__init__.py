"""PyTorch DDP checkpoints with PowerSGD, to Flax/JAX and back, losing nothing."""

from torch_bridge._buckets import BucketEntry, BucketLayout
from torch_bridge._checkpoint import Checkpoint, load
from torch_bridge._errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._pair import pair
from torch_bridge._pairing import Pairing
from torch_bridge._params import params_from_torch, params_to_torch
from torch_bridge._schema import PowerSGDRecord, RandomStateRecord

__all__ = [
    "BucketEntry",
    "BucketLayout",
    "Checkpoint",
    "CheckpointMismatch",
    "Pairing",
    "PowerSGDRecord",
    "RandomStateRecord",
    "UnsafeCheckpoint",
    "load",
    "pair",
    "params_from_torch",
    "params_to_torch",
]
