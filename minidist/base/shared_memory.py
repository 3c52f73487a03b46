"""Whether two arrays share memory, and whether an array has elements that a message would not send.

Proved by: tests/comm/test_conformance.py, tests/collectives/test_collectives.py
"""

from typing import Any

import numpy as np

MASKED = "a masked array, whose mask is not sent; pass array.filled(0), or the data and the mask"


def is_masked(array: Any) -> bool:
    """Return whether some elements of the array are masked, which a message or a sum would not respect."""
    return type(array) is not np.ndarray and hasattr(array, "mask")


def may_overlap(a: Any, b: Any) -> bool:
    """Return whether two arrays may share memory."""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size > 0 and np.may_share_memory(a, b)
