"""Reads the bytes of a file into plain values, without executing anything.

The value has the structure of the file: dictionaries, lists, numbers and NumPy arrays. What they
mean is for the wings below.
"""
