"""State that belongs to a rank and to no global tensor, and what happens to it when the number of ranks changes.

Weights and optimizer state are global tensors, so any layout can read them. A residual of gradients is not: that of
rank 3 is what rank 3 has not sent yet. What training needs is that nothing of it is lost, which is a statement about
the *sum* over ranks. So each rank's array is stored. On an equal number of ranks each gets its own back, bit for bit;
on n others rank r gets the sum of the arrays of the old ranks r, r + n, r + 2n, ... and zeros when there are none: the
total is kept.

Proved by: tests/checkpoint/test_killed.py, tests/techniques/test_compression.py
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.core.base import arrays as xp
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard


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
