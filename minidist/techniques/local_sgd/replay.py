"""Averages and outer steps on one device, of the arrays of replicas that train one after the other.

What travels between the ranks of Streaming DiLoCo is kept here for `--outer-delay` steps. It is written from the
formulas of the paper's algorithm 2, and without a message.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base import arrays as xp
from minidist.nn.buffers import named_buffers
from minidist.techniques.local_sgd.averaging import OuterOptimizer
from minidist.techniques.local_sgd.meetings import with_outer_steps
from minidist.techniques.local_sgd.streaming import fragments_of, turn_of
from minidist.techniques.meeting import Mean, Replay


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
