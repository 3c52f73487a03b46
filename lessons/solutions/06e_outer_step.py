"""Our solutions of lesson 06e; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm


def outer_step(
    comm: Comm, common: np.ndarray, weights: np.ndarray, momentum: np.ndarray, lr: float, mu: float
) -> tuple[np.ndarray, np.ndarray]:
    """Average the weights; the way from the common ones to the average is the gradient of a Nesterov step."""
    average = weights.copy()
    all_reduce(comm, average, "avg")
    gradient = common - average
    momentum = mu * momentum + gradient
    return common - lr * (gradient + mu * momentum), momentum


SOLUTIONS = {"06e.outer_step": outer_step}
