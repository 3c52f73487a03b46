"""Which parts of the global tensors a rank's arrays are, so that a checkpoint depends on no layout.

    a tensor-parallel shard   | . . x X . . |   elements 1 to 4 of the shard, row by row (X), are three boxes of the
    (columns 2 and 3)         | . . X X . . |   whole: row 0, column 3 - row 1, columns 2 and 3 - row 2, column 2
    of a (4, 6) tensor        | . . X x . . |
                              | . . x x . . |

Where a whole tensor-parallel shard lies, the tensor library knows (`parallel.tensor.shard_boxes.boxes`); a range of its
elements, which ZeRO gives to a rank, is cut out here.

Proved by: tests/checkpoint/test_layouts.py
"""

from collections.abc import Iterator
from math import prod

from minidist.core.parallel.dims import Axes
from minidist.job.checkpoint.directory import CheckpointShard
from minidist.job.checkpoint.held import SINGLE, LocalShard, ReplicaId
from minidist.parallel.tensor.shard_boxes import boxes as boxes_of_shard

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dim


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yield elements [start, stop) of an array in C order as boxes, each with the number of its first element."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield start, ((start, stop),) if shape else ()
        return

    # The first box: complete rows, or a part of one row.
    inner = prod(shape[1:])
    row = start // inner
    end = min(stop, (row + 1) * inner)
    if start % inner == 0 and stop - start >= inner:  # complete rows are one box
        rows = (stop - start) // inner
        end = start + rows * inner
        yield start, ((row, row + rows), *((0, n) for n in shape[1:]))
    else:  # a part of one row
        for first, box in boxes_of_range(shape[1:], start - row * inner, end - row * inner):
            yield row * inner + first, ((row, row + 1), *box)

    # What is left begins with a new row.
    yield from boxes_of_range(shape, end, stop)


def checkpoint_shards(name: str, local: LocalShard, axes: Axes, replica: ReplicaId = SINGLE) -> list[CheckpointShard]:
    """Return the boxes of the global tensor `name` that a rank's `local` shard is."""
    parameter, start, stop = local.parameter, local.start, local.stop
    # Not cut by any axis: the range is one of the global tensor.
    if parameter.layout is None or not parameter.layout.axes:
        return [CheckpointShard(name, parameter.shape, local.values, start, stop, replica=replica)]

    result = []
    placed = boxes_of_shard(parameter.layout, axes)
    for first, box in boxes_of_range(parameter.shape, start, stop):
        shape = [b - a for a, b in box]
        values = local.values[first - start : first - start + prod(shape)].reshape(shape)
        # Where this box of the shard overlaps with a part of the shard that lies together in the whole tensor.
        for whole, part in placed:
            both = [(max(a, p.start), min(b, p.stop)) for (a, b), p in zip(box, part, strict=True)]
            if all(low < high for low, high in both):
                inside = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(both, box, strict=True))
                shift = [begin - p.start for (begin, _), p in zip(whole, part, strict=True)]  # from shard to tensor
                target = tuple((low + by, high + by) for (low, high), by in zip(both, shift, strict=True))
                whole_shape = parameter.layout.global_shape
                result.append(CheckpointShard(name, whole_shape, values[inside], box=target, replica=replica))
    return result
