"""Our solutions of lesson 12b; they are not a part of the package."""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.comm import Comm


def offloaded_step(
    comm: Comm,
    pieces: int,
    down: Callable[[int], Any],
    step: Callable[[int, np.ndarray], np.ndarray],
    up: Callable[[int, np.ndarray], Any],
) -> None:
    """While piece i steps, the gradient of i + 1 comes down and the values of i - 1 go up."""
    coming: Any = down(0) if pieces else None
    going: Any = None
    for piece in range(pieces):
        gradient = coming.wait()
        coming = down(piece + 1) if piece + 1 < pieces else None
        values = step(piece, gradient)
        if going is not None:
            going.wait()
        going = up(piece, values)
    if going is not None:
        going.wait()


SOLUTIONS = {"12b.offloaded_step": offloaded_step}
