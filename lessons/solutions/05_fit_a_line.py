"""Our solutions of lesson 05; they are not a part of the package."""

from collections.abc import Sequence

import numpy as np


def fit_a_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit by least squares of the *relative* errors (each equation divided by its seconds), again with less weight on
    outliers.
    """
    n, s = np.asarray(sizes, float), np.asarray(seconds, float)
    weight = np.ones_like(s)
    alpha = beta = 0.0
    for _ in range(20):
        rows = np.stack([np.ones_like(n), n], axis=1) * (weight / s)[:, None]
        scale = np.abs(rows).max(axis=0)  # bytes and seconds differ by many decades
        alpha, beta = np.linalg.lstsq(rows / scale, weight, rcond=None)[0] / scale
        error = np.abs((alpha + beta * n) / s - 1)
        weight = 1 / np.maximum(error, 0.02)  # least absolute errors: outliers hardly count
    return float(alpha), float(beta)


SOLUTIONS = {"05.fit_a_line": fit_a_line}
