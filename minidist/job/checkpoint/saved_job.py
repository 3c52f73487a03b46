"""What a checkpoint needs of a job and of its strategy: training imports checkpoints, and not the other way round.

Proved by: tests/checkpoint/test_resume.py, tests/techniques/test_compression.py
"""

from collections.abc import Sequence
from typing import Any, Protocol, Self

from minidist.core.autograd import Parameter
from minidist.core.comm import Comm
from minidist.core.parallel.dims import Axes
from minidist.job.checkpoint.held import Buffer, LocalShard, ReplicaId
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.techniques import Extension


class SavedPlan(Protocol):
    """What a checkpoint asks of the batches to come; see `train.batch_plan.BatchPlan`."""

    def state(self) -> dict[str, Any]: ...
    def samples_of(self, steps: int) -> int: ...
    def load(self, state: dict[str, Any], steps: int) -> None: ...


class SavedJob(Protocol):
    """What a checkpoint records of a job."""

    config: TrainConfig
    batches: Batches
    model: Any

    @property
    def plan(self) -> SavedPlan: ...
    @property
    def extensions(self) -> Sequence[Extension]: ...
    @property
    def data_digest(self) -> str: ...


class SavedAxis(Protocol):
    """What a checkpoint asks of a data axis; see `train.strategies.data_axis.DataAxis`."""

    stage: int
    experts: bool
    optimizer: Any

    @property
    def replicas(self) -> Any: ...  # a `train.strategies.data_axis.Replicas`
    def weights(self) -> list[LocalShard]: ...
    def state_ranges(self) -> list[tuple[Parameter, int, int]]: ...
    def updated(self) -> None: ...


class SavedStrategy(Protocol):
    """What a checkpoint asks of a strategy; see `train.strategies.mesh.MeshStrategy`."""

    axes: Axes
    updates: int

    @property
    def job(self) -> SavedJob: ...
    @property
    def data_axes(self) -> Sequence[SavedAxis]: ...
    @property
    def step_count(self) -> int: ...
    @property
    def counts(self) -> dict[str, int]: ...
    def replica_of(self, axis: Any, parameter: Parameter) -> ReplicaId: ...
    def owns(self, axis: Any, parameter: Parameter) -> bool: ...
    def buffers(self) -> Sequence[Buffer]: ...
    def seen_from(self, comm: Comm) -> Self: ...
    def scalars(self) -> dict[str, float]: ...
    def load_scalars(self, scalars: dict[str, float]) -> None: ...
