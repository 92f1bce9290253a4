"""Views leaves as matrices, multiplies them with thin factors, and makes orthonormal bases.

This is the linear algebra of PowerSGD, without communication: each replica computes it alone.
`powersgd`, the counts of bytes and the adviser use it.
"""
