"""What techniques keep of a data axis and no global tensor holds: one state per rank, and one that all ranks share.

State of a rank (`Extension.of_rank`) is stored under the number of that rank, and on another number of ranks the sum of
all is kept (`rank_state.py`). State that is equal on all ranks of the axis (`Extension.of_axis`) is stored
once. Sends nothing. A strategy is a `train.strategies.mesh.MeshStrategy`.

Proved by: tests/techniques/test_compression.py
"""

from collections.abc import Collection, Iterator
from typing import Any

from minidist.base.errors import UsageError, quoted_path
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard
from minidist.job.checkpoint.rank_state import rank_state_shards, read_rank_state
from minidist.techniques import installed

# What a checkpoint says of state whose technique is not installed.
UNKNOWN = "arrays of a technique", "resume with this technique"


def axis_state_shards(strategy: Any) -> list[CheckpointShard]:
    """Return what the job's techniques keep of this rank's data axes, for `save`."""
    shards: list[CheckpointShard] = []
    for name, axis in _named(strategy):
        for extension in strategy.job.extensions:
            states = {f"{kind}/{name}": array for kind, array in extension.of_rank(axis).items()}
            shards += rank_state_shards(axis.replicas.weights.number, states)
            for key, array in extension.of_axis(axis).items():
                path = f"{extension.key}/{name}/{key}"
                shards.append(CheckpointShard(path, array.shape, array, replica=axis.replicas.weights))
    return shards


def load_axis_state(checkpoint: Checkpoint, strategy: Any) -> None:
    """Give every technique its state in the checkpoint. Raises UsageError where state of a rank would be lost."""
    # Which kinds of state each technique has on each axis.
    places = [
        (name, axis, extension, list(extension.of_rank(axis)))
        for name, axis in _named(strategy)
        for extension in strategy.job.extensions
    ]
    check_nothing_is_lost(checkpoint, {f"local/{kind}/{name}" for name, _, _, kinds in places for kind in kinds})

    # State of a rank is this rank's own; the rest is the same on all ranks of the axis.
    for name, axis, extension, kinds in places:
        found = {kind: read_rank_state(checkpoint, f"{kind}/{name}", *axis.replicas.weights) for kind in kinds}
        there = {kind: array for kind, array in found.items() if array is not None}
        if there:
            extension.load_of_rank(axis, there)
        prefix = f"{extension.key}/{name}/"
        shared = {key[len(prefix) :]: checkpoint.tensor(key) for key in checkpoint.tensors if key.startswith(prefix)}
        if shared:
            extension.load_of_axis(axis, shared)


def check_nothing_is_lost(checkpoint: Checkpoint, wanted: Collection[str]) -> None:
    """Raise UsageError unless all state of ranks in the checkpoint finds a technique that goes on with it.

    wanted: the places at which this job has such state, "local/KIND/AXIS".
    """
    stored = {name.rpartition("/")[0] for name in checkpoint.tensors if name.startswith("local/")}
    # The technique may be one that this job does not use.
    words = {kind: text for each in installed() for kind, text in each.own_state.items()}
    for kind in sorted({place.split("/")[1] for place in stored}):
        there, here = ({name for name in names if name.split("/")[1] == kind} for names in (stored, wanted))
        if not (here and here <= there):
            what, remedy = words.get(kind, UNKNOWN)
            raise UsageError(
                f"the checkpoint {quoted_path(checkpoint.path)} holds {what} ({min(there)}), and this job has no place"
                f" for them; {remedy}"
            )


def _named(strategy: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name in the checkpoint, data axis) of each data axis."""
    stages: set[int] = set()
    for axis in strategy.data_axes:
        group = f" experts {strategy.axes.ep.rank}" if axis.experts else ""
        # The second axis of a stage that is not that of its experts has the weights tied to another stage.
        if not axis.experts and axis.stage in stages:
            group = " tied"
        stages.add(axis.stage)
        yield f"stage {axis.stage} tile {strategy.axes.tp.rank}{group}", axis
