"""Chooses ranks for a budget of bytes or of loss."""
