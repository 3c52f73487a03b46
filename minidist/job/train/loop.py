"""The training loop: the same code on one rank, on simulated ranks and in MPI processes.

    for each step
        1 for each of this rank's micro-batches: forward, backward (gradients are sent while backward runs)
        2 the loss of the step, summed over all micro-batches in their global order
        3 clip, and let the optimizer step

Proved by: tests/train/test_core_runs.py, tests/equality/test_equality.py, tests/train/test_axes.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.job.train.loss import global_loss


class Hooks:
    """What else happens in a step, in the order of the calls; the base class does nothing."""

    def before_step(self, strategy: Any, step: int) -> Any:
        """Return the strategy of the step."""
        return strategy

    def after_forward_backward(self, strategy: Any, step: int) -> None:
        """Note that this rank has made its micro-batches; losses are not exchanged yet."""

    def updates(self, strategy: Any, step: int, loss: float) -> bool:
        """Return whether the update is made, the same on every rank; gradients are summed, and not yet clipped."""
        return True

    def after_step(self, strategy: Any, step: int, loss: float) -> None:
        """Note that the step has ended."""


def train(strategy: Any, steps: Iterable[int], hooks: Hooks = Hooks()) -> list[float]:  # noqa: B008
    """Train for these steps and return the loss of each. All ranks call it with their strategy of `parallelize`.

    In addition to what the strategy sends, each rank sends the losses of its micro-batches (8 B each, purpose metrics).
    """
    losses = []
    for step in steps:
        strategy = hooks.before_step(strategy, step)
        strategy.zero_grad()
        parts = strategy.forward_backward(step)
        hooks.after_forward_backward(strategy, step)
        loss = global_loss(strategy.axes.data, parts)
        losses.append(loss)
        if hooks.updates(strategy, step, loss):
            strategy.update(step)
        hooks.after_step(strategy, step, loss)
    return losses
