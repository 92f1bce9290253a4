"""Leaves as matrices, products with thin factors, orthonormal bases."""
