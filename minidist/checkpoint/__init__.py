"""Checkpoints: a directory of named global tensors, written by any number of ranks and read by any other number."""

from minidist.checkpoint.directory import Checkpoint, Piece, save
from minidist.checkpoint.local import Local, local_pieces, read_local
from minidist.checkpoint.storage import Storage

__all__ = ["Checkpoint", "Local", "Piece", "Storage", "local_pieces", "read_local", "save"]
