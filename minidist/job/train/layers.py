"""What a job does with layers after they were split over ranks, and before the model is cut into stages.

Everything that sends inside a layer is in place: recomputing a block repeats its messages.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py
"""

from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.parallel.dims import Axes
from minidist.core.parallel.model_parallel import use_positions


def change_layers(job: Any, axes: Axes) -> None:
    """Give the layers of a `Job` what its techniques and settings want of them."""
    config = job.config
    # Tensor parallelism has replaced the loss function.
    if axes.tp.size > 1 and config.is_language_model:
        job.model.loss_fn = job.loss_function(job.model.loss_fn, axes.tp)

    # A stage that holds 1/tp of the sequence needs the angles of all of it.
    if axes.cp.size == 1 and config.model == "llama":
        use_positions(job.model, xp.device_arange(config.context))

    for extension in job.extensions:
        extension.layers_split(job, axes)
