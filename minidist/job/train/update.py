"""What a job does before and after the update of a step, the same on every rank and on one device.

A loss that is not finite ends the job. Techniques look at the gradients or change them, may leave the update out on
every rank, and look at the weights.

Proved by: tests/equality/test_equality.py, tests/techniques/test_extensions.py
"""

import math

from minidist.base import arrays as xp
from minidist.core.base.errors import MinidistError
from minidist.core.comm import Comm
from minidist.job.train.job import Job
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.techniques import Moment, drains, trains_alone


class NonFiniteError(MinidistError):
    """The loss became NaN or infinite."""

    exit_code = 2


def finish_step(job: Job, strategy: MeshStrategy, step: int, loss: float, comm: Comm | None = None) -> None:
    """Update the weights after the backward pass of a step, the same on every rank and on one device.

    comm: all ranks; None on one device.
    """
    made = before_update(job, strategy, step, loss, comm)
    if made:
        strategy.update(step)
    after_update(job, strategy, step, made, comm)


def before_update(job: Job, strategy: MeshStrategy, step: int, loss: float, comm: Comm | None) -> bool:
    """Return whether the update is made: a technique may leave it out on every rank.

    Raises NonFiniteError where the loss is not finite. Nothing is clipped before the techniques have said by what the
    gradients are to be multiplied, so that the norm is that of the true gradient.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {step}: the loss is {loss}; {_first_non_finite(strategy)}; lower --lr{_or_clip(job)}"
        )
    for extension in job.extensions:
        extension.after_backward(strategy, step)

    # Every rank makes the update, or every rank leaves it out.
    return all(extension.updates(strategy, comm) for extension in job.extensions)


def after_update(job: Job, strategy: MeshStrategy, step: int, made: bool, comm: Comm | None) -> None:
    """Let the techniques look at the weights, or change them: what holds from the next step on."""
    for extension in job.extensions:
        extension.after_update(Moment(comm, range(step, step + 1), strategy, skipped=not made))


def _or_clip(job: Job) -> str:
    """Return the second remedy for a diverging loss, where the rules allow --clip and it is not set."""
    config = job.config
    refused = not drains(config) or trains_alone(config) or job.clip is not None
    return "" if refused else " or clip the gradient (--clip 1)"


def _first_non_finite(strategy: MeshStrategy) -> str:
    tensors = strategy.tensors()
    for name, array in tensors["weights"].items():
        if not xp.isfinite(array).all():
            return f"the first parameter with a value that is not finite is {name!r}"
    for name, array in tensors["gradients"].items():
        if not xp.isfinite(array).all():
            return f"all parameters are finite, the first gradient that is not is that of {name!r}"
    return "all parameters and gradients are finite, so it comes from the data or the loss"
