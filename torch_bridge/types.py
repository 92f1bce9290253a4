"""Classes of results, for annotations; you do not construct them."""

from torch_bridge._convert.to_flax import FlaxRun
from torch_bridge._hook.buckets import BucketEntry
from torch_bridge._pairing.pairs import Packing, Pair

__all__ = ["BucketEntry", "FlaxRun", "Packing", "Pair"]
