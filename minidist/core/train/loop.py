"""The training loop: the same code on one rank, on simulated ranks and in MPI processes.

    for each step
        1 for each of this rank's micro-batches: forward, backward (gradients are sent while backward runs)
        2 the loss of the step, summed over all micro-batches in their global order
        3 let the optimizer step

Proved by: tests/train/test_core_runs.py, tests/equality/test_equality.py, tests/train/test_axes.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.train.task import global_loss


class Loop:
    """The training of a strategy that `parallelize` has made: `Loop(strategy).train(range(20))` on every rank.

    What a subclass adds stands between the parts of a step. It may change `strategy` between two steps.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy, self.losses = strategy, list[float]()

    def train(self, steps: Iterable[int]) -> list[float]:
        """Train for these steps, and return the losses. All ranks call it.

        In addition to what the strategy sends, each rank sends its micro-batches' losses (8 B each, purpose metrics).
        """
        for step in steps:
            self.before_step(step)
            self.strategy.zero_grad()
            parts = self.strategy.forward_backward(step)
            self.after_forward_backward(step)
            self.losses.append(global_loss(self.strategy.axes.data, parts))
            if self.is_updated(step):
                self.strategy.update(step)
            self.after_step(step)
        return self.losses

    def before_step(self, step: int) -> None:
        """Prepare a step."""

    def after_forward_backward(self, step: int) -> None:
        """Note that this rank has made its micro-batches; losses are not exchanged yet."""

    def is_updated(self, step: int) -> bool:
        """Return whether the update is made, the same on every rank; gradients are summed."""
        return True

    def after_step(self, step: int) -> None:
        """Note that the step has ended."""
