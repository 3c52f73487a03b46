"""The loss on data that is never trained on: the last tenth, every so many steps, the same digits on every rank.

Each rank computes its micro-batches of one held-out global batch, forward only and without dropout, in the layout that
trains: tiles are summed, sequences exchanged, units gathered, and a pipeline runs its plan's forward passes alone. The
losses of all are added in their global order, as those of training are. All that it sends stands under a purpose of its
own, so training's volumes stay what they are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.config.train_config import Batches, TrainConfig
from minidist.planning.layer_volumes import forward_elements
from minidist.planning.volumes import ITEMSIZE, AxisSizes, crossing_elements, gathered_elements, losses_bytes
from minidist.train.job import Job
from minidist.train.strategies.base import Strategy


def evaluate(job: Job, strategy: Strategy) -> float:
    """The mean loss of the first held-out global batch, in which experts' balancing loss counts as in training.

    Every rank calls it; sends what a forward pass sends, and every micro-batch's loss to everybody (8 B each): all of
    it purpose evaluation, `evaluation_bytes` in closed form.
    """
    with purpose("evaluation", whole=True), job.evaluating() as held_out:
        everybody = all_gather(strategy.axes.data, np.array(strategy.held_out_losses(held_out), dtype=np.float64))
    return in_order(everybody.tolist())


def evaluate_alone(jobs: Sequence[Job], done: int) -> float | None:
    """The same on one device after `done` steps, None when it is not the turn. Several jobs (local SGD) share the
    micro-batches.
    """
    every, share = jobs[0].config.evaluate_every, jobs[0].batches.microbatches // len(jobs)
    if not every or done % every:
        return None
    losses = []
    for number, job in enumerate(jobs):
        with job.evaluating() as held_out:
            losses += [held_out.loss(0, i).item() for i in range(number * share, (number + 1) * share)]
    return in_order(losses)


def in_order(losses: Iterable[float]) -> float:
    """((a + b) + c) + ...: Python's `sum` rounds in another way from version to version."""
    total = 0.0
    for loss in losses:
        total += loss
    return total


def evaluation_bytes(
    config: TrainConfig, batches: Batches, sizes: Sequence[Sequence[AxisSizes]], first_step: int
) -> Counter[str]:
    """What evaluations add to the closed form, of all ranks, in a job that began at `first_step`. sizes: see
    `closed_form_bytes`.

    Small parameters that stay whole (ZeRO 3) are gathered once after each update, by who needs them first: then by the
    evaluation.
    """
    every = config.evaluate_every
    if not every:
        return Counter()
    times = config.steps // every - first_step // every
    gathered, small = gathered_elements(config, batches, sizes)
    elements = sum(forward_elements(config, batches).values()) + crossing_elements(config, batches) + gathered + small
    itemsize, before_a_step = ITEMSIZE[config.precision], times - (config.steps % every == 0)
    result = Counter(evaluation=times * (elements * itemsize + losses_bytes(batches)))
    if small:
        result["parameter_gather"] -= before_a_step * small * itemsize
    return result
