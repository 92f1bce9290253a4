"""torch's hook state in NumPy: buckets, checkpoints, layouts."""
