"""Our solutions of lesson 06d; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_gather
from minidist.core.comm import Comm


def sign_feedback(comm: Comm, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Send a bit per element and one length of the gradient plus the residual; the rest is the new residual."""
    sums, residual = np.zeros_like(gradients), np.zeros(gradients.shape[1])
    for total, gradient in zip(sums, gradients, strict=True):
        corrected = gradient + residual
        length, positive = np.abs(corrected).mean(), corrected >= 0
        residual = corrected - np.where(positive, length, -length)
        lengths = all_gather(comm, np.array([length]))
        bits = all_gather(comm, np.packbits(positive)).reshape(comm.size, -1)
        signs = np.unpackbits(bits, axis=1, count=len(gradient)) * 2.0 - 1.0
        total += lengths @ signs
    return sums, residual


SOLUTIONS = {"06d.sign_feedback": sign_feedback}
