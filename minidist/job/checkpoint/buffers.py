"""Arrays of a model that are state and not trained, in a checkpoint: the running statistics of batch normalisation.

Without them a resumed job would evaluate another model than the one that was saved. They are equal on all ranks of the
data axis, each on the stage that has the module, and stored once, as `buffers/NAME`. Sends nothing.

Proved by: tests/checkpoint/test_buffers.py
"""

from collections.abc import Iterable

from minidist.core.nn import Module
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard
from minidist.job.checkpoint.held import Buffer
from minidist.nn.buffers import named_buffers


def buffer_shards(buffers: Iterable[Buffer]) -> list[CheckpointShard]:
    """Return the buffers of this rank, for `save`."""
    return [CheckpointShard(f"buffers/{name}", array.shape, array, replica=own) for name, array, own in buffers]


def load_buffers(checkpoint: Checkpoint, model: Module) -> None:
    """Give the model its buffers in the checkpoint; UsageError when one is missing, or of another shape."""
    own = dict(named_buffers(model))
    for name, array in own.items():
        checkpoint.expect(f"buffers/{name}", array.shape)
    model.load_state_dict({name: checkpoint.tensor(f"buffers/{name}") for name in own}, strict=False)
