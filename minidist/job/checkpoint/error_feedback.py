"""The residuals of error feedback in a checkpoint: gradients that were computed and have not been sent yet.

A residual belongs to one rank of a data axis. It is stored under the number of that rank, and on another number of
ranks the sum of all is kept (`rank_state.py`, rule "sum"). The rest of a compressor's state is equal on all ranks of
its axis, and is stored once. Sends nothing.

Proved by: tests/train/test_compression.py
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from minidist.base.errors import UsageError, quoted_path
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard, ReplicaId
from minidist.job.checkpoint.rank_state import RankState, rank_state_shards, read_rank_state
from minidist.parallel import GradientReducer
from minidist.parallel.compression import Compressor
from minidist.parallel.dims import Axes


class CompressedAxis(Protocol):
    """What error feedback needs to know of a data axis."""

    stage: int
    experts: bool
    replica: ReplicaId
    reducers: list[GradientReducer]
    compressor: Compressor | None


class CompressedStrategy(Protocol):
    """What error feedback needs to know of a strategy."""

    axes: Axes

    @property
    def data_axes(self) -> Sequence[CompressedAxis]: ...


def error_feedback_shards(strategy: CompressedStrategy) -> list[CheckpointShard]:
    """Return this rank's compressor state, for `save`."""
    shards = []
    for name, axis, compressor in _compressed(strategy):
        (reducer,) = axis.reducers
        if compressor.error_feedback:
            # Stored per rank, because no two ranks hold the same residual.
            state = RankState(f"residual/{name}", compressor.residual(reducer.buckets))
            shards += rank_state_shards(axis.replica.number, [state])
        for key, array in compressor.shared_state().items():
            shards.append(CheckpointShard(f"compression/{name}/{key}", array.shape, array, replica=axis.replica))
    return shards


def load_error_feedback(checkpoint: Checkpoint, strategy: CompressedStrategy) -> None:
    """Give every compressor its state in the checkpoint. Raises UsageError where a residual would be lost."""
    # Every residual in the checkpoint must find a compressor that will send it.
    stored = {name.rpartition("/")[0] for name in checkpoint.tensors if name.startswith("local/residual/")}
    wanted = {f"local/residual/{name}" for name, _, compressor in _compressed(strategy) if compressor.error_feedback}
    if stored and not (wanted and wanted <= stored):
        raise UsageError(
            f"the checkpoint {quoted_path(checkpoint.path)} holds gradients that were not sent yet"
            f" ({sorted(stored)[0]}), and"
            " this job has no place for them; resume with a --compression with error feedback, and with the --tp, --pp"
            " and --ep of the checkpoint"
        )

    # A residual is this rank's own; the rest of the state is the same on all ranks of the axis.
    for name, axis, compressor in _compressed(strategy):
        (reducer,) = axis.reducers
        if compressor.error_feedback:
            residual = read_rank_state(checkpoint, f"residual/{name}", *axis.replica)
            if residual is not None:
                compressor.load_residual(reducer.buckets, residual)
        prefix = f"compression/{name}/"
        shared = {key[len(prefix) :]: checkpoint.tensor(key) for key in checkpoint.tensors if key.startswith(prefix)}
        if shared:
            compressor.load_shared_state(shared)


def _compressed(strategy: CompressedStrategy) -> Iterator[tuple[str, CompressedAxis, Compressor]]:
    """Yield (name in the checkpoint, data axis, compressor) of each data axis whose gradients are compressed."""
    stages: set[int] = set()
    for axis in strategy.data_axes:
        if axis.compressor is not None:
            group = f" experts {strategy.axes.ep.rank}" if axis.experts else ""
            # The second axis of a stage that is not that of its experts has the weights tied to another stage.
            if not axis.experts and axis.stage in stages:
                group = " tied"
            stages.add(axis.stage)
            yield f"stage {axis.stage} tile {strategy.axes.tp.rank}{group}", axis, axis.compressor
