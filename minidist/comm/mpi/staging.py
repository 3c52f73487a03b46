"""Arrays on a GPU on their way through an MPI that only knows host memory.

The stream is synchronised before each message (MPI knows nothing of streams), and the bytes go through pinned host
memory. The trace marks such messages `staged`. With NumPy arrays none of this runs.
"""

from typing import Any

import numpy as np


def is_device_array(array: Any) -> bool:
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def pinned_like(array: Any) -> np.ndarray:
    """An uninitialised host array of the same shape and dtype, in pinned memory."""
    import cupyx

    return cupyx.empty_pinned(array.shape, array.dtype)  # type: ignore[no-any-return]


def fetch(array: Any) -> np.ndarray:
    """Device to pinned host memory; returns when the bytes are there."""
    import cupy

    host = pinned_like(array)
    array.get(out=host)
    cupy.cuda.get_current_stream().synchronize()
    return host


def put(host: np.ndarray, array: Any) -> None:
    """Host to device; returns when the bytes are there."""
    import cupy

    array.set(host)
    cupy.cuda.get_current_stream().synchronize()
