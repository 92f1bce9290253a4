"""Moves reducer states between replicas, meshes, checkpoints and ranks."""
