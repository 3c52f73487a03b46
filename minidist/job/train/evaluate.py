"""The loss on data that is never trained on: the last tenth, every N steps, the same digits on every rank.

Each rank computes its micro-batches of one held-out global batch, forward only and without dropout, in the layout that
trains: shards are summed, sequences exchanged, units gathered, and a pipeline runs its plan's forward passes alone. The
losses of all ranks are added in their global order, as those of training are. All messages have a separate purpose,
so the volumes of training stay what they are.

Proved by: tests/train/test_evaluate.py
"""

from collections.abc import Callable

import numpy as np

from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.train.task import ordered_sum
from minidist.job.train.job import Job
from minidist.job.train.strategies.mesh import MeshStrategy


def evaluate(job: Job, strategy: MeshStrategy) -> float:
    """Return the mean loss of the first held-out global batch; experts' balancing loss counts as in training.

    Every rank calls it. Sends what a forward pass sends, and each micro-batch's loss to every rank (8 B each), all with
    purpose evaluation; `planning.volumes.evaluation_bytes` is its closed form.
    """
    # `whole`: also what is sent inside the forward pass counts as evaluation, whatever its purpose in training.
    with purpose("evaluation", whole=True), job.evaluating() as held_out:
        losses = all_gather(strategy.axes.data, np.array(strategy.held_out_losses(held_out), dtype=np.float64))
    return ordered_sum(losses.tolist())


def evaluations(job: Job, done: int, loss: Callable[[], float]) -> dict[str, float]:
    """Return the loss on held-out data after `done` steps, and those of techniques, by name. loss: computes it."""
    losses = {"held_out_loss": loss()}
    for extension in job.extensions:
        losses |= extension.evaluate(done, loss)
    return losses
