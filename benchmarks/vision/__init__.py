"""Compression under SGD with momentum: a residual convolutional network on images of digits."""
