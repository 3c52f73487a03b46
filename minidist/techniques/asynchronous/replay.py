"""An asynchronous pipeline on one device: each micro-batch with the weight versions that the version rule names.

    mini-batch t of pipedream with three stages, all versions kept:
        stage 0 computes with version max(0, t-2), stage 1 with max(0, t-1), stage 2 with t
        forward and backward through all of them, then each stage's update

It shares with the pipeline the engine and the optimizer; no plan, no message, no stash.

Proved by: tests/train/test_asynchronous.py
"""

from collections.abc import Sequence
from math import lcm
from typing import Any

import numpy as np

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.nn.flat import FlatParameters
from minidist.core.train.task import as_input, ordered_sum
from minidist.job.config.pipeline_plan import cut_stages, make_plan, replicas_of, stream_end
from minidist.job.config.train_config import Batches, TrainConfig, updates_of
from minidist.job.equality.one_device import evaluate_devices
from minidist.job.train.job import Job, build
from minidist.job.train.state import Observer, StepState
from minidist.job.train.strategies.data_axis import Tensors
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.techniques.asynchronous.pipeline import ScheduledOptimizer, add_record


class DelayedUnit:
    """Parameters with one delay: their versions in use, the gradients of a round, and the optimizer.

    replicas: ranks of each stage. places: the stages that have these parameters; several share a tied weight.
    """

    def __init__(self, job: Job, parameters: Any, replicas: Sequence[int], places: Sequence[int]) -> None:
        self.flat = FlatParameters(parameters)
        self.optimizer = ScheduledOptimizer(job, self.flat)
        self.updates, self.accumulation = updates_of(job.config.schedule), job.batches.accumulation
        self.last_stage = len(replicas) - 1

        # Micro-batches per update: a turn of all ranks that have the parameters.
        self.round = self.accumulation if self.updates == "2bw" else lcm(*(replicas[stage] for stage in places))
        # The lag of a forward pass in updates: the mini-batches in flight from this stage to the last one, in rounds.
        k, ranks = replicas[places[0]], sum(replicas[places[0] :])
        self.warm_up = -(-k * ((ranks - 1) // k) // self.round)
        self.gradient, self.state = np.zeros_like(self.flat.data), dict[str, dict[str, Array]]()
        self.latest = self.flat.data.copy()
        self.begin()

    def begin(self) -> None:
        """Begin a stream: the latest version is its version 0."""
        self.number, self.versions = 0, {0: self.latest}

    def version_of(self, t: int) -> int:
        """Return the version with which micro-batch `t` of the stream is computed: the schedule's version rule."""
        # PipeDream-2BW: one update behind, for all stages.
        if self.updates == "2bw":
            return max(t // self.accumulation - 1, 0)
        # Vertical sync: every stage uses the version with which the first one began.
        if self.updates == "vertical-sync":
            return max(0, t - self.last_stage)
        # Weight stashing: each stage uses its newest version.
        return max(0, t // self.round - self.warm_up)

    def bind(self, t: int) -> None:
        """Bind the weights that micro-batch `t` computes with; older ones are not needed again."""
        version = self.version_of(t)
        self.versions = {number: array for number, array in self.versions.items() if number >= version}
        self.flat.bind(self.versions[version].copy(), version)

    def update(self, gradient: Array) -> None:
        """Make an update, out of place, so that older versions stay as they were."""
        self.flat.bind(self.latest.copy(), self.number)
        for parameter in self.flat.parameters:
            if parameter.requires_grad:
                parameter.grad = gradient[self.flat.slice_of(parameter)].reshape(parameter.shape).copy()
        self.optimizer.step()
        self.gradient = gradient
        self.state = {name: {k: a.copy() for k, a in row.items()} for name, row in self.optimizer.state.items()}
        self.latest = self.flat.data.copy()
        self.number += 1
        self.versions[self.number] = self.latest
        self.flat.zero_grad()


class DelayedDevice(MeshStrategy):
    """One device that computes with old versions, and makes the updates itself; `tensors` shows the latest ones."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, None, [])
        config = job.config
        plan = make_plan(config, job.batches.accumulation)
        self.modules, tied = cut_stages(config, job.model, plan.stages)
        self.replicas = replicas_of(config) or [1] * plan.stages

        # Of each stage a unit, and another for the weight that it shares with another stage.
        shares = [n for n, module in enumerate(self.modules) if any(p.name in tied for p in module.parameters())]
        self.own: list[list[DelayedUnit]] = []
        self.shared: dict[int, DelayedUnit] = {}
        for stage, module in enumerate(self.modules):
            parameters = list(module.parameters())
            own, shared = [p for p in parameters if p.name not in tied], [p for p in parameters if p.name in tied]
            self.own.append([DelayedUnit(job, own, self.replicas, [stage])] if own else [])
            if shared:
                self.shared[stage] = DelayedUnit(job, shared, self.replicas, shares)
        self.units = [unit for stage in range(plan.stages) for unit in self._of_stage(stage)]
        # By (stage, replica): the sum of the gradients of its micro-batches in the round that is not complete.
        self.parts: dict[DelayedUnit, dict[tuple[int, int], Array]] = {unit: {} for unit in self.units}
        self.first = 0  # step of the stream

    def _of_stage(self, stage: int) -> list[DelayedUnit]:
        """Return a stage's own unit, then the one that it shares with other stages."""
        return [*self.own[stage], *([self.shared[stage]] if stage in self.shared else [])]

    def forward_backward(self, step: int) -> list[float]:
        """Run the micro-batches of a step one after the other, and make the updates that follow from them."""
        k, ends = self.job.batches.accumulation, step + 1 == stream_end(self.job.config, step)
        losses = []
        for number in range(k):
            t = (step - self.first) * k + number
            losses.append(self._micro_batch(step, number, t))
            self._make_updates(t, ends and number + 1 == k)

        # The pipeline drains where the job's does.
        if ends:
            self.first = step + 1
            for unit in self.units:
                unit.begin()
        return losses

    def _micro_batch(self, step: int, number: int, t: int) -> float:
        job = self.job
        tokens, targets = job.micro_batch(step, number)
        with job.coordinates(step, number):
            x: Any = as_input(tokens, job.dtype)
            for stage, module in enumerate(self.modules):
                # Forward and backward of a micro-batch use one version: the tape keeps what forward has read.
                for unit in self._of_stage(stage):
                    unit.bind(t)
                x = module(*(x if isinstance(x, tuple) else (x,)))
            loss: Tensor = job.loss_of(x, targets)
            loss.backward()

        # Added to those of the micro-batches that the same rank has computed in this round.
        for stage in range(len(self.modules)):
            place = stage, t % self.replicas[stage]
            for unit in self._of_stage(stage):
                parts, gradient = self.parts[unit], xp.array(unit.flat.grad)
                parts[place] = parts[place] + gradient if place in parts else gradient
                unit.flat.zero_grad()
        return loss.item()

    def _make_updates(self, t: int, last: bool) -> None:
        """Make the updates of the rounds that end with micro-batch t; at the end of a stream a round may be smaller."""
        together = [list(self.shared.values())] if self.shared else []
        for members in [*([unit] for stage in self.own for unit in stage), *together]:
            size = members[0].round
            if (t + 1) % size and not last:
                continue
            # The ranks' sums in the order of the stages and the ranks, then their mean.
            places = sorted(place for unit in members for place in self.parts[unit])
            found = {place: array for unit in members for place, array in self.parts[unit].items()}
            total = found[places[0]].copy()
            for place in places[1:]:
                total += found[place]
            if size > 1 and members[0].updates != "2bw":
                total *= 1.0 / (t % size + 1)
            for unit in members:
                unit.update(total)
                self.parts[unit] = {}

    def held_out_losses(self, job: Job) -> list[float]:
        """Return the losses with the latest weights of all stages."""
        losses = []
        for number in range(job.batches.accumulation):
            tokens, targets = job.micro_batch(0, number)
            x: Any = as_input(tokens, job.dtype)
            for stage, module in enumerate(self.modules):
                for unit in self._of_stage(stage):
                    unit.flat.bind(unit.latest.copy(), unit.number)
                x = module(*(x if isinstance(x, tuple) else (x,)))
            losses.append(job.loss_of(x, targets).item())
        return losses

    @property
    def step_count(self) -> int:
        return max(int(unit.optimizer.step_count) for unit in self.units)

    def tensors(self) -> Tensors:
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for unit in self.units:
            add_record(result, unit.flat, unit.latest, unit.gradient, unit.state)
        return result


def replay(config: TrainConfig, batches: Batches, observers: Sequence[Observer] = ()) -> list[float]:
    """Train on one device with the delays of the schedule; returns the losses of the steps. Sends nothing."""
    job = build(config, batches)
    device = DelayedDevice(job)
    losses = []
    for step in range(config.steps):
        losses.append(ordered_sum(device.forward_backward(step)))
        held_out = evaluate_devices([device], step + 1)
        for observer in observers:
            observer(StepState(0, step, losses[-1], job, device, held_out))
    return losses
