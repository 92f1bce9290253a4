"""The program that XLA makes of an update for a GPU, read on a machine that has none."""
