"""Which parts of the global tensors a rank's arrays are, so that a checkpoint knows no layout: tiles, shards, shards of tiles.

    a tile (columns 2 and 3)   | . . x X . . |      elements 1 to 4 of the tile, row by row (X), are three boxes of the whole:
    of a (4, 6) tensor         | . . X X . . |      row 0, column 3 - rows 1 to 1, columns 2 and 3 - row 2, column 2
                               | . . X x . . |
                               | . . x x . . |

A fused Q|K|V is cut inside each of its blocks, so a box that crosses two blocks is two; padding is on no global tensor.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from minidist.base.arrays import Array
from minidist.base.layout import Layout
from minidist.checkpoint import Piece

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dim


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Elements [start, stop) of an array in C order as boxes, each with the number of its first element."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield start, ((start, stop),) if shape else ()
        return
    inner = prod(shape[1:])
    row = start // inner
    end = min(stop, (row + 1) * inner)
    if start % inner == 0 and stop - start >= inner:  # complete rows
        rows = (stop - start) // inner
        end = start + rows * inner
        yield start, ((row, row + rows), *((0, n) for n in shape[1:]))
    else:
        for first, box in boxes(shape[1:], start - row * inner, end - row * inner):
            yield row * inner + first, ((row, row + 1), *box)
    yield from boxes(shape, end, stop)


def pieces_of(name: str, shape: tuple[int, ...], layout: Layout | None, rank: int, ranks: int, array: Array, start: int, stop: int) -> list[Piece]:
    """What a rank holds of the global tensor `name`: `array`, elements [start, stop) of its tile of `shape`.

    layout, rank, ranks: of the tile on the axis that cuts it; without a cut the tile is the tensor.
    """
    if layout is None or not layout.axes:
        return [Piece(name, shape, array, start, stop)]
    result = []
    (dim,) = layout.dims
    size = shape[dim] // layout.blocks  # of a block's part
    for first, box in boxes(shape, start, stop):
        lengths = [b - a for a, b in box]
        values: Any = array[first - start : first - start + prod(lengths)].reshape(lengths)
        for block in range(layout.blocks):
            low, high = max(box[dim][0], block * size), min(box[dim][1], (block + 1) * size)
            shift = block * size * (ranks - 1) + rank * size  # from the tile's count to the tensor's
            high = min(high, layout.global_shape[dim] - shift)  # the padding
            if low < high:
                part = values[(slice(None),) * dim + (slice(low - box[dim][0], high - box[dim][0]),)]
                whole = (*box[:dim], (low + shift, high + shift), *box[dim + 1 :])
                result.append(Piece(name, layout.global_shape, part, box=whole))
    return result
