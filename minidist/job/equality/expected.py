"""What a run must equal: the snapshots of the reference that belongs to a config.

Proved by: tests/equality/test_equality.py, tests/techniques/test_local_steps.py
"""

from collections.abc import Sequence

from minidist.data.batch_plan import StepBatch
from minidist.job.config.train_config import Batches, TrainConfig, resolve_batches
from minidist.job.equality.reference import reference
from minidist.job.equality.replicas_alone import replicas_reference
from minidist.job.equality.rounding import add_tolerances, is_rounded
from minidist.job.equality.snapshot import Snapshot, snapshot
from minidist.job.train.state import Observer
from minidist.techniques import trains_alone
from minidist.techniques.meeting import replicas_of


def expected_snapshots(
    config: TrainConfig,
    ranks: int,
    rank: int = 0,
    observers: Sequence[Observer] = (),
    told: Sequence[StepBatch] | None = None,
) -> list[Snapshot]:
    """Return the reference's snapshots, one per step. rank: whose, where replicas train alone and differ.

    observers: of the reference's steps; where replicas train alone, of the first one's. told: as for `reference`.
    Where the tolerance is what rounding does, it is next to each snapshot's kinds (rounding.py).
    """
    batches = resolve_batches(config, ranks)
    if is_rounded(config, batches.dims):
        own = _snapshots(config, batches, rank, observers, told)
        precise = config.model_copy(update={"precision": "fp64"})
        add_tolerances(own, _snapshots(precise, batches, rank, (), told), config.precision)
        return own
    return _snapshots(config, batches, rank, observers, told)


def _snapshots(
    config: TrainConfig, batches: Batches, rank: int, observers: Sequence[Observer], told: Sequence[StepBatch] | None
) -> list[Snapshot]:
    if trains_alone(config):
        # The mesh is pp x dp x cp x tp, and neighbours on dp are one replica.
        ranks = batches.dp // replicas_of(config, batches.dp)
        return replicas_reference(config, batches, observers)[rank // batches.dims.tp % batches.dp // ranks]
    snapshots: list[Snapshot] = []
    reference(config, batches, [lambda state: snapshots.append(snapshot(state)), *observers], told)
    return snapshots
