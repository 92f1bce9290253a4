"""Ranks for a budget of bytes."""
