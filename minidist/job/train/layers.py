"""What a job does with layers after they were split over ranks, and before the model is cut into stages.

Everything that sends inside a layer is in place: recomputing a block repeats its messages.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py
"""

from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.parallel.dims import Axes
from minidist.core.parallel.model_parallel import use_positions
from minidist.job.config.models import activation_shape
from minidist.nn.recompute import recompute
from minidist.parallel.sync_batch_norm import convert_sync_batchnorm


def change_layers(job: Any, axes: Axes) -> None:
    """Give the layers of a `Job` what its techniques and settings want of them."""
    config = job.config
    # Tensor parallelism has replaced the loss function.
    if axes.tp.size > 1 and config.is_language_model:
        job.model.loss_fn = job.loss_function(job.model.loss_fn, axes.tp)

    # A stage that holds 1/tp of the sequence needs the angles of all of it.
    if axes.cp.size == 1 and config.model == "llama":
        use_positions(job.model, xp.device_arange(config.context))

    apply_activation_checkpointing(job)

    # Batch norms over the data axis, which exchange statistics inside their forward and backward.
    if config.batch_norm == "sync":
        convert_sync_batchnorm(job.model, axes.data)


def apply_activation_checkpointing(job: Any) -> None:
    """Recompute what --recompute names: blocks (full), segments of blocks (sqrt, budget), or attention (selective).

    A pipeline's plan runs a whole stage's forward again, so with `full` nothing inside the stage is recomputed, unless
    a technique keeps the blocks' inputs elsewhere.
    """
    config = job.config
    # A technique may let the kept inputs wait elsewhere.
    pack = next((extension.pack for extension in job.extensions if extension.packs_inputs()), None)
    if config.pp == 1 or config.recompute == "selective" or pack is not None:
        # The shape of a block's input on this rank, from which a budget follows.
        rows = config.context if job.positions is None else len(job.positions)
        rows //= config.tp if config.sequence_parallel else 1
        shape = activation_shape(config, job.sampler.dataset) if config.is_classifier else (rows, config.width)
        buffers = dict(job.model.named_buffers())
        recompute(job.model, config.recompute, pack, (job.batches.micro_batch, *shape), job.dtype)

        # A budget measures a block by running it, which is not a part of the training.
        for extension in job.extensions:
            extension.forget()
        job.model.load_state_dict(buffers, strict=False)
