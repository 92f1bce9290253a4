"""torch's hook state as NumPy arrays: buckets, layouts and checkpoints.

`load` makes a `Checkpoint` of one file or of one per rank. The hook's buffers do not
name their parameters. A bucket layout says which part of a buffer belongs to which parameter.
"""
