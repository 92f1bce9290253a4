"""Predicted step times, and whether to compress at all."""
