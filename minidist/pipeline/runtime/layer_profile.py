"""How long each layer of a pipeline takes on its rank, measured in the steps that train: forward and backward.

    stage 0, rank 0   | embedding | layer 0 | layer 1 |        seconds of each layer's forward, by hooks on the layers;
    stage 1, rank 1   | layer 2 | layer 3 | head, loss |       seconds of every action of a stage, by the pipeline

A layer's share of all actions of its stage (backward, deferred weight gradients, recomputation) is its share of the
stage's forward. What does not belong to a layer stays where it is: the embedding on the first stage, the head and the
loss on the last one. The clock is the world's: it advances while a rank computes, and not while it waits.

A rank that is slower than others cannot be told from layers that are more expensive by seconds alone, so the FLOPs of
the layers are counted, too: seconds per FLOP are the pace of a rank.

Proved by: tests/pipeline/test_layer_profile.py, tests/techniques/test_repartition.py
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidist.base.flop_counter import current_flop_counter
from minidist.core.comm import Comm
from minidist.core.nn import Module
from minidist.core.pipeline.runtime.pipeline import Step


class LayerTimes(NamedTuple):
    """What a rank measured of each layer, zeros for those of other ranks; and of what is in front and behind.

    seconds: per step. flops: of the forward passes of a step. front, back: seconds per step of what the first and the
    last stage compute in addition to their layers.
    """

    seconds: np.ndarray
    flops: np.ndarray
    front: float = 0.0
    back: float = 0.0

    def numbers(self) -> np.ndarray:
        """Return everything as one float64 array, which can be sent."""
        return np.concatenate([self.seconds, self.flops, [self.front, self.back]])

    @classmethod
    def of(cls, numbers: np.ndarray) -> "LayerTimes":
        """Return what `numbers` returned for some rank."""
        layers = len(numbers) // 2 - 1
        return cls(numbers[:layers], numbers[layers : 2 * layers], float(numbers[-2]), float(numbers[-1]))


class LayerProfile:
    """Measures the layers of one rank: an observer of a `Pipeline`. A job calls `end_step`."""

    def __init__(self) -> None:
        self.steps: list[np.ndarray] = []  # LayerTimes.numbers() of each step since the last `take`
        self.running = ""  # the action that is measured, for the names of its parts in the trace

    def watch(self, comm: Comm, stages: Mapping[int, Mapping[int, Module]], layers: int, last: int) -> None:
        """Measure other stages from now on: those of a pipeline that has just been made.

        stages: of each stage of this rank its layers, by their number in the model, which has `layers` of them. last:
        the number of the last stage. Registers forward hooks on the layers.
        """
        self.comm, self.stages, self.last = comm, {n: list(own) for n, own in stages.items()}, last
        self.steps, self.warm = [], False
        self._clear(layers)
        for own in stages.values():
            for number, module in own.items():
                module.register_forward_pre_hook(partial(self._before, number))
                module.register_forward_hook(partial(self._after, number))

    def _clear(self, layers: int) -> None:
        self.forward, self.flops = np.zeros(layers), np.zeros(layers)  # of each layer
        self.forwards = dict.fromkeys(self.stages, 0.0)  # seconds of each stage's forward passes
        self.actions = dict.fromkeys(self.stages, 0.0)  # seconds of all of its actions

    # --- called by the pipeline ---

    @contextmanager
    def __call__(self, step: Step) -> Iterator[None]:
        """Measure an action, which ends when the clock has advanced by it."""
        self.running, began = step.name, self.comm.trace.computed
        yield
        seconds, self.running = self.comm.trace.computed - began, ""
        self.actions[step.stage] += seconds
        if step.kind in ("F", "RECOMPUTE"):
            self.forwards[step.stage] += seconds

    def _before(self, number: int, module: Module, arguments: Any) -> None:
        # Passes outside of actions (evaluations, the one that learns shapes) are not measured.
        if self.running:
            self.comm.advance_clock(self.running)
            self.layer_began, self.layer_flops = self.comm.trace.computed, _flops()

    def _after(self, number: int, module: Module, arguments: Any, output: Any) -> None:
        if self.running:
            self.flops[number] += _flops() - self.layer_flops
            self.comm.advance_clock(self.running)
            self.forward[number] += self.comm.trace.computed - self.layer_began

    # --- called by the job ---

    def end_step(self) -> None:
        """A step has ended. The first one of a new pipeline warms up caches and memory, and does not count."""
        if self.warm:
            self.steps.append(self._of_step().numbers())
        self.warm = True
        self._clear(len(self.forward))

    def take(self, done: int) -> LayerTimes | None:
        """Return the medians over the steps since the last call; None without any. done: steps of the job so far."""
        steps, self.steps = self.steps, []
        return LayerTimes.of(np.median(steps, axis=0)) if steps else None

    def _of_step(self) -> LayerTimes:
        seconds, front, back = np.zeros_like(self.forward), 0.0, 0.0
        for stage, layers in self.stages.items():
            own = float(self.forward[layers].sum())
            if not own or not self.forwards[stage]:
                continue
            # Each layer's share of all actions is its share of the forward; the rest is in front or behind.
            scale = self.actions[stage] / self.forwards[stage]
            rest = max(0.0, self.forwards[stage] - own) * scale
            if stage == 0:
                front += rest
            elif stage == self.last:
                back += rest
            else:  # between the layers: theirs in equal shares of their seconds
                scale = self.actions[stage] / own
            seconds[layers] = self.forward[layers] * scale
        return LayerTimes(seconds, self.flops, front, back)


def _flops() -> int:
    counter = current_flop_counter()
    return 0 if counter is None else counter.totals.get("forward", (0, 0))[0]
