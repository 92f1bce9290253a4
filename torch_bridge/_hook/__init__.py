"""torch's hook state as NumPy arrays: buckets, layouts and checkpoints.

`load` makes a `Checkpoint` of one file or of one per rank. The hook's buffers have no names in
them, so a bucket layout says which part belongs to which parameter.
"""
