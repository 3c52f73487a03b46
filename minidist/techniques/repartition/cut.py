"""Which cut a pipeline has next: the one whose slowest stage is fastest, by what the layers took on their ranks.

The seconds of a layer on another rank: those on its present rank, times the ratio of the ranks' seconds per FLOP.

Sources: Narayanan et al., PipeDream, SOSP 2019, section 3.1 (profile, then partition); torchgpipe's `balance_by_time`.
Both do it once, before the training.

Proved by: tests/techniques/test_repartition.py
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from minidist.core.base.arrays import Array
from minidist.core.base.layout import offsets
from minidist.pipeline.partition import by_slowest
from minidist.pipeline.runtime.layer_profile import LayerTimes

WORTHWHILE = 0.95  # a new cut is taken when its slowest stage needs at most this share of the old one's seconds


def choose_sizes(
    sizes: Sequence[int], holders: Mapping[int, Sequence[int]], times: Sequence[LayerTimes], per_stage: int
) -> list[int]:
    """Return the layers of each stage: of all cuts the one whose slowest stage is fastest, or `sizes`, those in use.

    holders: of each stage, its pipeline ranks; each of these is `per_stage` ranks of the job. times: of every rank, in
    rank order. A stage on several ranks is as slow as the slowest of them.
    """
    ranks = {n: [p * per_stage + i for p in own for i in range(per_stage)] for n, own in holders.items()}
    bounds = offsets(list(sizes))

    # A rank's pace; in stages whose ranks differ, that of the slowest.
    paces = []
    for stage in range(len(sizes)):
        of_ranks = [times[r].seconds.sum() / max(times[r].flops.sum(), 1) for r in ranks[stage]]
        paces.append(float(max(of_ranks)))
    if not all(paces):
        return list(sizes)  # nothing was measured on some rank

    # Each layer's work: its seconds where it is now, on a rank of pace 1. What is in front and behind does not move.
    work = np.concatenate(
        [
            np.max([times[r].seconds[a:b] for r in ranks[stage]], axis=0) / paces[stage]
            for stage, (a, b) in enumerate(pairwise(bounds))
        ]
    )
    work[0] += max(times[r].front for r in ranks[0]) / paces[0]
    work[-1] += max(times[r].back for r in ranks[len(sizes) - 1]) / paces[-1]

    best = [stage.last - stage.first + 1 for stage in by_slowest(work.tolist(), len(sizes), paces)]
    return best if slowest(work, best, paces) < WORTHWHILE * slowest(work, sizes, paces) else list(sizes)


def slowest(work: Array, sizes: Sequence[int], paces: Sequence[float]) -> float:
    """Return the seconds of the slowest stage of a cut."""
    bounds = offsets(list(sizes))
    return max(float(work[a:b].sum()) * pace for (a, b), pace in zip(pairwise(bounds), paces, strict=True))
