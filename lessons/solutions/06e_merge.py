"""Our solutions of lesson 06e; they are not a part of the package."""

import numpy as np

from minidist.core.comm import Comm


def merge(
    comm: Comm,
    common: np.ndarray,
    own: np.ndarray,
    outer_gradient: np.ndarray,
    lr: float,
    alpha: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Step the common weights, and move this rank's own ones towards them; what it learned meanwhile is not lost."""
    common = common - lr * outer_gradient
    return common, alpha * own + (1 - alpha) * common


SOLUTIONS = {"06e.merge": merge}
