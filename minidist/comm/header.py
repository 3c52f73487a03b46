"""What both sides of a message must agree on, in 64 bytes.

Receiving float32 data into a float64 buffer gives wrong numbers, and two different collectives that meet exchange each
other's bytes, without an error. So every message has a header: operation, dtype, size, shape. In the simulated world
both headers are compared when send meets receive. Under MPI the header is a separate message, which is compared before
the payload is received (an MPI library may crash on a message that is longer than its buffer).
Its last four bytes say which collective calls the sender made before (see `call_log`), and what the payload is.

Proved by: tests/comm/test_header.py, tests/comm/mpi/test_failures.py
"""

import hashlib
import math
import re
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from minidist.base.arrays import dtype_name
from minidist.base.errors import MismatchError

HEADER_BYTES = 64
_DIMS = 5
_NAME = 14  # bytes of an operation's name, where it and its arguments are too long
_ABSENT = 2**32 - 1
_OPERATION, _DTYPE = 24, 10  # bytes
# operation, dtype, payload bytes (the lower 4 and the upper 2), shape
_LAYOUT = struct.Struct(f"<{_OPERATION}s{_DTYPE}sIH{_DIMS}I")
KEY_BYTES = _LAYOUT.size  # then follow the calls before this one (2), and the checksum of the payload (2; 0: none)
EQUAL_BYTES = KEY_BYTES + 2  # what both sides must have equal: all but the checksum
assert EQUAL_BYTES + 2 == HEADER_BYTES
NO_CALLS = NO_CHECKSUM = bytes(2)


class Header(NamedTuple):
    operation: str
    dtype: str
    nbytes: int
    shape: tuple[int, ...]

    def describe(self) -> str:
        return f"{self.operation} of {self.dtype}{list(self.shape)} ({self.nbytes} B)"


def header_of(operation: str, array: np.ndarray) -> Header:
    """Return the header of one side of a message."""
    return Header(operation, dtype_name(array.dtype), array.nbytes, array.shape)


@lru_cache(4096)
def packed(operation: str, dtype: np.dtype[Any], nbytes: int, shape: tuple[int, ...]) -> bytes:
    """Return the packed header of one side of a message; cached, because this takes as long as a short message."""
    return pack(Header(operation, dtype_name(dtype), nbytes, shape))


def pack(header: Header) -> bytes:
    """Return what both sides of a message must have equal, but for the calls before it, in KEY_BYTES bytes.

    Longer names are shortened; of more than five dims the leading ones are multiplied.
    """
    shape = header.shape
    if len(shape) > _DIMS:
        shape = (math.prod(shape[: 1 - _DIMS]), *shape[1 - _DIMS :])
    # One field per dim; unused fields hold a mark, because 0 is a size.
    dims = [min(n, _ABSENT - 1) for n in shape] + [_ABSENT] * (_DIMS - len(shape))
    operation, dtype = _fit_operation(header.operation), _fit(header.dtype, _DTYPE)
    return _LAYOUT.pack(operation, dtype, header.nbytes % 2**32, header.nbytes // 2**32, *dims)


def checksum_bytes(checksum: int) -> bytes:
    """Return two bytes of the checksum of a payload, with which a header ends; the receiver compares them."""
    return (checksum & 0xFFFF or 1).to_bytes(2, "little")


def is_payload(header: bytes | bytearray, checksum: int) -> bool:
    """Return whether a payload with this checksum is the one that the header announces; yes where it says nothing."""
    return header[EQUAL_BYTES:] in (NO_CHECKSUM, checksum_bytes(checksum))


def has_checksum(header: bytes | bytearray) -> bool:
    """Return whether a header says what its payload's checksum is."""
    return header[EQUAL_BYTES:] != NO_CHECKSUM


def _fit(text: str, width: int) -> bytes:
    """Return the text in at most `width` bytes; a longer one ends in a digest of itself."""
    data = text.encode()
    return data if len(data) <= width else data[: width - 4] + hashlib.blake2b(data, digest_size=2).hexdigest().encode()


def _fit_operation(text: str) -> bytes:
    """Return an operation and its arguments ("broadcast/ring root 1 [2, 3]") in at most 24 bytes.

    Each of the two parts has its own place, so that a receiver sees which of them differs.
    """
    name, space, arguments = text.partition(" ")
    if len(text.encode()) <= _OPERATION or not space:
        return _fit(text, _OPERATION)
    return _fit(name, _NAME) + b" " + _fit(arguments, _OPERATION - 1 - _NAME)


def unpack(data: bytes | bytearray) -> Header:
    """Return the header that `pack` packed, from the first bytes of `data`."""
    operation, dtype, low, high, *dims = _LAYOUT.unpack_from(data)
    shape = tuple(n for n in dims if n != _ABSENT)
    return Header(operation.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode(), low + 2**32 * high, shape)


# What ranks say of the gradients and weights that they send: `Bucket.equal`, `FSDPUnit`, `ZeroOptimizer.gather`.
# And of copies of a tied weight: `SharedGradients` of a pipeline.
_REPLICA = re.compile(r"(?:model \d+|\S+ of fully_shard \d+|\S+ of a pipeline) after \d+ updates?.*")


def compare(sent: Header, expected: Header, source: int, destination: int, where: str, name: str = "") -> None:
    """Raise MismatchError naming both sides when the headers differ.

    name: of the operation expected, in full where packing has shortened it.
    """
    if sent == expected:
        return

    # Under MPI both were shortened to 24 bytes; show what is known in full.
    expected = expected._replace(operation=name or expected.operation)
    ours, _, our_arguments = expected.operation.partition(" ")
    theirs, space, their_arguments = sent.operation.partition(" ")
    if theirs in (ours, _fit(ours, _NAME).decode(), _fit(ours, _OPERATION).decode()):
        sent = sent._replace(operation=f"{ours}{space}{their_arguments}")
        theirs = ours
    if their_arguments == _fit_operation(expected.operation).decode().partition(" ")[2]:
        their_arguments = our_arguments

    # Only a difference loads what explains it.
    from minidist.comm.differences import compare_replicas, unlike_operations

    if theirs == ours and their_arguments != our_arguments:
        mine, other = _REPLICA.search(our_arguments), _REPLICA.search(their_arguments)
        if mine is not None:
            compare_replicas(ours, (source, other and other[0]), (destination, mine[0]), where)

    # The first difference is the cause: other operations have other dtypes, other dtypes other sizes.
    if theirs != ours or their_arguments != our_arguments:
        what, remedy = unlike_operations(f"{theirs} {their_arguments}".rstrip(), expected.operation)
    elif sent.dtype != expected.dtype:
        what, remedy = "dtype mismatch", "convert one side, or allocate the receive buffer with the sender's dtype"
    else:
        what, remedy = "shape mismatch", "both sides must use the same shape"
    raise MismatchError(
        f"{what}: rank {source} sent {sent.describe()}, rank {destination} expected {expected.describe()} "
        f"at {where}; {remedy}"
    )


def is_of_replicas(operation: str) -> bool:
    """Return whether an operation says what replica its arrays belong to, which its error then explains."""
    return _REPLICA.search(operation) is not None
