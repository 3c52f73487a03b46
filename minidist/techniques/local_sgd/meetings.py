"""How a rank's replica meets the others: all weights are averaged every H steps, or fragments of them in turn.

                      parameters    gradients     optimizer
    LocalSteps        everywhere    its own       its own         local SGD, and DiLoCo
    StreamingSteps    its own       its own       its own         Streaming DiLoCo; the common weights are everywhere

Where several ranks share a replica's weights (ZeRO, FSDP), a rank has its shard of all of these.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py,
tests/techniques/test_sharded_replicas.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.parallel.replica_guard import check_same_model
from minidist.techniques.local_sgd.averaging import OuterOptimizer, Part, PeriodicModelAverager, flat_of, parts_of
from minidist.techniques.local_sgd.streaming import StreamingOuterOptimizer, Turns
from minidist.techniques.meeting import Meeting, Replica


def with_outer_steps(settings: Any, optimizer: Any, weights: Part | Iterable[Part]) -> Any:
    """Return the optimizer of a replica with DiLoCo's outer steps, or as it is where averages are not followed by any.

    The outer steps of Streaming DiLoCo send messages, so `StreamingSteps` adds them.
    """
    if settings.outer_optimizer == "none":
        return optimizer
    return OuterOptimizer(optimizer, weights, settings.outer_lr, settings.outer_momentum)


class LocalSteps(Meeting):
    """Local SGD: each rank steps with its own rows' gradient; weights are averaged every H steps and at the end.

    A checkpoint follows an average, so its weights are those of all replicas; optimizer state is stored by replica.
    Replicas with different numbers of rows count in proportion to them.
    """

    def __init__(self, settings: Any, replica: Replica) -> None:
        parts, self.last = parts_of(replica.parts), replica.steps
        self.optimizer = with_outer_steps(settings, replica.make_optimizer(), parts)
        for part in parts:
            check_same_model(flat_of(part), replica.comm, "local SGD", {"local_steps": settings.local_steps})
        self.average = PeriodicModelAverager(
            parts,
            replica.comm,
            settings.local_steps,
            algorithm=replica.reduction,
            module=replica.module,
            share=replica.share,
        )
        # The averager has sent rank 0's weights to all ranks: the first round begins there.
        if isinstance(self.optimizer, OuterOptimizer):
            self.optimizer.begin_round()

    def step(self) -> None:
        self.optimizer.step()

        # The last step ends with an average too, where H does not divide the number of steps. A resumed job begins
        # after an average, and its optimizer has counted the steps before.
        averaged = self.average.step()
        if not averaged and self.optimizer.step_count == self.last:
            self.average.average()
            averaged = True
        if averaged and isinstance(self.optimizer, OuterOptimizer):
            self.optimizer.outer_step()

        # An offloaded optimizer steps copies on the host, which must be the new weights, too.
        if averaged:
            self.optimizer.refresh()


class StreamingSteps(Meeting):
    """Streaming DiLoCo: replicas train alone, and fragments of their weights meet the common ones in turn.

    The model is the common weights, which a checkpoint holds; a replica's own ones are a part of its optimizer state.
    """

    def __init__(self, settings: Any, replica: Replica) -> None:
        parts, comm, self.last = parts_of(replica.parts), replica.comm, replica.steps
        for part in parts:
            check_same_model(flat_of(part), comm, "Streaming DiLoCo", {"local_steps": settings.local_steps})
            with purpose("startup"):
                broadcast(comm, part.data)
        turns = Turns(
            settings.local_steps,
            settings.outer_fragments,
            settings.outer_delay,
            settings.outer_mixing,
            # The weights that are trained are cut into fragments as on one device.
            list(replica.module.parameters()),
        )
        self.optimizer: StreamingOuterOptimizer = StreamingOuterOptimizer(
            replica.make_optimizer(),
            parts,
            comm,
            turns,
            settings.outer_lr,
            settings.outer_momentum,
            algorithm=replica.reduction,
            share=replica.share,
        )
        self.common = [self.optimizer.common_of(part) for part in parts]

    def step(self) -> None:
        self.optimizer.step()

        # What is on its way at the end would never be received.
        if self.optimizer.step_count == self.last:
            self.optimizer.wait()
