"""Replicas: the mapped axes, the collectives over them, and the per-replica parts of states."""
