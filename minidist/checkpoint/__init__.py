"""Checkpoints: a directory of named global tensors, written by any number of ranks and read by any other number."""

from minidist.checkpoint.directory import Checkpoint, Piece, save
from minidist.checkpoint.storage import Storage

__all__ = ["Checkpoint", "Piece", "Storage", "save"]
