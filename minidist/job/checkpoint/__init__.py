"""Checkpoints: a directory of named global tensors, written by any number of ranks and read by any other number.

directory.py          saving and loading a directory of global tensors
held.py               what a rank holds of a job's tensors
parameter_shards.py   which parts of the global tensors a rank's arrays are
axis_state.py         what techniques keep of a data axis, and of a rank
buffers.py            running statistics
resume.py             a training job in a checkpoint and back
saved_model.py        the model of a checkpoint
huggingface.py        folders of Hugging Face
storage.py            the file operations of a save
dry_storage.py        the files of a dry run, which are counted
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.job.checkpoint.axis_state import rank_state_shards, read_rank_state
    from minidist.job.checkpoint.directory import Checkpoint, CheckpointShard, save, save_bytes
    from minidist.job.checkpoint.held import ReplicaId
    from minidist.job.checkpoint.resume import (
        check_saving,
        resume_job,
        resumed_config,
        save_job,
        saved_bytes,
        saving_alone,
    )
    from minidist.job.checkpoint.saved_model import SavedModel
    from minidist.job.checkpoint.storage import Storage
__getattr__, __dir__ = lazy_imports(__name__, __file__)
