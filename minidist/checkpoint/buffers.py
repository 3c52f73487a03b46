"""Arrays of a model that are state and not trained, in a checkpoint: the running statistics of batch normalisation.

Without them a resumed job would evaluate another model than the one that was saved. They are equal on all ranks of the
data axis, whole (a model that has any is not cut), and stored once, as `buffers/NAME`. Sends nothing.

Proved by: tests/checkpoint/test_buffers.py
"""

from minidist.checkpoint.directory import Checkpoint, CheckpointShard, ReplicaId
from minidist.nn import Module


def buffer_shards(model: Module, replica: ReplicaId) -> list[CheckpointShard]:
    """Return the model's buffers, for `save`; replica: this rank's number among the ranks that hold them."""
    return [
        CheckpointShard(f"buffers/{name}", array.shape, array, replica=replica) for name, array in model.named_buffers()
    ]


def load_buffers(checkpoint: Checkpoint, model: Module) -> None:
    """Give the model its buffers in the checkpoint; UsageError when one is missing, or of another shape."""
    own = dict(model.named_buffers())
    for name, array in own.items():
        checkpoint.expect(f"buffers/{name}", array.shape)
    model.load_state_dict({name: checkpoint.tensor(f"buffers/{name}") for name in own}, strict=False)
