"""PowerSGD in NumPy float64, one matrix at a time, written from the paper's Algorithms 1 and 2."""

import numpy as np

from tests.helpers.rounding import rounding


def orthogonalize(matrix):
    return np.linalg.qr(matrix)[0]


class Reference:
    """The state of one ``(rows, cols)`` matrix on every replica."""

    def __init__(self, replicas, rows, cols, q):
        self.residual = np.zeros((replicas, rows, cols))
        self.q = np.asarray(q, np.float64)
        # The largest condition number of an orthogonalised matrix, the largest value of a factor.
        self.condition = self.largest = 0.0

    def step(self, gradients, decay=1.0):
        """Returns the output ``(rows, cols)`` for local gradients ``(replicas, rows, cols)``."""
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
    """Asserts that outputs and residuals are the reference's, up to rounding.

    The gradients are ``(replicas, steps, rows, cols)``. The tolerance holds for condition numbers
    of at most `worst` and residuals in `dtype`. Returns the last Q factor and the tolerance.
    """
    n, steps, rows, cols = gradients.shape
    reference = Reference(n, rows, cols, q)
    for t in range(steps):
        expected = reference.step(gradients[:, t])
        how = {"largest": reference.largest, "condition": min(reference.condition, worst)}
        # Sums in each step so far: the mean, the products with both factors, and their product.
        allowed = rounding(*[n, rows, cols, np.shape(q)[-1]] * (t + 1), **how)
        allowed += rounding(n, largest=reference.largest, dtype=dtype) if dtype else 0
        np.testing.assert_allclose(outputs[t], expected, rtol=0, atol=allowed)
    np.testing.assert_allclose(residual, reference.residual, rtol=0, atol=allowed)
    return reference.q, allowed
