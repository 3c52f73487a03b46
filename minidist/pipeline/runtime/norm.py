"""The gradient norm over all stages, as block sums in one order that every rank has: stage after stage, each stage's
ranks.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.comm import Comm
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
    """Scale the gradients of all stages so that their global norm is at most `max_norm`; returns the norm before.

    optimizer: as for `optim.clip_by_norm_`, for gradients in half precision.
    """
    mine = block_sums(pipe)
    parts = [mine[stage] if owner == pipe.comm.rank else np.zeros(0) for stage, owner in places(pipe)]
    return clip_by_norm_(pipe.flats, norm_from_blocks(gather_blocks(pipe.comm, parts)), max_norm, optimizer)


def gather_blocks(comm: Comm, parts: Sequence[Any]) -> Any:
    """Return the block sums of all ranks, one place after the other, on every rank.

    parts: the block sums of each place; an empty array where another rank has them. Sends two ordered all-reduces, 8 B
    per place and 8 B per block (purpose clip_norm).
    """
    with purpose("clip_norm"):
        counts = np.array([float(part.size) for part in parts])
        all_reduce(comm, counts, algorithm="ordered")
        ends = np.cumsum(counts).astype(int)
        blocks = np.zeros(ends[-1])
        for part, end in zip(parts, ends, strict=True):
            if part.size:
                blocks[end - part.size : end] = part
        all_reduce(comm, blocks, algorithm="ordered")
    return blocks
