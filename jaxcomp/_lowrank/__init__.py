"""Views leaves as matrices, multiplies them with thin factors, and makes orthonormal bases."""
