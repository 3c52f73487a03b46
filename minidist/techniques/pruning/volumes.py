"""The bytes of sparse training in closed form, of all groups of ranks of a data axis together.

Proved by: tests/techniques/test_pruning.py
"""

from collections.abc import Sequence

from minidist.parallel.volume import gradient_volume
from minidist.techniques import AxisRun, Run
from minidist.techniques.pruning.schedule import SparsitySchedule
from minidist.techniques.pruning.selection import selection_bytes


def pruned_weights(schedule: SparsitySchedule, sizes: Sequence[int], together: bool, done: int) -> int:
    """Return how many weights are pruned after `done` steps. sizes: of each matrix. together: as one, not each."""
    return sum(schedule.pruned(size, done) for size in ([sum(sizes)] if together else sizes))


def reduction_bytes(run: Run, axis: AxisRun, elements: int) -> int:
    """Return the bytes of reducing this number of elements, as the layout of the run does it."""
    sent = gradient_volume(run.config.zero, elements, axis.ranks, run.config.dp_replicate)
    return axis.groups * sent * run.itemsize


def pruning_bytes(run: Run, axis: AxisRun, schedule: SparsitySchedule, sizes: Sequence[int], units: int) -> int:
    """Return the bytes of ZeRO 3's masks: ranks compare magnitudes, and exchange masks, eight elements per byte.

    sizes: elements of each matrix. units: of the units that have one.
    """
    copies = run.config.dp_replicate
    shards, compared = axis.ranks // copies, 1 if run.config.sparsity_scope == "global" else len(sizes)
    times = sum(schedule.is_due(run.done + step + 1) for step in range(run.steps)) if sizes else 0
    once, masks = selection_bytes(len(sizes), compared, run.itemsize, shards), (shards - 1) * (units // 8)
    # A resumed job exchanges the masks of its checkpoint, too.
    sent: int = axis.groups * copies * (times * (once + masks) + (masks if run.done else 0))
    return sent
