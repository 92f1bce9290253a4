"""PowerSGD in NumPy, written from the paper's Algorithms 1 and 2; float64, one matrix at a time."""

from __future__ import annotations

import numpy as np


def orthogonalize(matrix: np.ndarray) -> np.ndarray:
    return np.linalg.qr(matrix)[0]


class Reference:
    """State of one ``(rows, cols)`` matrix on every replica."""

    def __init__(self, replicas: int, rows: int, cols: int, q: np.ndarray):
        self.residual = np.zeros((replicas, rows, cols))
        self.q = np.asarray(q, np.float64)
        self.condition = self.largest = 0.0  # of what was orthogonalised, of what was multiplied

    def step(self, gradients: np.ndarray, decay: float = 1.0) -> np.ndarray:
        """Local gradients ``(replicas, rows, cols)`` to the output ``(rows, cols)``."""
        m = gradients + decay * self.residual
        left = (m @ orthogonalize(self.q)).sum(0)
        self.condition = max(self.condition, np.linalg.cond(left))
        self.largest = max(self.largest, np.abs(m).max())
        p = orthogonalize(left)
        own = m.transpose(0, 2, 1) @ p
        self.q = own.mean(0)
        self.residual = m - p @ own.transpose(0, 2, 1)
        return p @ self.q.T
