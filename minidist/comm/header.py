"""What both sides of a message must agree on, in 64 bytes.

Receiving float32 data into a float64 buffer gives numbers that look like numbers, and two different collectives that
meet exchange each other's bytes in silence. So every message carries a header: operation, dtype, size, shape. In the
simulated world the two are compared when send meets receive; under MPI the header travels first, as a message of its
own, and is compared before the payload is received (an MPI library may crash on a message longer than its buffer).

Proved by: tests/comm/test_header.py, tests/comm/mpi/test_failures.py
"""

import hashlib
import math
import struct
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from minidist.base.errors import MismatchError

HEADER_BYTES = 64
_DIMS = 5
_ABSENT = 2**32 - 1
_LAYOUT = struct.Struct(f"<24s12sq{_DIMS}I")  # operation, dtype, payload bytes, shape
assert _LAYOUT.size == HEADER_BYTES


class Header(NamedTuple):
    operation: str
    dtype: str
    nbytes: int
    shape: tuple[int, ...]

    def describe(self) -> str:
        return f"{self.operation} of {self.dtype}{list(self.shape)} ({self.nbytes} B)"


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the dtype in words: "float32", "bfloat16". Cached: the dtype's own `str` takes a microsecond."""
    return str(dtype)


def header_of(operation: str, array: np.ndarray) -> Header:
    """Return the header of one side of a message."""
    return Header(operation, dtype_name(array.dtype), array.nbytes, array.shape)


@lru_cache(4096)
def pack(header: Header) -> bytes:
    """Return the header in 64 bytes.

    Longer names end in a digest of themselves; of more than five dims the leading ones are multiplied.
    """
    shape = header.shape
    if len(shape) > _DIMS:
        shape = (math.prod(shape[: 1 - _DIMS]), *shape[1 - _DIMS :])
    # One field per dim; unused fields hold a mark of their own, because 0 is a size.
    dims = [min(n, _ABSENT - 1) for n in shape] + [_ABSENT] * (_DIMS - len(shape))
    return _LAYOUT.pack(_fit(header.operation, 24), _fit(header.dtype, 12), header.nbytes, *dims)


def _fit(text: str, width: int) -> bytes:
    data = text.encode()
    return data if len(data) <= width else data[: width - 4] + hashlib.blake2b(data, digest_size=2).hexdigest().encode()


def unpack(data: bytes) -> Header:
    """Return the header that `pack` packed."""
    operation, dtype, nbytes, *dims = _LAYOUT.unpack(data)
    shape = tuple(n for n in dims if n != _ABSENT)
    return Header(operation.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode(), nbytes, shape)


def compare(sent: Header, expected: Header, source: int, destination: int, where: str, name: str = "") -> None:
    """Raise MismatchError naming both sides when the headers differ.

    name: of the operation expected, in full where packing has shortened it.
    """
    if sent == expected:
        return

    # The first difference is the cause: other operations have other dtypes, other dtypes other sizes.
    if sent.operation != expected.operation:
        what, remedy = "operation", "every rank of a communicator must call the same collectives in the same order"
    elif sent.dtype != expected.dtype:
        what, remedy = "dtype", "convert one side, or allocate the receive buffer with the sender's dtype"
    else:
        what, remedy = "shape", "both sides must use the same shape"

    # Both were shortened to 24 bytes; show the name in full.
    if name:
        sent = sent._replace(operation=name) if sent.operation == expected.operation else sent
        expected = expected._replace(operation=name)
    raise MismatchError(
        f"{what} mismatch: rank {source} sent {sent.describe()}, rank {destination} expected {expected.describe()} "
        f"at {where}; {remedy}"
    )
