"""torch's hook state as NumPy arrays: buckets, layouts and checkpoints."""
