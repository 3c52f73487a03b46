"""A training loop that a technique has in place of the job's, for ranks that have no common step.

The job's loop (`job/train/trainer.py`) trains a layout, whose ranks make every step together. A technique whose ranks
do not returns an `OwnLoop` from `Extension.own_loop`; the commands then run it, compare it with one device, and count
its bytes without knowing what it is. One technique of a job may have a loop.

Proved by: tests/train/test_servers.py, tests/techniques/test_extensions.py
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from minidist.base.traces import Trace
from minidist.core.comm import Comm


class OwnLoop:
    """What the commands ask of such a loop; every rank calls `train` or `train_and_keep`.

    no_device: the sentence that refuses --device; empty where arrays may be on a device. shown_by: the rank that shows
    the progress of the job.
    """

    no_device: ClassVar[str] = ""
    shown_by: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config

    def train(self, comm: Comm, observers: Sequence[Any]) -> Any:
        """Run this rank's part of the job; return its `TrainResult`, with the same losses on every rank."""
        raise NotImplementedError

    def bytes_sent(self, batches: Any, first: Any) -> dict[str, int]:
        """Return the payload bytes of all ranks together without checkpoints, by purpose. first: rank 0's result."""
        raise NotImplementedError

    def bytes_averaged(self, first: Any) -> int:
        """Return the bytes of what all ranks average before each checkpoint. first: rank 0's result."""
        return 0

    def train_and_keep(self, comm: Comm, progress: Any) -> Any:
        """Run this rank's part of the job, and return what `compare` needs of it. progress: shows the steps."""
        raise NotImplementedError

    def compare(self, kept: Sequence[Any], traces: Sequence[Trace], progress: Any) -> Any:
        """Return the `Comparison` with one device. kept, traces: of all ranks, in rank order."""
        raise NotImplementedError
