"""Which parts of the global tensors a rank's arrays are, so that a checkpoint knows no layout: tiles, shards, shards of
tiles.

    a tile (columns 2 and 3)   | . . x X . . |      elements 1 to 4 of the tile, row by row (X), are three boxes of the whole:
    of a (4, 6) tensor         | . . X X . . |      row 0, column 3 - rows 1 to 1, columns 2 and 3 - row 2, column 2
                               | . . X x . . |
                               | . . x x . . |

Where a whole tile lies the tensor library knows (`parallel.tensor.sharding.boxes`); a stretch of it is cut out here.
"""

from collections.abc import Iterator
from math import prod

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.checkpoint import Piece
from minidist.parallel.dims import Axes
from minidist.parallel.tensor.sharding import boxes as boxes_of_tile

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dim


def boxes_of_stretch(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
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
        for first, box in boxes_of_stretch(shape[1:], start - row * inner, end - row * inner):
            yield row * inner + first, ((row, row + 1), *box)
    yield from boxes_of_stretch(shape, end, stop)


def pieces_of(
    name: str, parameter: Parameter, axes: Axes, array: Array, start: int, stop: int, copies: tuple[int, int] = (0, 1)
) -> list[Piece]:
    """What a rank holds of the global tensor `name`: `array` is elements [start, stop) of its tile of `parameter`'s
    shape.
    """
    if parameter.layout is None or not parameter.layout.axes:
        return [Piece(name, parameter.shape, array, start, stop, copies=copies)]
    result = []
    tile = boxes_of_tile(parameter.layout, axes)
    for first, stretch in boxes_of_stretch(parameter.shape, start, stop):
        shape = [b - a for a, b in stretch]
        values = array[first - start : first - start + prod(shape)].reshape(shape)
        for whole, local in tile:
            both = [(max(a, part.start), min(b, part.stop)) for (a, b), part in zip(stretch, local, strict=True)]
            if all(low < high for low, high in both):
                inside = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(both, stretch, strict=True))
                shift = [
                    start_ - part.start for (start_, _), part in zip(whole, local, strict=True)
                ]  # from tile to tensor
                box = tuple((low + by, high + by) for (low, high), by in zip(both, shift, strict=True))
                result.append(Piece(name, parameter.layout.global_shape, values[inside], box=box, copies=copies))
    return result
