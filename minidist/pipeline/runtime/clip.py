"""The gradient norm over all stages of a pipeline, and clipping by it.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_post_validation.py
"""

from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.optim import block_square_sums, check_max_norm, clip_by_norm_, norm_from_blocks
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime.pipeline import Pipeline
from minidist.core.pipeline.runtime.reduction import gather_blocks


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
            if p.requires_grad and (n, pipe.comm.rank, p.name) not in pipe.shared.copies
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
