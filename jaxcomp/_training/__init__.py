"""Wraps gradient functions and optimizers of a training step around a reducer."""
