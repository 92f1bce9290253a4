"""Reducers: Optax transformations that turn local gradients into their average."""
