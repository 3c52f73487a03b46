"""Where a shard lies in the whole parameter, as boxes: what a checkpoint stores, and what a picture draws.

    a fused Q|K|V (12, 4) over 2 ranks, dim 0     whole    | q0 q1 | k0 k1 | v0 v1 |
                                                  rank 1   box (2:4, 0:4)  (6:8, 0:4)  (10:12, 0:4)

Proved by: tests/parallel/test_tensor.py, tests/checkpoint/test_layouts.py
"""

from minidist.core.base.layout import Layout
from minidist.parallel.tensor.full_state import MeshLike, splits

Box = tuple[tuple[int, int], ...]  # (start, stop) for each dim


def boxes(layout: Layout, mesh: MeshLike) -> list[tuple[Box, tuple[slice, ...]]]:
    """Return where a shard lies: pairs (box of the global tensor, the slices of the shard that hold it).

    A fused Q|K|V has three boxes. Padding is in none, so the box of a shard that is all padding is empty. A checkpoint
    stores shards by their boxes.
    """
    whole = [(0, n) for n in layout.global_shape]
    if not layout.axes:
        return [(tuple(whole), tuple(slice(0, n) for n in layout.global_shape))]
    if len(layout.axes) == 1:  # it may have blocks, padding and copies
        ((comm, one),) = splits(layout, mesh)
        return _boxes_of_one_split(one, comm.rank // layout.copies, comm.size // layout.copies)

    # Several axes: each narrows the box along its dim.
    for comm, one in splits(layout, mesh):
        (dim,) = one.dims
        start, stop = whole[dim]
        size = (stop - start) // comm.size
        whole[dim] = (start + comm.rank * size, start + (comm.rank + 1) * size)
    return [(tuple(whole), tuple(slice(0, stop - start) for start, stop in whole))]


def _boxes_of_one_split(layout: Layout, number: int, shards: int) -> list[tuple[Box, tuple[slice, ...]]]:
    (dim,) = layout.dims
    length = layout.global_shape[dim]
    block = (length + layout.padding) // layout.blocks
    size, result = block // shards, []
    for i in range(layout.blocks):
        # This shard's part of block i; what lies behind `length` is padding, and in no box.
        start = min(i * block + number * size, length)
        stop = min(start + size, length)
        box = [(0, n) for n in layout.global_shape]
        local = [slice(0, n) for n in layout.global_shape]
        box[dim], local[dim] = (start, stop), slice(i * size, i * size + stop - start)
        result.append((tuple(box), tuple(local)))
    return result
