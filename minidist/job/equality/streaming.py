"""The reference of Streaming DiLoCo: on one device the outer steps of all replicas, delayed as the ranks delay them.

What travels between ranks is kept here for `--outer-delay` steps. It is written from the formulas of the paper's
algorithm 2, over the arrays of replicas that train one after the other, and without a message.

Proved by: tests/train/test_streaming_diloco.py
"""

from collections.abc import Callable, Sequence

from minidist.base import arrays as xp
from minidist.job.config.train_config import TrainConfig
from minidist.job.equality.one_device import OneDevice
from minidist.job.equality.snapshot import Snapshot
from minidist.parallel.streaming_diloco import fragments_of, turn_of

Mean = Callable[[Sequence[xp.Array]], xp.Array]


class StreamingReplay:
    """The common weights, the outer momentum, and the outer gradients on their way. mean: over the replicas."""

    def __init__(self, config: TrainConfig, devices: Sequence[OneDevice], mean: Mean) -> None:
        self.config, self.devices, self.mean = config, devices, mean
        self.fragments = fragments_of(devices[0].flat, config.outer_fragments)
        self.common = xp.array(devices[0].flat.data)
        self.momentum, self.sent = xp.zeros_like(self.common), xp.zeros_like(self.common)

    def after_step(self, done: int) -> None:
        """Send, and then merge, the fragments whose turn it is after `done` inner steps of all replicas."""
        config, kind = self.config, self.common.dtype.type
        mu, lr, alpha = config.outer_momentum, config.outer_lr, config.outer_mixing
        for i, place in enumerate(self.fragments):
            turn = turn_of(i, len(self.fragments), config.local_steps)
            if done in range(turn, done + 1, config.local_steps):
                self.sent[place] = self.mean([self.common[place] - d.flat.data[place] for d in self.devices])
            if done in range(turn + config.outer_delay, done + 1, config.local_steps):
                outer = self.sent[place]
                momentum = self.momentum[place] * kind(mu) + outer
                common = self.common[place] - kind(lr) * (outer + kind(mu) * momentum)
                self.momentum[place], self.common[place] = momentum, common
                for device in self.devices:
                    own = device.flat.data[place]
                    device.flat.data[place] = kind(alpha) * own + kind(1 - alpha) * common
        for device in self.devices:
            device.flat.updated()

    def added_to(self, snapshot: Snapshot, device: OneDevice) -> Snapshot:
        """Return the snapshot of a replica with what the ranks' optimizers hold beside the inner state."""
        flat, outer = device.flat, {}
        held = {"outer_momentum": self.momentum, "outer_gradient": self.sent, "common": self.common}
        for p in flat.parameters:
            for key, array in {**held, "own": flat.data}.items():
                outer[f"{p.name}.{key}"] = xp.to_host(xp.array(array[flat.slice_of(p)]))
        return {**snapshot, "optimizer": {**snapshot["optimizer"], **outer}}
