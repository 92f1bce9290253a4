"""Held-out loss against steps and bytes."""
