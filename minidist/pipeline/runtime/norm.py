"""The gradient norm over all stages, as block sums in one order that every rank has: stage after stage, each stage's
ranks.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.optim import block_square_sums, clip_by_norm_, norm_from_blocks

if TYPE_CHECKING:
    from minidist.pipeline.runtime.pipeline import Pipeline


def places(pipe: "Pipeline") -> list[tuple[int, int]]:
    """(stage, rank) in the order in which the norm adds them."""
    return [(stage, rank) for stage, ranks in pipe.plan.holders().items() for rank in ranks]


def block_sums(pipe: "Pipeline") -> dict[int, Any]:
    """Block sums of squares of this rank's stages; what is shared counts at its first place only."""
    mine: dict[int, Any] = {}
    for number, stage in pipe.stages.items():
        own = [
            p
            for p in stage.parameters
            if p.requires_grad and (number, pipe.comm.rank, p.name) not in pipe.shared.copies
        ]
        whole = [np.zeros(0), *(np.zeros(p.size) if p.grad is None else p.grad.reshape(-1) for p in own)]
        mine[number] = block_square_sums(np.concatenate(whole[1:] or whole))
    return mine


def clip_grad_norm(pipe: "Pipeline", max_norm: float, optimizer: Any = None) -> float:
    """Every rank learns all block sums: two ordered all-reduces, 8 B a place and 8 B for 1,024 elements (purpose
    clip_norm).

    optimizer: as for `optim.clip_by_norm_`, for gradients of two bytes.
    """
    mine, order, rank = block_sums(pipe), places(pipe), pipe.comm.rank
    with purpose("clip_norm"):
        counts = np.array([len(mine[stage]) if owner == rank else 0 for stage, owner in order], float)
        counts = np.asarray(all_reduce(pipe.comm, counts, algorithm="ordered"))
        blocks, starts = np.zeros(int(counts.sum())), np.concatenate([[0], np.cumsum(counts)]).astype(int)
        for at, (stage, owner) in enumerate(order):
            if owner == rank:
                blocks[starts[at] : starts[at + 1]] = mine[stage]
        blocks = np.asarray(all_reduce(pipe.comm, blocks, algorithm="ordered"))
    return clip_by_norm_(pipe.flats, norm_from_blocks(blocks), max_norm, optimizer)
