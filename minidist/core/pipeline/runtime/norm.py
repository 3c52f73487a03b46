"""The gradient norm over all stages, as block sums in one order that every rank has: stage after stage, its ranks.

    place            0           1           2 ...         (stage, rank)
    block sums    | . . . | . . . . . . | . . |            every rank fills its own places and adds the others' zeros

Proved by: tests/pipeline/test_runtime.py
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm


def gather_blocks(comm: Comm, own: Sequence[Any]) -> Any:
    """Return the block sums of all places, in order, on every rank.

    own: this rank's block sums of each place, empty for the others'. Two ordered all-reduces, of 8 B per place and of
    8 B per 1,024 elements (purpose clip_norm).
    """
    with purpose("clip_norm"):
        counts = np.array([float(part.size) for part in own])
        all_reduce(comm, counts, algorithm="ordered")
        ends = [int(end) for end in accumulate(counts.tolist())]
        blocks = xp.zeros(ends[-1], np.float64)
        for part, end in zip(own, ends, strict=True):
            if part.size:
                blocks[end - part.size : end] = part
        all_reduce(comm, blocks, algorithm="ordered")
    return blocks
