"""Our solutions of lesson 06d; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_gather
from minidist.core.comm import Comm


def error_feedback(comm: Comm, gradients: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Send the k largest elements of the gradient plus the residual; the rest is the new residual."""
    sums, residual = np.zeros_like(gradients), np.zeros(gradients.shape[1])
    for total, gradient in zip(sums, gradients, strict=True):
        residual += gradient
        places = np.argsort(-np.abs(residual))[:k]
        sent = all_gather(comm, np.concatenate([places, residual[places]])).reshape(comm.size, 2, k)
        residual[places] = 0.0
        for of_rank, values in sent:
            total[of_rank.astype(int)] += values
    return sums, residual


SOLUTIONS = {"06d.error_feedback": error_feedback}
