"""`--local-steps H`: local SGD. Replicas train alone for H steps each, then their weights are averaged.

What one device must do to equal it: train the replicas one after the other, each on its own rows with an optimizer of
its own, and average their weights in rank order where the ranks do. That is the reference here.
"""

import numpy as np

from minidist.base.layout import GradientOrder
from minidist.config.train_config import Batches, TrainConfig
from minidist.equality.compare import Snapshot, snapshot
from minidist.equality.reference import add_in_order, one_micro_batch
from minidist.train.evaluate import evaluate_alone
from minidist.train.job import build
from minidist.train.strategies.base import OneDevice
from minidist.train.trainer import StepState, finish_step


def replicas(config: TrainConfig, batches: Batches) -> list[list[Snapshot]]:
    """The states of every replica after every step, replica by replica, on one device."""
    n, k = batches.dp, batches.accumulation
    jobs = [build(config, batches) for _ in range(n)]
    devices = [OneDevice(job) for job in jobs]
    order = GradientOrder(1, (tuple(range(k)),), False)
    result: list[list[Snapshot]] = [[] for _ in range(n)]
    for step in range(config.steps):
        losses = []
        for rank, (job, device) in enumerate(zip(jobs, devices, strict=True)):
            caught = [one_micro_batch(job, step, rank * k + i) for i in range(k)]
            losses += [loss for loss, _ in caught]
            device.flat.zero_grad()
            for parameter in device.flat.parameters:
                total = add_in_order([contributions.get(parameter, []) for _, contributions in caught], order)
                if total is not None:
                    parameter.grad = total * total.dtype.type(n)  # of its own rows alone
        loss = 0.0
        for value in losses:
            loss += value
        for job, device in zip(jobs, devices, strict=True):
            finish_step(job, device, step, loss)
        if (step + 1) % config.local_steps == 0 or step + 1 == config.steps:
            _average(devices)
        held_out = evaluate_alone(jobs, step + 1)
        for rank, (job, device) in enumerate(zip(jobs, devices, strict=True)):
            result[rank].append(snapshot(StepState(rank, step, loss, job, device, held_out)))
    return result


def _average(devices: list[OneDevice]) -> None:
    total = np.array(devices[0].flat.data)
    for device in devices[1:]:
        total = total + device.flat.data
    for device in devices:
        device.flat.data[...] = total / total.dtype.type(len(devices))
        device.flat.updated()
