"""Errors, arrays of both frameworks, and torch's hook state as plain values.

All other wings use it, and it uses none of them. It is also the only place that imports torch.
"""
