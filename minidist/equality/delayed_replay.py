"""An asynchronous pipeline on one device: each micro-batch with the weight versions that the version rule names.

    mini-batch t of pipedream with three stages, all versions kept:
        stage 0 computes with version max(0, t-2), stage 1 with max(0, t-1), stage 2 with t
        forward and backward through all of them, then each stage's update

It shares with the pipeline the engine and the optimizer; no plan, no message, no stash.

Proved by: tests/train/test_asynchronous.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.autograd import Tensor
from minidist.base.arrays import Array
from minidist.config.pipeline_plan import cut_stages, make_plan, replicas_of
from minidist.config.train_config import Batches, TrainConfig, updates_of
from minidist.nn.flat import FlatParameters
from minidist.train.job import Job, as_input, build
from minidist.train.loss import ordered_sum
from minidist.train.state import Observer, StepState
from minidist.train.strategies.asynchronous_pipeline import ScheduledOptimizer, add_record
from minidist.train.strategies.data_axis import Tensors
from minidist.train.strategies.strategy import Strategy


class DelayedUnit:
    """Parameters with one delay: their versions, the mini-batches' gradients until an update, and the optimizer.

    replicas: ranks of each stage. tied: whether another stage shares it; it then has the longest delay of all.
    versions: number -> values, from the one that was used last to the latest. No later micro-batch needs an older one,
    because a version rule never goes back, so the memory does not grow with the steps.
    """

    def __init__(self, job: Job, parameters: Any, stage: int, stages: int, replicas: Sequence[int], tied: bool) -> None:
        self.flat = FlatParameters(parameters)
        self.optimizer = ScheduledOptimizer(job, self.flat)
        self.versions, self.latest = {0: self.flat.data.copy()}, 0
        self.round = replicas[stage]  # mini-batches per update
        self.parts: list[Array] = []
        self.gradient, self.state = np.zeros_like(self.flat.data), dict[str, dict[str, Array]]()
        self.updates, self.tied = updates_of(job.config.schedule), tied
        self.accumulation, self.last_stage = job.batches.accumulation, stages - 1
        # The lag of a forward pass in updates: the mini-batches in flight from this stage to the last one, in rounds.
        self.warm_up = (sum(replicas[stage:]) - 1) // self.round

    def version_of(self, t: int) -> int:
        """Return the version with which micro-batch `t` is computed: the schedule's version rule."""
        # PipeDream-2BW: one update behind, for all stages.
        if self.updates == "2bw":
            return max(t // self.accumulation - 1, 0)
        # Vertical sync: every stage uses the version with which the first one began.
        if self.updates == "vertical-sync" or self.tied:
            return max(0, t - self.last_stage)
        # Weight stashing: each stage uses its newest version.
        return max(0, t // self.round - self.warm_up)

    def bind(self, t: int) -> None:
        """Compute with the version of micro-batch `t`, and forget older ones."""
        version = self.version_of(t)
        for older in [number for number in self.versions if number < version]:
            del self.versions[older]
        self.flat.bind(self.versions[version].copy(), version)

    def add(self, gradient: Array, last: bool) -> None:
        """Take the gradient of a step; make an update when a round is complete, or it is the job's last step."""
        self.parts.append(np.array(gradient))
        self.flat.zero_grad()
        if len(self.parts) < self.round and not last:
            return

        # In the order of the mini-batches, then their mean.
        total = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        self._update(total if self.round == 1 else total * (1.0 / len(self.parts)))
        self.parts = []

    def _update(self, gradient: Array) -> None:
        # A version is an array of its own, so that older ones stay as they were.
        self.flat.bind(self.versions[self.latest].copy(), self.latest)
        for parameter in self.flat.parameters:
            if parameter.requires_grad:
                parameter.grad = gradient[self.flat.slice_of(parameter)].reshape(parameter.shape).copy()
        self.optimizer.step()
        self.gradient = gradient
        self.state = {name: {k: a.copy() for k, a in row.items()} for name, row in self.optimizer.state.items()}
        self.latest += 1
        self.versions[self.latest] = self.flat.data.copy()
        self.flat.zero_grad()


class DelayedDevice(Strategy):
    """One device that computes with old versions, and makes the updates itself; `tensors` shows the latest ones."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, [])
        config = job.config
        plan = make_plan(config, job.batches.accumulation)
        self.modules, tied = cut_stages(config, job.model, plan.stages)
        replicas = replicas_of(config) or [1] * plan.stages

        # Of each stage a unit, and another for the weight that it shares with another stage.
        self.stages: list[list[DelayedUnit]] = []
        for stage, module in enumerate(self.modules):
            parameters = list(module.parameters())
            own, shared = [p for p in parameters if p.name not in tied], [p for p in parameters if p.name in tied]
            self.stages.append(
                [DelayedUnit(job, part, stage, plan.stages, replicas, part is shared) for part in (own, shared) if part]
            )
        self.units = [unit for stage in self.stages for unit in stage]
        self.tied_units = [stage[-1] for stage in self.stages if tied and {*stage[-1].flat.names} <= {*tied}]
        self.steps = 0

    def forward_backward(self, step: int) -> list[float]:
        """Run the micro-batches of a step one after the other, and make the updates that follow from them."""
        k, last = self.job.batches.accumulation, step + 1 == self.job.config.steps
        losses = [self._micro_batch(step, number) for number in range(k)]
        gradients = {unit: unit.flat.grad for unit in self.units}
        # A tied weight's gradient is the sum over its two stages, and both update alike.
        if self.tied_units:
            first, second = self.tied_units
            gradients[first] = gradients[second] = gradients[first] + gradients[second]
        for unit, gradient in gradients.items():
            unit.add(gradient, last)
        self.steps += 1
        return losses

    def _micro_batch(self, step: int, number: int) -> float:
        job, t = self.job, step * self.job.batches.accumulation + number
        tokens, targets = job.micro_batch(step, number)
        with job.coordinates(step, number):
            x: Any = as_input(tokens, job.dtype)
            for module, units in zip(self.modules, self.stages, strict=True):
                # Forward and backward of a micro-batch use one version: the tape keeps what forward has read.
                for unit in units:
                    unit.bind(t)
                x = module(*(x if isinstance(x, tuple) else (x,)))
            loss: Tensor = job.loss_of(x, targets)
            loss.backward()
        return loss.item()

    @property
    def step_count(self) -> int:
        return self.steps

    def tensors(self) -> Tensors:
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for unit in self.units:
            add_record(result, unit.flat, unit.versions[unit.latest], unit.gradient, unit.state)
        return result

    def square_sums(self) -> Array:
        raise NotImplementedError("--clip does not combine with asynchronous schedules")

    def held_out_losses(self, job: Job) -> list[float]:
        raise NotImplementedError("--evaluate-every does not combine with asynchronous schedules")


def replay(config: TrainConfig, batches: Batches, observers: Sequence[Observer] = ()) -> list[float]:
    """Train on one device with the delays of the schedule; returns the losses of the steps. Sends nothing."""
    job = build(config, batches)
    device = DelayedDevice(job)
    losses = []
    for step in range(config.steps):
        losses.append(ordered_sum(device.forward_backward(step)))
        for observer in observers:
            observer(StepState(0, step, losses[-1], job, device))
    return losses
