"""The k elements of largest magnitude of an array in shards, exactly, for a few kilobytes: radix selection.

The bits of a float's magnitude, read as an unsigned integer, have the order of the magnitudes. The threshold, the k-th
largest of them, is found 8 bits at a time from the top:

    each rank counts its elements by their next 8 bits, of those that agree so far ── all-reduce of 256 counts ──▶
    the largest digit at or above which k elements are left is the threshold's; the ones above it are kept

At the end some elements equal the threshold, and the first of them are kept: each rank says how many it has of each
layer (all-gather), so that "the first" are those of the whole array. The result is that of one device, whatever the
shards; 256 counts per digit do not depend on the size of the array. Gathering it would take (n-1)/n of its size.

Proved by: tests/techniques/test_pruner.py
"""

from collections.abc import Sequence

import numpy as np

from minidist.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather, all_reduce
from minidist.core.comm import Comm

new_purpose("pruning")

DIGITS = 256  # values of 8 bits
COUNT_BYTES = 8  # of an int64


def magnitude_keys(values: Array, kept: Array | None = None) -> Array:
    """Return unsigned integers (uint64) in the order of the magnitudes, at least 1; 0 where `kept` (bool) is false."""
    keys = xp.absolute(values).view(f"u{values.dtype.itemsize}").astype(np.uint64) + np.uint64(1)
    return keys if kept is None else keys * kept


def keep_largest(
    keys: Sequence[Array], groups: Sequence[int], keep: Sequence[int], itemsize: int, comm: Comm | None = None
) -> list[Array]:
    """Return a mask (bool) of each layer's keys: the keep[g] largest of all layers of group g, of equal ones the first.

    keys: of each layer this rank's elements (`magnitude_keys`), possibly none; ranks hold a layer's elements in rank
    order. groups: the group of each layer. itemsize: bytes of the values. comm: the ranks; None when this one has all.
    All ranks call it, and send what `selection_bytes` says (purpose `pruning`).
    """
    digits = [0] * len(keep)  # the threshold's bits so far, of each group
    left = np.array(keep)  # how many elements that agree with them are kept
    for shift in range(8 * (itemsize - 1), -1, -8):
        counts = np.zeros((len(keep), DIGITS), np.int64)
        for key, group in zip(keys, groups, strict=True):
            same_prefix = key[key >> np.uint64(shift + 8) == digits[group]]
            digit = (same_prefix >> np.uint64(shift)) & np.uint64(DIGITS - 1)
            counts[group] += xp.to_host(xp.bincount(digit.astype(np.int64), minlength=DIGITS))
        if comm is not None:
            with purpose("pruning"):
                all_reduce(comm, counts.reshape(-1))

        # tail[d]: elements whose next digit is at least d. The threshold's is the last that leaves enough of them.
        tail = np.append(counts[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((len(keep), 1), np.int64), axis=1)
        chosen = (tail[:, :DIGITS] >= left[:, None]).sum(axis=1) - 1
        left = left - tail[np.arange(len(keep)), chosen + 1]
        digits = [digit << 8 | int(next_digit) for digit, next_digit in zip(digits, chosen, strict=True)]

    # Equal to the threshold: (ranks, layers). Those of earlier layers, and of earlier ranks in this one, come first.
    equal = np.array([int((key == digits[group]).sum()) for key, group in zip(keys, groups, strict=True)])
    table, rank = equal[None], 0
    if comm is not None:
        with purpose("pruning"):
            table, rank = all_gather(comm, equal).reshape(comm.size, -1), comm.rank
    masks = []
    for layer, (key, group) in enumerate(zip(keys, groups, strict=True)):
        earlier = [other for other in range(layer) if groups[other] == group]
        before = table[:, earlier].sum() + table[:rank, layer].sum()
        is_equal = key == digits[group]
        masks.append((key > digits[group]) | is_equal & (is_equal.cumsum() <= int(left[group] - before)))
    return masks


def selection_bytes(layers: int, groups: int, itemsize: int, ranks: int) -> int:
    """Return the bytes that all `ranks` together send in one `keep_largest`: an all-reduce per digit, an all-gather."""
    return (ranks - 1) * COUNT_BYTES * (2 * itemsize * groups * DIGITS + ranks * layers)
