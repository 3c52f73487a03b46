"""Datatypes: where the elements of a message lie in memory, and how they are packed into one array.

A datatype is a list of byte offsets, one for each element, and an extent, after which the next one begins:

    DOUBLE.Create_vector(2, 1, 3)     offsets 0, 24    extent 32      x . . x
    DOUBLE.Create_resized(0, 16)      offsets 0        extent 16      x .

A message of a datatype is a 1-D array of its elements. Where they lie one behind the other it is the program's own
memory; otherwise they are copied.

Proved by: tests/mpi_ranks/test_buffers.py
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from minidist.debug.mpi_ranks.constants import failed, unsupported
from minidist.debug.mpi_ranks.handle import Handle, Named

ORDER_C, ORDER_FORTRAN = 56, 57
MAX_ELEMENTS = 1 << 24  # of a derived datatype, whose offsets are 8 B each


class Layout:
    """What a datatype is.

    element: the dtype of its elements; bytes where they differ. offsets: of each element, in bytes. lb, extent: where
    the datatype begins, and its bytes up to the next one. size: bytes of data, where those of the elements have gaps.
    """

    def __init__(
        self, element: np.dtype[Any], offsets: np.ndarray, lb: int, extent: int, size: int | None = None
    ) -> None:
        self.element, self.offsets, self.lb, self.extent = element, offsets, lb, extent
        self.size = len(offsets) * element.itemsize if size is None else size
        self.name = ""
        # Whether elements of several datatypes in a row lie one behind the other.
        step = element.itemsize
        self.contiguous = extent == len(offsets) * step and bool((offsets == np.arange(len(offsets)) * step).all())


def place(layout: Layout, starts: Any) -> np.ndarray:
    """Return the offsets of all elements of datatypes that begin at `starts`."""
    offsets: np.ndarray = (np.asarray(starts, np.int64)[:, None] + layout.offsets).reshape(-1)
    return offsets


class Datatype(Handle):
    """A datatype, such as MPI.DOUBLE."""

    held: Layout | None
    named = layout = Named[Layout]("ERR_TYPE", "the datatype is DATATYPE_NULL; pass one such as MPI.DOUBLE")
    names: ClassVar[dict[str, "Datatype"]] = {}

    def Get_size(self) -> int:
        """Return the bytes of data in one element."""
        return self.layout.size

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound, and the bytes from one element to the next."""
        return self.layout.lb, self.layout.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return where the data begins, and its bytes from the first to the last."""
        layout = self.layout
        if not len(layout.offsets):
            return 0, 0
        low = int(layout.offsets.min())
        return low, int(layout.offsets.max()) + layout.element.itemsize - low

    # constructors -----------------------------------------------------------------------------------------------------

    def _blocks(self, blocks: Sequence[int], starts: Sequence[int]) -> Self:
        """Return a datatype of blocks of this one: `blocks[k]` of them from byte `starts[k]`."""
        if len(blocks) != len(starts):
            raise ValueError(f"expecting {len(blocks)} displacements, got {len(starts)}")
        if any(block < 0 for block in blocks):
            raise failed("ERR_ARG", f"block lengths {list(blocks)}; they must be at least 0")
        old = self.layout
        if sum(blocks) * len(old.offsets) > MAX_ELEMENTS:
            raise unsupported(f"a derived datatype of more than {MAX_ELEMENTS:,} elements", "pass a count instead")
        begins = [start + old.extent * np.arange(block) for block, start in zip(blocks, starts, strict=True)]
        every = np.concatenate([np.empty(0, np.int64), *begins])
        low, high = (int(every.min()), int(every.max()) + old.extent) if every.size else (0, 0)
        return self.of(Layout(old.element, place(old, every), low + old.lb if every.size else 0, high - low))

    def _in_elements(self, displacements: Sequence[int]) -> list[int]:
        return [displacement * self.layout.extent for displacement in displacements]

    def Dup(self) -> Self:
        return self.Create_resized(*self.Get_extent())

    def Create_contiguous(self, count: int) -> Self:
        """Return `count` of this datatype in a row."""
        return self._blocks([count], [0])

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return `count` blocks whose beginnings are `stride` elements apart."""
        return self.Create_hvector(count, blocklength, stride * self.layout.extent)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Self:
        """Return `count` blocks whose beginnings are `stride` bytes apart."""
        return self._blocks([blocklength] * count, [k * stride for k in range(count)])

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return blocks at displacements in elements."""
        return self._blocks(blocklengths, self._in_elements(displacements))

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Self:
        """Return blocks at displacements in bytes."""
        return self._blocks(blocklengths, displacements)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Return blocks of one length at displacements in elements."""
        return self._blocks([blocklength] * len(displacements), self._in_elements(displacements))

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Self:
        """Return blocks of one length at displacements in bytes."""
        return self._blocks([blocklength] * len(displacements), displacements)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence["Datatype"]
    ) -> Self:
        """Return blocks of several datatypes at displacements in bytes."""
        if not len(blocklengths) == len(displacements) == len(datatypes):
            raise ValueError("block lengths, displacements and datatypes must be as many")
        every = [(t._blocks([n], [d]).layout) for n, d, t in zip(blocklengths, displacements, datatypes, strict=True)]
        parts = [part for part in every if len(part.offsets)]
        # Elements of one dtype stay elements; others are sent as bytes.
        dtypes = {part.element for part in parts}
        element = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
        offsets = [np.empty(0, np.int64)]
        for part in parts:
            inside = np.arange(part.element.itemsize // element.itemsize) * element.itemsize
            offsets.append((part.offsets[:, None] + inside).reshape(-1))
        low = min((part.lb for part in parts), default=0)
        high = max((part.lb + part.extent for part in parts), default=0)
        align = max((part.element.alignment for part in parts), default=1)  # as a compiler pads a struct
        return cls.of(Layout(element, np.concatenate(offsets), low, -(-(high - low) // align) * align))

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = ORDER_C
    ) -> Self:
        """Return a part of an array of `sizes`: `subsizes` elements from index `starts`."""
        if not len(sizes) == len(subsizes) == len(starts):
            raise ValueError("sizes, subsizes and starts must be as many")
        for size, part, start in zip(sizes, subsizes, starts, strict=True):
            if not 0 <= start <= start + part <= size:
                raise failed("ERR_ARG", f"a subarray of {part} from {start} of {size}; it must lie inside the array")
        every = np.arange(math.prod(sizes)).reshape(sizes, order="C" if order == ORDER_C else "F")
        taken = every[tuple(slice(a, a + n) for a, n in zip(starts, subsizes, strict=True))]
        inside = np.sort(taken.reshape(-1)) * self.layout.extent
        old = self.layout
        return self.of(Layout(old.element, place(old, inside), 0, math.prod(sizes) * old.extent))

    def Create_resized(self, lb: int, extent: int) -> Self:
        """Return this datatype with other bounds."""
        old = self.layout
        return self.of(Layout(old.element, old.offsets, lb, extent, old.size))

    def Commit(self) -> Self:
        """Return this datatype: nothing is left to do."""
        self.layout  # noqa: B018
        return self

    def Free(self) -> None:
        if self.is_predefined:
            raise failed("ERR_TYPE", f"{self.name} is predefined and cannot be freed")
        self.held = None

    # what it is -------------------------------------------------------------------------------------------------------

    size = property(Get_size)
    extent = property(lambda self: self.layout.extent)
    lb = property(lambda self: self.layout.lb)
    ub = property(lambda self: self.layout.lb + self.layout.extent)
    true_lb = property(lambda self: self.Get_true_extent()[0])
    true_extent = property(lambda self: self.Get_true_extent()[1])
    true_ub = property(lambda self: sum(self.Get_true_extent()))
    is_predefined = is_named = property(lambda self: bool(self.predefined))

    def Get_name(self) -> str:
        return self.held.name if self.held else "MPI_DATATYPE_NULL"

    def Set_name(self, name: str) -> None:
        self.layout.name = name

    name = property(Get_name, Set_name)

    @classmethod
    def fromcode(cls, code: str) -> "Datatype":
        """Return the datatype of one of NumPy's type codes."""
        return datatype_of(code)


# MPI's names of each of NumPy's types; the first one is what a buffer of that type has.
_OF_NUMPY = {
    "b": "SIGNED_CHAR INT8_T SINT8_T INTEGER1",
    "h": "SHORT SIGNED_SHORT INT16_T SINT16_T INTEGER2",
    "i": "INT SIGNED_INT INT32_T SINT32_T INTEGER INTEGER4 F_INT LOGICAL F_BOOL LOGICAL4",
    "l": "LONG SIGNED_LONG INT64_T SINT64_T INTEGER8 AINT OFFSET COUNT LOGICAL8",
    "q": "LONG_LONG SIGNED_LONG_LONG",
    "B": "UNSIGNED_CHAR UINT8_T",
    "H": "UNSIGNED_SHORT UINT16_T",
    "I": "UNSIGNED UNSIGNED_INT UINT32_T",
    "L": "UNSIGNED_LONG UINT64_T",
    "Q": "UNSIGNED_LONG_LONG",
    "e": "FLOAT16_T REAL2",
    "f": "FLOAT FLOAT32_T REAL REAL4 F_FLOAT",
    "d": "DOUBLE FLOAT64_T DOUBLE_PRECISION REAL8 F_DOUBLE",
    "g": "LONG_DOUBLE REAL16",
    "F": "C_FLOAT_COMPLEX C_COMPLEX CXX_FLOAT_COMPLEX COMPLEX COMPLEX8 F_COMPLEX F_FLOAT_COMPLEX",
    "D": "C_DOUBLE_COMPLEX CXX_DOUBLE_COMPLEX DOUBLE_COMPLEX COMPLEX16 F_DOUBLE_COMPLEX",
    "G": "C_LONG_DOUBLE_COMPLEX CXX_LONG_DOUBLE_COMPLEX COMPLEX32",
    "?": "C_BOOL BOOL CXX_BOOL LOGICAL1",
    "S1": "CHAR CHARACTER",
    "U1": "WCHAR",
    "u1": "BYTE PACKED",
}
_PAIRS = {
    "SHORT_INT": "h",
    "INT_INT": "i",
    "LONG_INT": "l",
    "FLOAT_INT": "f",
    "DOUBLE_INT": "d",
    "LONG_DOUBLE_INT": "g",
}
_of_code: dict[str, Datatype] = {}


def _named(name: str, element: np.dtype[Any], size: int | None = None) -> Datatype:
    layout = Layout(element, np.zeros(1, np.int64), 0, element.itemsize, size)
    layout.name = f"MPI_{name}"
    Datatype.names[name] = Datatype.of(layout, name)
    return Datatype.names[name]


for _code, _names in _OF_NUMPY.items():
    for _name in _names.split():
        # Text is sent as the numbers of its characters, so that bytes may meet characters.
        _element = np.dtype({"S1": "u1", "U1": "u4", "b": "i1"}.get(_code, _code))
        _made = _named(_name, _element)
        for _key in {_code, np.dtype(_code).str, np.dtype(_code).str[1:], np.dtype(_code).name}:
            if _code != "u1":
                _of_code.setdefault(_key, _made)
for _name, _code in _PAIRS.items():
    _pair = np.dtype([("value", _code), ("index", "i")], align=True)
    _named(_name, _pair, _pair["value"].itemsize + 4)
_of_code.update(c=Datatype.names["CHAR"], complex=_of_code["D"], float=_of_code["d"], int=_of_code["l"])
Datatype.names["TWOINT"] = Datatype.names["INT_INT"]
BYTE = Datatype.names["BYTE"]
_of_code[""] = BYTE


def datatype_of(key: Any) -> Datatype:
    """Return a datatype: itself, or that of one of NumPy's type codes. KeyError when there is none."""
    if isinstance(key, Datatype):
        return key
    if isinstance(key, str) and key[:1] in "@<=|" and key[1:] in _of_code:
        key = key[1:]
    found = _of_code.get(key) if isinstance(key, str) else None
    if found is None and isinstance(key, str) and key[:1] == "Z":  # complex, in the words of the buffer protocol
        found = _of_code.get(key[1:].upper())
    if found is None:
        raise KeyError(f"cannot map {key!r} to MPI datatype")
    return found
