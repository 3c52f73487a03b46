"""An asynchronous pipeline on one device: each micro-batch with the versions that the law names. What the pipeline must
equal.

    mini-batch t    stage 0 with version max(0, t-2), stage 1 with max(0, t-1), stage 2 with t        pipedream, three
    stages
                    forward and backward through all of them, then each stage's update                all versions are
                    kept

It shares with the pipeline the engine and the optimizer; no plan, no message, no stash.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.autograd import Tensor
from minidist.base.arrays import Array
from minidist.base.random import batch_coordinates
from minidist.config.pipeline_plan import cut_stages, make_plan, replicas_of
from minidist.config.train_config import Batches, TrainConfig, updates_of
from minidist.nn.flat import FlatParameters
from minidist.train.job import Job, as_input, build
from minidist.train.strategies.asynchronous import Scheduled, add_record
from minidist.train.strategies.data_axis import Tensors
from minidist.train.trainer import Observer, StepState


class Unit:
    """Parameters with one delay: all versions of them, the mini-batches' gradients until an update, and the optimizer."""

    def __init__(
        self, job: Job, parameters: Any, stage: int, stages: int, replicas: Sequence[int], shared: bool
    ) -> None:
        self.flat = FlatParameters(parameters)
        self.optimizer, self.versions = Scheduled(job, self.flat), [self.flat.data.copy()]
        self.round = replicas[stage]  # mini-batches of an update
        self.parts: list[Array] = []
        self.gradient, self.state = np.zeros_like(self.flat.data), dict[str, dict[str, Array]]()
        self.law: Callable[[int], int]
        updates = updates_of(job.config.schedule)
        warm_up = (sum(replicas[stage:]) - 1) // self.round
        if updates == "2bw":
            self.law = lambda t: max(t // job.batches.accumulation - 1, 0)
        elif updates == "vertical-sync" or shared:
            self.law = lambda t: max(0, t - (stages - 1))
        else:
            self.law = lambda t: max(0, t // self.round - warm_up)

    def update(self, gradient: Array) -> None:
        """The next version."""
        self.flat.bind(self.versions[-1].copy(), len(self.versions) - 1)
        for parameter in self.flat.parameters:
            if parameter.requires_grad:
                parameter.grad = gradient[self.flat.slice_of(parameter)].reshape(parameter.shape).copy()
        self.optimizer.step()
        self.gradient, self.state = (
            gradient,
            {name: {k: a.copy() for k, a in row.items()} for name, row in self.optimizer.state.items()},
        )
        self.versions.append(self.flat.data.copy())
        self.flat.zero_grad()


def replay(config: TrainConfig, batches: Batches, observers: Sequence[Observer] = ()) -> list[float]:
    """Train on one device with the delays of the schedule; returns the losses of the steps. Sends nothing."""
    job = build(config, batches)
    plan, k = make_plan(config, batches.accumulation), batches.accumulation
    modules, tied = cut_stages(config, job.model, plan.stages)
    replicas = replicas_of(config) or [1] * plan.stages
    units: list[list[Unit]] = []
    for stage, module in enumerate(modules):
        mine = list(module.parameters())
        own, shared = [p for p in mine if p.name not in tied], [p for p in mine if p.name in tied]
        units.append([Unit(job, part, stage, plan.stages, replicas, part is shared) for part in (own, shared) if part])
    copies = [stage[-1] for stage in units if tied and {*stage[-1].flat.names} <= {*tied}]
    losses = []
    for step in range(config.steps):
        loss = 0.0
        for t in range(step * k, (step + 1) * k):
            loss += _micro_batch(job, modules, units, t)
        last = step + 1 == config.steps
        total = copies[0].flat.grad + copies[1].flat.grad if copies else None
        for unit in (unit for stage in units for unit in stage):
            unit.parts.append(np.array(unit.flat.grad if unit not in copies else total))
            unit.flat.zero_grad()
            if len(unit.parts) == unit.round or last:
                gradient = unit.parts[0]
                for part in unit.parts[1:]:
                    gradient = gradient + part
                unit.update(gradient if unit.round == 1 else gradient * (1.0 / len(unit.parts)))
                unit.parts = []
        losses.append(loss)
        for observer in observers:
            observer(StepState(0, step, loss, job, _Shown(units, step)))  # type: ignore[arg-type]
    return losses


def _micro_batch(job: Job, modules: Sequence[Any], units: Sequence[Sequence[Unit]], t: int) -> float:
    step, number = divmod(t, job.batches.accumulation)
    tokens, targets = job.micro_batch(step, number)
    with batch_coordinates(step, number * job.batches.micro_batch, job.config.seed):
        x: Any = as_input(tokens, job.dtype)
        for module, mine in zip(modules, units, strict=True):
            for unit in mine:
                version = unit.law(t)
                unit.flat.bind(unit.versions[version].copy(), version)
            x = module(*(x if isinstance(x, tuple) else (x,)))
        loss: Tensor = job.loss_of(x, targets)
        loss.backward()
    return loss.item()


class _Shown:
    """What an observer asks of a strategy."""

    def __init__(self, units: Sequence[Sequence[Unit]], step: int) -> None:
        self.units, self.optimizer = units, SimpleNamespace(step_count=step + 1)

    def tensors(self) -> Tensors:
        """The latest versions."""
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for unit in (unit for stage in self.units for unit in stage):
            add_record(result, unit.flat, unit.versions[-1], unit.gradient, unit.state)
        return result
