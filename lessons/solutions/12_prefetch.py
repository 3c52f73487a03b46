"""Our solutions of lesson 12; they are not a part of the package."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.comm import Comm


def forward(
    comm: Comm,
    layers: int,
    x: float,
    gather: Callable[[int], Any],
    compute: Callable[[int, np.ndarray, float], float],
) -> float:
    """Start the gather of the next layer before the computation of this one; hold two layers and no more."""
    coming: Any = gather(0) if layers else None
    for layer in range(layers):
        weights = coming.wait()
        if layer + 1 < layers:
            coming = gather(layer + 1)
        x = compute(layer, weights, x)
    return x


SOLUTIONS = {"12.prefetch": forward}
