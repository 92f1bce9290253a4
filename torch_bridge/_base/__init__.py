"""Errors, arrays across the frameworks, and torch's hook state as plain values."""
