"""The gradient norm over all stages of a pipeline, and clipping by it.

The norm is that of block sums in one order that every rank has: stage after stage, its ranks.

    place            0           1           2 ...         (stage, rank)
    block sums    | . . . | . . . . . . | . . |            every rank fills its own places and adds the others' zeros

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_post_validation.py
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.pipeline.plan import Plan
from minidist.optim import block_square_sums, check_max_norm, clip_by_norm_, norm_from_blocks
from minidist.pipeline.runtime.pipeline import Pipeline


def places(plan: Plan) -> list[tuple[int, int]]:
    """Return (stage, rank) in the order in which the norm adds them."""
    return [(stage, rank) for stage, ranks in plan.holders().items() for rank in ranks]


def block_sums(pipe: Pipeline) -> dict[int, Any]:
    """Return the block sums of squares of a rank's stages; what is shared counts at its first place only."""
    sums: dict[int, Any] = {}
    for n, stage in pipe.stages.items():
        gradients = [
            xp.zeros(p.size, np.float64, p.data) if p.grad is None else p.grad.reshape(-1)
            for p in stage.parameters
            if p.requires_grad and (n, pipe.comm.rank, p.name) not in pipe.reduce.shared.copies
        ]
        sums[n] = block_square_sums(xp.concatenate(gradients) if gradients else xp.zeros(0, np.float64))
    return sums


def clip_grad_norm_(pipe: Pipeline, max_norm: float, optimizer: Any = None) -> float:
    """Clip the gradients of a pipeline by the norm over all its stages and return it; a shared parameter counts once.

    The norm is that of one slice per stage in stage order, its first place holding what is shared: bitwise the same
    on every rank. Each rank sends its block sums (purpose clip_norm). optimizer: as for `optim.clip_by_norm_`.
    """
    check_max_norm(max_norm)
    sums, nothing = block_sums(pipe), xp.zeros(0, np.float64)
    own = [sums[stage] if rank == pipe.comm.rank else nothing for stage, rank in places(pipe.plan)]
    return clip_by_norm_(pipe.flats, norm_from_blocks(gather_blocks(pipe.comm, own)), max_norm, optimizer)


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
