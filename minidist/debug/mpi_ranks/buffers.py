"""The buffers of a message, in every form in which mpi4py takes them, and the arrays that are sent for them.

    array                      [array, MPI.DOUBLE]             [array, count, MPI.DOUBLE]
    [array, (count, displ)]    [array, counts, displs, type]   [array, (counts, displs), type]      MPI.BOTTOM

What is sent is a 1-D array of the datatype's elements: the program's own memory where the elements lie one behind the
other, and a copy where they do not. An array that is received goes back the same way. A buffer that is not NumPy's,
such as a tensor of PyTorch, says by DLPack where its elements lie; NumPy's array of it may be read-only, so that the
memory itself is used.

Source: the tutorial of mpi4py, "Communication of buffer-like objects".
Proved by: tests/mpi_ranks/test_buffers.py
"""

import ctypes
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.debug.mpi_ranks.constants import PROC_NULL, failed, unsupported
from minidist.debug.mpi_ranks.datatype import BYTE, Datatype, Layout, datatype_of, place


class Named(int):
    """MPI.IN_PLACE, MPI.BOTTOM or MPI.BUFFER_AUTOMATIC: a number with a name."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return _constant, (self.name,)


def _constant(name: str) -> Named:
    return CONSTANTS[name]


CONSTANTS: dict[str, Named] = {}
for _number, _kind in ((-1, "IN_PLACE"), (0, "BOTTOM"), (-2, "BUFFER_AUTOMATIC")):
    CONSTANTS[_kind] = type(f"{_kind.title().replace('_', '')}Type", (Named,), {})(_number)
    CONSTANTS[_kind].name = _kind
IN_PLACE, BOTTOM, BUFFER_AUTOMATIC = CONSTANTS.values()
UNSAID = (IN_PLACE, None)  # that the data lies in the receive buffer
_NOTHING = np.empty(0, np.uint8)
CPU, HOST_PINNED = 1, 3  # of DLPack
ON_GPU = "a message in the memory of a GPU", "copy it to a NumPy array"


class Allocated(np.ndarray):
    """Bytes as MPI.buffer has them: what Alloc_mem returns, and what a reduction of the program's own is given."""

    def __setitem__(self, key: Any, value: Any) -> None:
        # An array of numbers, say, gives its bytes.
        raw = value if isinstance(value, np.ndarray | int) else np.frombuffer(value, np.uint8)
        super().__setitem__(key, raw)

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.ctypes.data)


class Buffer:
    """A message's place in memory: blocks of elements of one datatype.

    raw: the bytes of the whole buffer. start: the byte from which displacements count. counts, displs: of each block,
    in elements of the datatype.
    """

    def __init__(self, raw: np.ndarray, start: int, datatype: Datatype, counts: list[int], displs: list[int]) -> None:
        self.raw, self.start, self.datatype, self.counts, self.displs = raw, start, datatype, counts, displs
        self.layout: Layout = datatype.layout
        self.count = sum(counts)
        per = len(self.layout.offsets)
        self.sizes = [count * per for count in counts]  # in elements of the array that is sent
        follows = all(d == sum(counts[:k]) + displs[0] for k, d in enumerate(displs) if counts[k])
        self.is_view = self.layout.contiguous and follows
        self._check()

    def _check(self) -> None:
        layout = self.layout
        if not self.count or not len(layout.offsets):
            return
        used = [(d, d + n - 1) for n, d in zip(self.counts, self.displs, strict=True) if n]
        low = self.start + min(a for a, _ in used) * layout.extent
        high = self.start + max(b for _, b in used) * layout.extent
        # A message has many more elements than a datatype, whose ends are looked up for derived ones only.
        low += 0 if layout.contiguous else int(layout.offsets.min())
        high += layout.extent if layout.contiguous else int(layout.offsets.max()) + layout.element.itemsize
        if low < 0 or high > self.raw.size:
            raise ValueError(
                f"message: buffer too small: a message of {self.count} {self.datatype.Get_name()} needs"
                f" {high - min(low, 0)} B, and its buffer has {self.raw.size} B; pass a smaller count"
            )

    def _places(self) -> np.ndarray:
        """Return the byte offset of every element."""
        extent = self.layout.extent
        starts = [np.arange(d, d + n) * extent for n, d in zip(self.counts, self.displs, strict=True)]
        return place(self.layout, self.start + np.concatenate([np.empty(0, np.int64), *starts]))

    def get(self) -> np.ndarray:
        """Return the elements as a 1-D array: the memory itself where `is_view`."""
        element = self.layout.element
        if self.is_view:
            first = self.start + (self.displs[0] if self.displs else 0) * self.layout.extent
            return self.raw[first : first + self.count * self.layout.extent].view(element)
        bytes_of = self._places()[:, None] + np.arange(element.itemsize)
        return self.raw[bytes_of].reshape(-1).view(element)

    def put(self, array: np.ndarray) -> None:
        """Write an array of elements into the buffer, from its beginning; it may be shorter."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if self.is_view:
            self.get().view(np.uint8)[: data.size] = data
            return
        width = self.layout.element.itemsize
        places = self._places()[: data.size // width, None] + np.arange(width)
        self.raw[places] = data.reshape(-1, width)

    def blocks(self) -> list["Buffer"]:
        """Return a buffer for each block."""
        pairs = zip(self.counts, self.displs, strict=True)
        return [Buffer(self.raw, self.start, self.datatype, [n], [d]) for n, d in pairs]


def empty() -> Buffer:
    """Return the buffer of a message to or from PROC_NULL."""
    return Buffer(_NOTHING, 0, BYTE, [0], [0])


def memory(buffer: Any, writable: bool = False) -> np.ndarray:
    """Return the bytes of a buffer, as an array that shares its memory."""
    return _memory_and_code(buffer, writable)[0]


def _memory_and_code(buffer: Any, writable: bool) -> tuple[np.ndarray, str]:
    """Return the bytes of a buffer, and the code of its elements' type."""
    if buffer is None:
        return _NOTHING, ""
    try:
        view = memoryview(buffer)
    except TypeError:
        if not has_interface(buffer):
            raise
        return bytes_of(buffer)
    if writable and view.readonly:
        raise BufferError("a message is received into a buffer that is read-only; pass one that may be written")
    if not view.contiguous:
        raise BufferError("the buffer of a message is not contiguous; pass numpy.ascontiguousarray(array)")
    code = view.format
    if view.nbytes == 0:
        return _NOTHING, code
    # An array in Fortran's order is sent as it lies in memory.
    flat = np.frombuffer(view if view.c_contiguous else np.asarray(view).T, np.uint8)
    return flat, "" if isinstance(buffer, bytes | bytearray) else code


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
            raise unsupported(*ON_GPU)
        array = np.asarray(SimpleNamespace(__array_interface__={**value.__cuda_array_interface__, "version": 3}))
        return _contiguous(array).view(np.uint8), array.dtype.char
    if value.__dlpack_device__()[0] not in (CPU, HOST_PINNED):
        raise unsupported(*ON_GPU)
    # Without a version, for which NumPy would ask: as for MPI, an array that may not be written cannot be exported.
    exporter = SimpleNamespace(__dlpack__=lambda **_: value.__dlpack__(), __dlpack_device__=value.__dlpack_device__)
    array = np.from_dlpack(exporter)
    return bytes_at(_contiguous(array).ctypes.data, array.nbytes, (array, value)), array.dtype.char


def _contiguous(array: np.ndarray) -> np.ndarray:
    """Return the elements in the order in which they lie in memory, if nothing else lies between them."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise BufferError("the buffer of a message is not contiguous; pass a contiguous copy")
    return (array if array.flags.c_contiguous else array.T).reshape(-1)


def address_of(location: Any) -> int:
    """Return the address of a buffer, for datatypes with absolute displacements."""
    return int(memory(location).ctypes.data) if location is not BOTTOM else 0


def _items(message: Any, pair: Any) -> tuple[Any, Any, Any, Any]:
    """Return the buffer, counts, displacements and datatype of a message; None for what it does not say.

    pair: the types that hold a count and a displacement.
    """
    if not isinstance(message, list | tuple):
        if not (_is_buffer(message) or message is BOTTOM):
            raise TypeError("message: expecting buffer or list/tuple")
        return message, None, None, None
    if not 2 <= len(message) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    if len(message) == 4:
        return message[0], message[1], message[2], message[3]
    buffer, counts = message[0], message[1]
    kind = message[2] if len(message) == 3 else None
    if len(message) == 2 and isinstance(counts, Datatype | str):
        return buffer, None, None, counts
    if isinstance(counts, pair):
        return buffer, counts[0], counts[1], kind
    return buffer, counts, None, kind


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return has_interface(value)
    except (ValueError, BufferError):  # not contiguous, which is said later
        return True
    return True


def _basic(buffer: Any, kind: Any, writable: bool) -> tuple[np.ndarray, Datatype, int]:
    """Return a buffer's bytes, its datatype, and the address at which the bytes begin (0 but for BOTTOM)."""
    if buffer is BOTTOM:
        datatype = datatype_of(kind)
        low, length = datatype.Get_true_extent()
        return bytes_at(low, length), datatype, low
    raw, code = _memory_and_code(buffer, writable)
    return raw, datatype_of(code if kind is None else kind), 0


def _inferred(length: int, datatype: Datatype) -> int:
    """Return how many elements of a datatype fill a buffer of `length` bytes."""
    if not length:
        return 0
    if datatype.held is None:
        raise ValueError("message: cannot infer count, datatype is null")
    extent = datatype.layout.extent
    if extent <= 0 or length % extent:
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of datatype extent {extent}"
        )
    return length // extent


def one(message: Any, writable: bool, rank: int = 0, blocks: int = 1) -> Buffer:
    """Return the buffer of a message. rank: the other side. blocks: equal parts, one for each rank, where it has them.

    A count that the program gives is that of one part. TypeError, ValueError and BufferError as from mpi4py.
    """
    if rank == PROC_NULL:
        return empty()
    buffer, counts, displs, kind = _items(message, tuple | list)
    raw, datatype, low = _basic(buffer, kind, writable)
    displ = 0 if displs is None else index(displs)
    extent = 0 if datatype.held is None else datatype.layout.extent
    if displ < 0:
        raise ValueError(f"message: negative displacement {displ}")
    if displ and (extent <= 0 or displ * extent > raw.size):
        raise ValueError(f"message: displacement {displ} out of bounds, the buffer has {raw.size} B")
    if counts is not None:
        count = index(counts)
        if count < 0:
            raise ValueError(f"message: negative count {count}")
        if count > 0 and buffer is None:
            raise ValueError(f"message: buffer is None but count is {count}")
    else:
        count = _inferred(raw.size - displ * extent, datatype)
        if count % blocks:
            raise ValueError(
                f"message: cannot infer count, number of entries {count} is not a multiple of required number of"
                f" blocks {blocks}"
            )
        count //= blocks
    return Buffer(raw, displ * extent - low, datatype, [count] * blocks, [k * count for k in range(blocks)])


def vector(message: Any, writable: bool, blocks: int) -> Buffer:
    """Return the buffer of a message with a block of another size for each rank."""
    buffer, counts, displs, kind = _items(message, tuple)  # a list is the counts
    raw, datatype, low = _basic(buffer, kind, writable)
    if counts is None:
        total = _inferred(raw.size, datatype)
        counts = [total // blocks + (total % blocks > k) for k in range(blocks)]
    counts = [index(counts)] * blocks if _is_number(counts) else _numbers(counts, blocks)
    if displs is None:
        displs = [sum(counts[:k]) for k in range(blocks)]
    displs = [index(displs) * k for k in range(blocks)] if _is_number(displs) else _numbers(displs, blocks)
    if any(count < 0 for count in counts):
        raise failed("ERR_COUNT", f"counts {counts}; they must be at least 0")
    return Buffer(raw, -low, datatype, counts, displs)


def each(message: Any, writable: bool, blocks: int) -> list[Buffer]:
    """Return the buffers of a message with another datatype for each rank; displacements count bytes."""
    if not 2 <= len(message) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    buffer, kinds = message[0], as_many(message[-1], blocks)
    counts, displs = message[1] if len(message) == 3 else message[1:3] if len(message) == 4 else (None, None)
    counts = [1] * blocks if counts is None else _numbers(counts, blocks)
    displs = [0] * blocks if displs is None else _numbers(displs, blocks)
    made = []
    for kind, count, displ in zip(kinds, counts, displs, strict=True):
        if buffer is BOTTOM:  # the displacement is an address, or the datatype's are
            datatype = datatype_of(kind)
            low, length = datatype.Get_true_extent()
            raw = bytes_at(displ + low, length + (count - 1) * datatype.extent if count else 0)
            displ = 0
        else:
            raw, datatype, low = _basic(buffer, kind, writable)
        made.append(Buffer(raw, displ - low, datatype, [count], [0]))
    return made


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, np.ndarray)


def as_many(values: Any, length: int) -> list[Any]:
    """Return a list of the values; ValueError when there are more or fewer of them."""
    if len(values) != length:
        raise ValueError(f"expecting {length} items, got {len(values)}")
    return list(values)


def _numbers(values: Any, length: int) -> list[int]:
    return [index(value) for value in as_many(values, length)]
