"""What techniques keep of a data axis and no global tensor holds: one state per rank, and one that all ranks share.

State that is equal on all ranks of the axis (`Extension.of_axis`) is stored once. State of a rank (`Extension.of_rank`)
is stored under the number of that rank. Weights and optimizer state are global tensors, so any layout can read them. A
residual of gradients is not: that of rank 3 is what rank 3 has not sent yet. What training needs is that nothing of it
is lost, which is a statement about the *sum* over ranks. On an equal number of ranks each gets its own back, bit for
bit; on n others rank r gets the sum of the arrays of the old ranks r, r + n, r + 2n, ... and zeros when there are none:
the total is kept. Sends nothing. A strategy is a `train.strategies.mesh.MeshStrategy`.

Proved by: tests/checkpoint/test_killed.py, tests/techniques/test_compression.py
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.core.base import arrays as xp
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard
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


# --- the state of a rank ---------------------------------------------------------------------------------------------


def rank_state_shards(rank: int, states: Mapping[str, Any]) -> list[CheckpointShard]:
    """Make the shards of this rank's states, arrays by name, for `save`: "local/NAME/00003" for the array of rank 3."""
    arrays = {_key(name, rank): xp.as_array(value) for name, value in states.items()}
    return [CheckpointShard(key, array.shape, array) for key, array in arrays.items()]


def read_rank_state(checkpoint: Checkpoint, name: str, rank: int, ranks: int) -> np.ndarray | None:
    """Read the part of state `name` for rank `rank` of `ranks`; None when there is none.

    Errors: UsageError when it was stored with different shapes or dtypes on different ranks, and those of `Checkpoint`.
    """
    prefix = f"local/{name}/"
    stored = sorted(key for key in checkpoint.tensors if key.startswith(prefix) and key[len(prefix) :].isdigit())
    if not stored:
        return None

    # States can only be added when all ranks held the same parameters.
    kinds = {(tuple(checkpoint.tensors[key]["shape"]), checkpoint.tensors[key]["dtype"]) for key in stored}
    if len(kinds) > 1:
        raise UsageError(
            f"checkpoint {quoted_path(checkpoint.path)}: local state {quoted(name)} has several shapes,"
            f" {sorted(map(str, kinds))}; resume on {len(stored)} ranks, as it was saved"
        )

    # On as many ranks as before, each has its own state again.
    if len(stored) == ranks:
        return checkpoint.tensor(_key(name, rank))

    # On another number, the states of the old ranks are added up, so that their sum over ranks stays the same.
    mine = stored[rank::ranks]
    if not mine:
        ((shape, dtype),) = kinds
        return np.zeros(shape, np.dtype(dtype))
    total = checkpoint.tensor(mine[0])
    for key in mine[1:]:
        total = total + checkpoint.tensor(key)
    return total


def _key(name: str, rank: int) -> str:
    return f"local/{name}/{rank:05d}"
