"""Measures updates and training steps on a GPU, and checks every form of the reducers there."""
