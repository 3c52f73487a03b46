"""What both sides of a message must agree on, in 64 bytes.

Receiving float32 data into a float64 buffer gives numbers that look like numbers, and two different collectives that
meet exchange each other's bytes in silence. So every message carries a header: operation, dtype, shape, size. In the
simulated world the two headers are compared when send meets receive; under MPI the header travels first, as a message of
its own, and is compared before the payload is received (an MPI library may crash on a message longer than its buffer).
"""

import struct
from typing import NamedTuple

import numpy as np

from minidist.base.errors import MismatchError

HEADER_BYTES = 64
_LAYOUT = struct.Struct("<24s8sq3q")  # operation, dtype, payload bytes, shape (leading dims folded into one): 64 bytes
assert _LAYOUT.size == HEADER_BYTES


class Header(NamedTuple):
    operation: str
    dtype: str
    nbytes: int
    shape: tuple[int, ...]

    def describe(self) -> str:
        return f"{self.operation} of {self.dtype}{list(self.shape)} ({self.nbytes} B)"


def header_of(operation: str, array: np.ndarray) -> Header:
    shape = array.shape
    if len(shape) > 3:  # fold leading dims: the header has room for three
        shape = (int(np.prod(shape[:-2])), *shape[-2:])
    return Header(operation[:24], str(array.dtype)[:8], array.nbytes, shape)


def pack(header: Header) -> bytes:
    shape = (*header.shape, -1, -1, -1)[:3]
    return _LAYOUT.pack(header.operation.encode(), header.dtype.encode(), header.nbytes, *shape)


def unpack(data: bytes) -> Header:
    operation, dtype, nbytes, *shape = _LAYOUT.unpack(data)
    return Header(
        operation.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode(), nbytes, tuple(n for n in shape if n >= 0)
    )


def compare(sent: Header, expected: Header, source: int, destination: int, where: str) -> None:
    """Raise MismatchError naming both sides when the headers differ."""
    if sent == expected:
        return
    if sent.operation != expected.operation:
        what, remedy = "operation", "every rank of a communicator must call the same collectives in the same order"
    elif sent.dtype != expected.dtype:
        what, remedy = "dtype", "convert one side, or allocate the receive buffer with the sender's dtype"
    else:
        what, remedy = "shape", "both sides must use the same shape"
    raise MismatchError(
        f"{what} mismatch: rank {source} sent {sent.describe()}, rank {destination} expected {expected.describe()} "
        f"at {where}; {remedy}"
    )
