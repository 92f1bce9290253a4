"""Replicas: the mapped axes, the collectives over them, and the per-replica parts of states.

All that differs between `jax.vmap`, `jax.pmap` and `jax.shard_map`, and between Auto and Explicit
axes, is decided here. The wings below write one code for all of them.
"""
