"""PowerSGD in NumPy, written from the paper's Algorithms 1 and 2; float64, one matrix at a time."""

import numpy as np

from tests.helpers.rounding import rounding


def orthogonalize(matrix):
    return np.linalg.qr(matrix)[0]


class Reference:
    """State of one ``(rows, cols)`` matrix on every replica."""

    def __init__(self, replicas, rows, cols, q):
        self.residual = np.zeros((replicas, rows, cols))
        self.q = np.asarray(q, np.float64)
        self.condition = self.largest = 0.0  # of what was orthogonalised, of what was multiplied

    def step(self, gradients, decay=1.0):
        """Turns local gradients ``(replicas, rows, cols)`` into the output ``(rows, cols)``."""
        m = gradients + decay * self.residual
        left = (m @ orthogonalize(self.q)).sum(0)
        self.condition = max(self.condition, np.linalg.cond(left))
        self.largest = max(self.largest, np.abs(m).max())
        p = orthogonalize(left)
        own = m.transpose(0, 2, 1) @ p
        self.q = own.mean(0)
        self.residual = m - p @ own.transpose(0, 2, 1)
        return p @ self.q.T


def assert_steps(gradients, outputs, residual, q, worst=np.inf, dtype=None):
    """Asserts that ``(replicas, steps, rows, cols)`` gave such outputs and left such residuals.

    Up to rounding, for conditions of at most `worst` and residuals in `dtype`; returns the last
    factor and what is allowed of a value.
    """
    n, steps, rows, cols = gradients.shape
    reference = Reference(n, rows, cols, q)
    for t in range(steps):
        expected = reference.step(gradients[:, t])
        how = {"largest": reference.largest, "condition": min(reference.condition, worst)}
        # Of each step so far: the mean, the products with both factors, and theirs.
        allowed = rounding(*[n, rows, cols, np.shape(q)[-1]] * (t + 1), **how)
        allowed += rounding(n, largest=reference.largest, dtype=dtype) if dtype else 0
        np.testing.assert_allclose(outputs[t], expected, rtol=0, atol=allowed)
    np.testing.assert_allclose(residual, reference.residual, rtol=0, atol=allowed)
    return reference.q, allowed
