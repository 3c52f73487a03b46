"""How a rank's replica meets the others, and the same on one device, whose replicas train one after the other.

All weights are averaged every H steps, or fragments of them in turn:

                      parameters    gradients     optimizer
    LocalSteps        everywhere    its own       its own         local SGD, and DiLoCo
    StreamingSteps    its own       its own       its own         Streaming DiLoCo; the common weights are everywhere

Where several ranks share a replica's weights (ZeRO, FSDP), a rank has its shard of all of these. On one device what
travels between the ranks of Streaming DiLoCo is kept for `--outer-delay` steps. The replays are written from the
formulas of the papers, and without a message.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py,
tests/techniques/test_sharded_replicas.py
"""

from collections.abc import Iterable, Sequence
from typing import Any

from minidist.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.nn.buffers import named_buffers
from minidist.parallel.replica_guard import check_same_model
from minidist.techniques.local_sgd.averaging import OuterOptimizer, Part, PeriodicModelAverager, flat_of, parts_of
from minidist.techniques.local_sgd.streaming import StreamingOuterOptimizer, Turns, fragments_of, turn_of
from minidist.techniques.meeting import Mean, Meeting, Replay, Replica


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


# --- on one device ----------------------------------------------------------------------------------------------------


class AveragingReplay(Replay):
    """Gives all replicas the mean of their weights every H steps and at the end, and makes their outer steps."""

    def __init__(self, settings: Any, devices: Sequence[Any], mean: Mean) -> None:
        self.every, self.devices, self.mean = settings.local_steps, devices, mean
        self.last = devices[0].job.config.steps
        for device in devices:
            for axis in device.data_axes:
                axis.optimizer = with_outer_steps(settings, axis.optimizer, device.flat)

    def after_step(self, done: int) -> None:
        if done % self.every and done != self.last:
            return
        mean = self.mean([device.flat.data for device in self.devices])
        for device in self.devices:
            device.flat.data[...] = mean
            device.flat.updated()
            for axis in device.data_axes:
                if isinstance(axis.optimizer, OuterOptimizer):
                    axis.optimizer.outer_step()

        # The running statistics of batch norms, which the averages of weights are evaluated with.
        buffers = [dict(named_buffers(device.job.model)) for device in self.devices]
        means = {name: self.mean([each[name] for each in buffers]) for name in buffers[0]}
        for device in self.devices:
            device.job.model.load_state_dict(means, strict=False)


class StreamingReplay(Replay):
    """The common weights, the outer momentum, and the outer gradients on their way."""

    def __init__(self, settings: Any, devices: Sequence[Any], mean: Mean) -> None:
        self.settings, self.devices, self.mean = settings, devices, mean
        self.fragments = fragments_of(devices[0].flat.offsets, settings.outer_fragments)
        self.common = xp.array(devices[0].flat.data)
        self.momentum, self.sent = xp.zeros_like(self.common), xp.zeros_like(self.common)

    def after_step(self, done: int) -> None:
        """Send, and then merge, the fragments whose turn it is after `done` inner steps of all replicas."""
        settings, kind = self.settings, self.common.dtype.type
        mu, lr, alpha = settings.outer_momentum, settings.outer_lr, settings.outer_mixing
        for i, place in enumerate(self.fragments):
            turn = turn_of(i, len(self.fragments), settings.local_steps)
            if done in range(turn, done + 1, settings.local_steps):
                self.sent[place] = self.mean([self.common[place] - d.flat.data[place] for d in self.devices])
            if done in range(turn + settings.outer_delay, done + 1, settings.local_steps):
                outer = self.sent[place]
                momentum = self.momentum[place] * kind(mu) + outer
                common = self.common[place] - kind(lr) * (outer + kind(mu) * momentum)
                self.momentum[place], self.common[place] = momentum, common
                for device in self.devices:
                    own = device.flat.data[place]
                    device.flat.data[place] = kind(alpha) * own + kind(1 - alpha) * common
        for device in self.devices:
            device.flat.updated()

    def held(self, device: Any) -> dict[str, Any]:
        flat, result = device.flat, {}
        held = {"outer_momentum": self.momentum, "outer_gradient": self.sent, "common": self.common, "own": flat.data}
        for p in flat.parameters:
            for key, array in held.items():
                result[f"{p.name}.{key}"] = xp.to_host(xp.array(array[flat.slice_of(p)]))
        return result
