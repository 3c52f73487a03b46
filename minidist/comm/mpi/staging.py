"""Copies arrays on a GPU to host memory and back, for an MPI that only knows host memory.

The stream is synchronised before each message (MPI knows nothing of streams), and the bytes go through pinned host
memory. The trace marks such messages `staged`. With NumPy arrays none of this runs.

Proved by: tests/comm/mpi/test_staging.py
"""

from typing import Any

import numpy as np


def is_device_array(array: Any) -> bool:
    """Return whether the array is on a GPU."""
    return not isinstance(array, np.ndarray) and hasattr(array, "__cuda_array_interface__")


def pinned_like(array: Any) -> np.ndarray:
    """Return an uninitialised host array of the same shape and dtype, in pinned memory."""
    import cupyx

    return cupyx.empty_pinned(array.shape, array.dtype)  # type: ignore[no-any-return]


def fetch(array: Any) -> np.ndarray:
    """Copy to pinned host memory; return when the bytes are there."""
    import cupy

    host = pinned_like(array)
    array.get(out=host)
    cupy.cuda.get_current_stream().synchronize()
    return host


def put(host: np.ndarray, array: Any) -> None:
    """Copy to the device; return when the bytes are there."""
    import cupy

    array.set(host)
    cupy.cuda.get_current_stream().synchronize()
