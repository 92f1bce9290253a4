"""Finds for each torch tensor its Flax leaf."""
