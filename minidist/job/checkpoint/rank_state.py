"""State that belongs to a rank and to no global tensor, and what happens to it when the number of ranks changes.

Weights and optimizer state are global tensors, so any layout can read them. A residual of gradients is not: that of
rank 3 is what rank 3 has not sent yet. What training needs is that nothing of it is lost, which is a statement about
the *sum* over ranks. So every kind of local state names its rule:

    sum      each rank's array is stored. On as many ranks each gets its own back, bit for bit; on n others rank r gets
             the sum of the arrays of the old ranks r, r + n, r + 2n, ... and zeros when there are none: the total is
             kept.
    drained  must be empty when a checkpoint is made: activations of micro-batches in flight, stashed weights. The save
             is refused until the pipeline has been drained, on every rank alike.

Proved by: tests/checkpoint/test_killed.py, tests/techniques/test_compression.py
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError, quoted, quoted_path
from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard

RULES = ("sum", "drained")


@dataclass(frozen=True)
class RankState:
    """State `name` of this rank: an array (rule "sum"), or the number of things in flight (rule "drained")."""

    name: str
    value: Any
    rule: str = "sum"


def rank_state_shards(rank: int, states: Iterable[RankState]) -> list[CheckpointShard]:
    """Make the shards of this rank's states for `save`: tensor "local/NAME/00003" for the array of rank 3.

    Errors: UsageError for an unknown rule, and when something that must be drained is in flight.
    """
    shards = []
    for state in states:
        if state.rule not in RULES:
            raise UsageError(
                f"local state {quoted(state.name)} has the rule {quoted(state.rule)}; it must be one of"
                f" {', '.join(RULES)}"
            )
        # Nothing of it is stored: it must be empty.
        if state.rule == "drained":
            if state.value:
                raise UsageError(
                    f"rank {rank}: {state.value} of {quoted(state.name)} are in flight; save after the last backward"
                    " pass of a step"
                )
            continue
        array = xp.as_array(state.value)
        shards.append(CheckpointShard(_key(state.name, rank), array.shape, array))
    return shards


def read_rank_state(checkpoint: Checkpoint, name: str, rank: int, ranks: int) -> np.ndarray | None:
    """Read the part of state `name` for rank `rank` of `ranks` under the rule "sum"; None when there is none.

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
            f" {sorted(map(str, kinds))};"
            f" resume on {len(stored)} ranks, as it was saved"
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
