"""Training on one device, written to be obviously right: what every strategy must equal.

**Why the loss can be equal bit for bit.** Floating-point addition is not associative: (a + b) + c and a + (b + c)
differ in the last bits. So two runs have equal bits when they add the same numbers in the same order; everything else
in training is either a function of single numbers (an optimizer's update) or computed whole on one rank (a
micro-batch's forward and backward). The ordered tier (`--reduction ordered`) declares the order:

    1  The contributions are the same.   One rank computes a micro-batch as one device would: same weights, same rows,
                                         and dropout masks that depend on seed, step and sample, not on the rank.
    2  Their order is declared.          `GradientOrder` says in which order a layout adds contributions. The `ordered`
                                         all-reduce adds ranks from first to last, and so does this reference.
    3  The norm has blocks.              Squares are summed by blocks of 1,024 elements that no shard boundary crosses,
                                         and the blocks from first to last (optim/clip.py).
    4  The loss is gathered.             Every rank adds all micro-batches' losses in their global order
                                         (core/train/task.py).

So equal gradients give equal weights, and equal weights give equal losses, step after step. Where an axis cuts a sum
inside a micro-batch (tensor, context and expert parallelism), 1 does not hold, and runs agree up to rounding: the float
tier (`compare.py`).

Proved by: tests/equality/test_equality.py, tests/train/test_sharded.py, tests/train/test_pipelines.py
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.core.autograd import Tensor
from minidist.core.base.arrays import Array
from minidist.core.nn import Module
from minidist.core.nn.experts import MixtureOfExperts
from minidist.core.train.task import ordered_sum
from minidist.data import GlobalBatchSampler, Shares
from minidist.data.batch_plan import StepBatch, ToldPlan
from minidist.data.sampler import Batch
from minidist.job.config.train_config import Batches, TrainConfig
from minidist.job.equality.gradient_order import order_of
from minidist.job.equality.one_device import OneDevice, evaluate_devices
from minidist.job.train.job import Job, build
from minidist.job.train.state import Observer, StepState
from minidist.job.train.update import finish_step
from minidist.nn import concatenate
from minidist.parallel.context.orders import part_order, sequence_positions
from minidist.techniques import joins_replicas, of_job


def reference(
    config: TrainConfig, batches: Batches, observers: Sequence[Observer] = (), told: Sequence[StepBatch] | None = None
) -> list[float]:
    """Train on one device as `batches` would be trained on many; returns the losses. Sends nothing.

    The recipe is not applied: no shards, no parts of sequences, nothing recomputed or offloaded. A technique
    may train in place of this (`Extension.reference`). told: the batch of each step, where the ranks choose it.
    """
    for extension in of_job(config):
        if (losses := extension.reference(config, batches, observers)) is not None:
            return losses

    apart = batches
    config, batches, replicas = join_replicas(config, batches)
    if replicas > 1:
        told = [StepBatch(Shares((tuple(map(sum, zip(*apart.shares.rows, strict=True))),)))] * config.steps
    job = build(config, batches, plan=None if told is None else ToldPlan(config, batches, told))
    route_in_groups(job)
    if replicas > 1:
        # An evaluation looks at no statistics of its rows, so they need no joining.
        job.sampler = JoinedReplicas(job.sampler, apart.shares)
    device = OneDevice(job, order_of(job).add)
    losses = []
    with xp.quiet_overflow():
        for step in range(config.steps):
            # As in `trainer.train`: forward and backward, the update, the evaluation, the observers.
            job.next_batch()
            losses.append(ordered_sum(device.forward_backward(step)))
            finish_step(job, device, step, losses[-1])

            held_out = evaluate_devices([device], step + 1)
            for observer in observers:
                observer(StepState(0, step, losses[-1], job, device, held_out))
    return losses


def join_replicas(config: TrainConfig, batches: Batches) -> tuple[TrainConfig, Batches, int]:
    """Return the job of one device that runs the micro-batches of the same number of all replicas as one.

    Synchronised batch norms normalise over these rows, so no replica's micro-batch can be computed by itself. The
    number is that of the replicas, 1 where the job stays as it is.
    """
    replicas = batches.dp if joins_replicas(config) else 1
    if replicas == 1:
        return config, batches, 1
    rows = batches.micro_batch * replicas
    whole = replace(batches, dims=replace(batches.dims, dp=1), micro_batch=rows, weights=None)
    return config.model_copy(update={"dp": 1, "dp_replicate": 1, "micro_batch": rows}), whole, replicas


class JoinedReplicas(GlobalBatchSampler):
    """A sampler whose micro-batch i has the rows of every replica's micro-batch i, replica after replica."""

    def __init__(self, sampler: Any, shares: Shares) -> None:
        super().__init__(sampler.dataset, sampler.global_batch, sampler.context, sampler.seed)
        # First row of a joined micro-batch -> (first row, rows) of its part on each replica.
        self.parts: dict[int, list[tuple[int, int]]] = {}
        first = 0
        for i in range(shares.accumulation):
            self.parts[first] = [shares.place(replica * shares.accumulation + i) for replica in range(len(shares.rows))]
            first += sum(rows for _, rows in self.parts[first])

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return inputs and targets of the joined micro-batch that begins at row `first` of `step`."""
        parts = [super(JoinedReplicas, self).batch(step, *part) for part in self.parts[first]]
        rows = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        return Batch(rows, np.concatenate([part.indices for part in parts]))


def route_in_groups(job: Job) -> None:
    """Let experts route each context-parallel rank's tokens as a group with its own capacity and auxiliary loss."""
    config, cp = job.config, job.batches.dims.cp
    if cp > 1 and config.experts:
        # Capacity is per routed group, so the same groups must be routed here.
        order = part_order(config.attention, config.ulysses)
        groups = [sequence_positions(config.context, rank, cp, order) for rank in range(cp)]
        for block in job.model.blocks:
            block.mlp = GroupedExperts(block.mlp, groups)


class GroupedExperts(Module):
    """A mixture of experts that routes each group of positions by itself; the auxiliary loss is the groups' mean."""

    def __init__(self, mixture: MixtureOfExperts, groups: Sequence[Array]) -> None:
        self.mixture, self.groups = mixture, groups
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        outputs, losses = [], []
        for group in self.groups:
            # (samples, tokens of the group, width)
            outputs.append(self.mixture(x[:, group]))
            assert self.mixture.auxiliary_loss is not None
            losses.append(self.mixture.auxiliary_loss * (len(group) / x.shape[1]))
        self.auxiliary_loss = sum(losses[1:], start=losses[0])
        # Back into the order of the sequence.
        result: Tensor = concatenate(outputs, axis=1)[:, xp.concatenate(self.groups).argsort()]
        return result
