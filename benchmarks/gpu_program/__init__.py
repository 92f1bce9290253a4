"""Reads the program that XLA compiles of an update for a GPU, on a machine without a GPU."""
