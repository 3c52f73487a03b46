"""The loss on data that is never trained on: the last tenth, every so many steps, the same digits on every rank.

Each rank computes its micro-batches of one held-out global batch, forward only and without dropout; the losses of all are added in their
global order, as those of training are. Its messages stand under a purpose of their own, so training's volumes stay what they are.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from minidist.autograd import no_grad
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.train.config import Batches, TrainConfig
from minidist.train.job import Job
from minidist.train.strategies import Strategy

NUMBER = 8


def evaluate(job: Job, strategy: Strategy) -> float:
    """The mean loss of the first held-out global batch. Every rank calls it; sends k float64 to each other rank (purpose evaluation)."""
    held_out, k = replace(job, sampler=job.held_out), job.batches.accumulation
    job.model.eval()
    with no_grad():
        losses = [held_out.loss(0, strategy.axes.dp.rank * k + i).item() for i in range(k)]
    job.model.train()
    with purpose("evaluation"):
        everybody = all_gather(strategy.axes.data, np.array(losses, dtype=np.float64))
    return float(sum(everybody.tolist()))


def evaluation_bytes(config: TrainConfig, batches: Batches, first_step: int) -> int:
    """Of all ranks, in a job that began at `first_step`."""
    if not config.evaluate_every:
        return 0
    times = config.steps // config.evaluate_every - first_step // config.evaluate_every
    return times * batches.dp * (batches.dp - 1) * batches.accumulation * NUMBER


def problems(config: TrainConfig) -> Iterator[str]:
    """What evaluation does not combine with, each in one sentence."""
    if not config.evaluate_every:
        return
    for name, degree in (("pp", config.pp), ("tp", config.tp), ("cp", config.cp), ("ep", config.ep)):
        if degree > 1:
            yield f"--evaluate-every computes a held-out batch on whole models, and with --{name} {degree} no rank has one; take data parallelism and ZeRO 1 or 2"
    if config.zero == 3:
        yield "--evaluate-every computes a held-out batch on whole models, and with --zero 3 no rank has one; take --zero 2"
    if config.strategy == "ps":
        yield "--evaluate-every belongs to ranks that step together; leave it out, or leave out --strategy ps"
