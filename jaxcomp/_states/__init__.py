"""Moves reducer states between replicas, meshes, checkpoints and ranks.

These functions run between steps. They know no reducer by name: a state's class says which of its
fields differ between replicas, and `jaxcomp._mesh.per_replica` reads it.
"""
