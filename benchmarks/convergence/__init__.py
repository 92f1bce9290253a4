"""Measures held-out loss against steps and bytes."""
