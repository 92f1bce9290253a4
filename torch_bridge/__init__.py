"""PyTorch DDP checkpoints with PowerSGD, to Flax/JAX and back, losing nothing."""

from torch_bridge._buckets import BucketEntry, BucketLayout
from torch_bridge._checkpoint import Checkpoint, load
from torch_bridge._errors import CheckpointMismatch, UnsafeCheckpoint
from torch_bridge._schema import PowerSGDRecord, RandomStateRecord

__all__ = [
    "BucketEntry",
    "BucketLayout",
    "Checkpoint",
    "CheckpointMismatch",
    "PowerSGDRecord",
    "RandomStateRecord",
    "UnsafeCheckpoint",
    "load",
]
