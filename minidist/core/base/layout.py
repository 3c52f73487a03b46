"""Where the pieces of a global array are, as data: nothing here knows a communicator.

A `Layout` says how a tensor is split: over which axis of ranks, along which dim, into chunks of nearly equal size.

    8 columns over 3 ranks:   | 0 1 2 | 3 4 5 | 6 7 |   sizes 3, 3, 2

Proved by: tests/parallel/test_tensor.py
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from minidist.core.base import hooks


def chunk_sizes(total: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive chunks of `total` elements: the first `total % parts` get one more."""
    if type(total) is not int or type(parts) is not int or parts < 1:
        hooks.limits().check_chunks(total, parts)
    quotient, remainder = divmod(total, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)


def offsets(sizes: list[int]) -> list[int]:
    """Start of each chunk, and the end of the last: `len(sizes) + 1` numbers."""
    return [0, *accumulate(sizes)]


def cut(array: Any, sizes: list[int]) -> list[Any]:
    """Views of the consecutive chunks of a 1-D array."""
    chunks, start = [], 0
    for size in sizes:
        chunks.append(array[start : start + size])
        start += size
    return chunks


@dataclass(frozen=True)
class Layout:
    """How one global tensor lies over a mesh.

    `axes` and `dims` pair up: the tensor is cut along `dims[i]` over mesh axis `axes[i]`; on every other axis it is
    replicated. `blocks`: into how many equal blocks the cut dim is divided before each is cut (3 for a
    fused Q|K|V). `padding`: how many zeros follow at the end of the cut dim before it is cut; they are on no global
    tensor. `copies`: how many neighbouring ranks of the axis hold the same tile (key-value heads, when there are fewer
    of them than ranks). A tensor that is cut over two axes has one block, no padding and no copies. `ranks`: of each
    axis the world ranks along it, where they are known.
    """

    global_shape: tuple[int, ...]
    axes: tuple[str, ...] = ()
    dims: tuple[int, ...] = ()
    blocks: int = 1
    padding: int = 0
    copies: int = 1
    ranks: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(self.axes) > 1 or len(self.axes) != len(self.dims):
            hooks.limits().check_cuts(self)
