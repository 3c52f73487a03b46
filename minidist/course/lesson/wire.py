"""What the process of an answer and its judge send each other: bytes in frames, and of the answer's plain values only.

    answer ── pack(values): a pickle in which arrays and NumPy's numbers are (dtype, shape, bytes) ──▶ judge: unpack

The answer may have written the bytes itself, so nothing of them is trusted: `unpack` imports no name and runs no code,
and a frame has a limit of bytes and of time.

Proved by: tests/lesson/test_wire.py
"""

import io
import math
import pickle
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from minidist.base.plain_pickle import BadPickleError, read_plain_pickle
from minidist.course.lesson.plain import Unreadable

MAX_FRAME = 1 << 30  # bytes
KINDS = "biufcSU"  # of arrays


def pack(value: Any) -> bytes:
    """Return plain values (see `plain`) as bytes; what is the same list or array in it twice is so when it is read."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=4)
    pickler.dump(value)
    return stream.getvalue()


def unpack(content: bytes) -> Any:
    """Return the values. Raises BadPickleError, whose text is the reason, for what `pack` would not have written."""
    known: dict[int, Any] = {}

    def stand_in(parts: Any) -> Any:
        kind, number, *more = parts
        if kind == "again":
            return known[number]
        known[number] = result = _STAND_INS[kind](*more)
        return result

    return read_plain_pickle(content, stand_in)


class _Pickler(pickle.Pickler):
    """Writes numbers, texts, lists, tuples and dicts; arrays and the like by what stands for them."""

    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self.numbers: dict[int, int] = {}  # by the id of what was written

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            more: tuple[Any, ...] = (value.dtype.str, value.shape, value.tobytes())
        elif kind is complex:
            more = (value.real, value.imag)
        elif kind is Unreadable:
            more = (value.what,)
        elif isinstance(value, np.generic):
            kind, more = np.generic, (value.dtype.str, value.tobytes())
        else:
            return None
        if id(value) in self.numbers:
            return "again", self.numbers[id(value)]
        number = self.numbers[id(value)] = len(self.numbers)
        return kind.__name__, number, *more


def _array(dtype: str, shape: Sequence[int], data: bytes) -> np.ndarray:
    known = np.dtype(str(dtype))
    if known.kind not in KINDS or not known.itemsize or math.prod(shape) * known.itemsize != len(data):
        raise BadPickleError(f"its array of shape {tuple(shape)} and dtype {known} has {len(data)} bytes")
    return np.frombuffer(bytearray(data), known).reshape(shape) if len(data) else np.empty(shape, known)


def _number(dtype: str, data: bytes) -> Any:
    return _array(dtype, (), data)[()]


_STAND_INS: dict[str, Any] = {
    "ndarray": _array,
    "generic": _number,
    "complex": complex,
    "Unreadable": lambda what: Unreadable(str(what)),
}


class Channel:
    """Frames of bytes over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self.buffer = end, bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self, until: float = math.inf, others: Sequence[Any] = ()) -> bytes:
        """Return the next frame.

        Raises EOFError when the other side has closed it, or one of `others` can be read; TimeoutError at the time
        `until` of `time.monotonic`; BadPickleError for a frame that is too long.
        """
        while True:
            size = int.from_bytes(self.buffer[:8], "little")
            if len(self.buffer) >= 8 and size > MAX_FRAME:
                raise BadPickleError(f"a frame of {size:,} bytes; at most {MAX_FRAME:,} are read")
            if len(self.buffer) >= 8 + size and len(self.buffer) >= 8:
                frame = bytes(self.buffer[8 : 8 + size])
                del self.buffer[: 8 + size]
                return frame
            left = None if until == math.inf else max(0.0, until - time.monotonic())
            ready = wait([self.socket, *others], left)
            if not ready:
                raise TimeoutError
            if self.socket not in ready:
                raise EOFError
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self.buffer += data
