"""Reducers: Optax transformations from local gradients to one average."""
