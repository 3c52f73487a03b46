"""Replicas that train alone and *meet*: a technique says when, and how, their weights are combined.

With most techniques all data-parallel ranks make the same update, of the sum of their gradients. An extension with
`trains_alone` differs: each replica steps with the gradient of its rows, and the replicas exchange weights when the
technique says so. A replica is one data-parallel rank or, with --zero, the neighbours that share one of the
--dp-replicate copies:

    --dp 4                           | 0 | 1 | 2 | 3 |      four replicas
    --dp 4 --zero Z --dp-replicate 2 | 0   1 | 2   3 |      two; ranks 0 and 2 have the same shard, and so do 1 and 3

The job has the data axes (`strategies/replicas_alone.py`), the reference that trains one replica after the other
(`job/equality/replicas_alone.py`), and optimizer state by replica in checkpoints. A technique adds a `Meeting` to the
ranks, and a `Replay` of the same on one device.

Proved by: tests/techniques/test_meeting.py, tests/techniques/test_local_steps.py,
tests/techniques/test_sharded_replicas.py
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist.core.base import arrays as xp
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters


def replicas_of(config: Any, dp: int) -> int:
    """Return how many replicas `dp` data-parallel ranks are, in a job whose replicas train alone."""
    replicas: int = config.dp_replicate if config.zero else dp
    return replicas


Mean = Callable[[Sequence[xp.Array]], xp.Array]  # over replicas, as the ranks' all-reduce adds them


class Replica(NamedTuple):
    """A rank's replica of the model, or its shards of one that several ranks share.

    parts: the weights that the rank updates: a `FlatParameters`, or `Shard`s. comm: the ranks that have the same of the
    other replicas. module: the model, with its running statistics. make_optimizer: makes the job's optimizer of these
    weights. reduction: the algorithm of sums over `comm`. share: the replica's rows over those of all; None where all
    have as many. steps: of the whole job.
    """

    parts: Sequence[Any]
    comm: Comm
    module: Any
    make_optimizer: Callable[[], Any]
    reduction: str
    share: float | None
    steps: int

    @property
    def flat(self) -> FlatParameters:
        """The weights of a replica that lies whole on this rank."""
        (flat,) = self.parts
        assert isinstance(flat, FlatParameters)
        return flat


class Meeting:
    """Steps a rank's replica, and lets it meet the others.

    optimizer: whose state a checkpoint has, by replica. common: the weights that a checkpoint has, of each part of the
    replica; None where they are the replica's own.
    """

    optimizer: Any
    common: Sequence[xp.Array] | None = None

    def step(self) -> None:
        """Update the replica with the gradient of its rows; then exchange weights, if this is a step for that."""
        raise NotImplementedError


class Replay:
    """What the meetings of the ranks do, on one device, whose replicas train one after the other.

    It sends nothing, and is to be written independently of the `Meeting`.
    """

    def after_step(self, done: int) -> None:
        """Let the replicas meet, after each of them has made `done` steps."""
        raise NotImplementedError

    def held(self, device: Any) -> dict[str, Any]:
        """Return what the optimizer of a replica's rank holds and that of the device does not, as PARAMETER.KEY."""
        return {}
