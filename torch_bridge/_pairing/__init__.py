"""Which torch tensor is which Flax leaf."""
