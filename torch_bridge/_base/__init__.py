"""Errors, arrays of both frameworks, and torch's hook state as plain values."""
