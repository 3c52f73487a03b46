"""Our solutions of lesson 17c; they are not a part of the package."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Gradient = Callable[
    [int, np.ndarray], np.ndarray
]  # (mini-batch, weights) -> its gradient at these weights
RATE = 0.25


def two_versions(
    order: Sequence[str], weights: np.ndarray, gradient: Gradient, m: int
) -> Iterator[np.ndarray]:
    """Run with two versions: micro-batch k of batches of m uses version max(k // m - 1, 0); a batch is one update."""
    versions, total = {0: weights}, np.zeros_like(weights)
    for action in order:
        kind, k = action[0], int(action[1:])
        if kind == "F":
            continue
        total = total + gradient(k, versions[max(k // m - 1, 0)])
        if k % m == m - 1:
            latest = max(versions)
            versions = {latest: versions[latest], latest + 1: versions[latest] - RATE * total}
            total = np.zeros_like(weights)
            yield versions[latest + 1]


SOLUTIONS = {"17c.two_versions": two_versions}
