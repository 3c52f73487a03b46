"""Checkpoints: a directory of named global tensors, written by any number of ranks and read by any other number."""

from minidist.checkpoint.directory import Checkpoint, CheckpointShard, ReplicaId, save
from minidist.checkpoint.rank_state import RankState, rank_state_shards, read_rank_state
from minidist.checkpoint.storage import Storage

__all__ = [
    "Checkpoint",
    "CheckpointShard",
    "RankState",
    "ReplicaId",
    "Storage",
    "rank_state_shards",
    "read_rank_state",
    "save",
]
