"""The bytes of a buffer that is not NumPy's, such as a tensor of PyTorch, without a copy.

Such an object says by DLPack where its elements lie. NumPy's array of it may be read-only; MPI looks at the memory.

Proved by: tests/mpi_ranks/test_buffers.py
"""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.debug.mpi_ranks.constants import Unsupported, unsupported

CPU, HOST_PINNED = 1, 3


def bytes_at(address: int, size: int, owner: Any = None) -> np.ndarray:
    """Return `size` bytes of memory from an address. owner: what must live as long."""
    if not size:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    found: np.ndarray = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    return found


def has_interface(value: Any) -> bool:
    """Return whether an object says by DLPack, or as arrays on GPUs do, where its elements lie."""
    return hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def bytes_of(value: Any) -> tuple[np.ndarray, str]:
    """Return the bytes of such an object, and the code of its elements' type; NotImplementedError for one on a GPU."""
    if not hasattr(value, "__dlpack__"):
        # Without a driver for GPUs the memory that this interface describes is the host's.
        if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
            raise _on_gpu()
        array = np.asarray(SimpleNamespace(__array_interface__={**value.__cuda_array_interface__, "version": 3}))
        return _contiguous(array).view(np.uint8), array.dtype.char
    if value.__dlpack_device__()[0] not in (CPU, HOST_PINNED):
        raise _on_gpu()
    # Without a version, for which NumPy would ask: as for MPI, an array that may not be written cannot be exported.
    exporter = SimpleNamespace(__dlpack__=lambda **_: value.__dlpack__(), __dlpack_device__=value.__dlpack_device__)
    array = np.from_dlpack(exporter)
    return bytes_at(_contiguous(array).ctypes.data, array.nbytes, (array, value)), array.dtype.char


def _contiguous(array: np.ndarray) -> np.ndarray:
    """Return the elements in the order in which they lie in memory, if nothing else lies between them."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise BufferError("the buffer of a message is not contiguous; pass a contiguous copy")
    return (array if array.flags.c_contiguous else array.T).reshape(-1)


def _on_gpu() -> Unsupported:
    return unsupported("a message in the memory of a GPU", "copy it to a NumPy array")
