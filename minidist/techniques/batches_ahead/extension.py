"""`--prefetch-batches`, `--loader-workers`: a thread or worker processes make the batches of later steps.

    step                  | 0 | 1 | 2 |          a rank knows the rows of all its steps, so it gets the same
    thread or workers   0 | 1 | 2 | 3 | ...      batches in the same order, however early they are made

The thread is in `data/prefetch.py`, the worker processes are in `data/workers.py`. Nothing is sent.

A rank sends per step: nothing.
Equal to: one device, bit for bit.
Lesson: 06f_loading.

Proved by: tests/techniques/test_batches_ahead.py, tests/data/test_loading.py, tests/data/test_workers.py
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from minidist.base.limits import MAX_BATCH
from minidist.core.comm import Comm
from minidist.data import microbatch_numbers
from minidist.techniques import Extension, Field, Record

MAX_WORKERS = 64  # processes that make the batches of a rank


class BatchesAhead(Extension):
    """Makes batches before they are asked for; see `PrefetchingSampler` and `WorkerSampler`."""

    class Settings(Record):
        """The flags. A technique that chooses batches while it trains refuses them by a rule (`adaptive_batch`)."""

        prefetch_batches: int = Field(
            0,
            ge=0,
            le=MAX_BATCH,
            description="batches of each rank that a thread, or its workers, prepare ahead; 0: none",
        )
        loader_workers: int = Field(
            0, ge=0, le=MAX_WORKERS, description="worker processes of each rank that make its batches; 0: none"
        )

    panel = "Model and data"

    def build(self, job: Any, comm: Comm | None) -> None:
        self.job: Any = job

    def reading(self, sampler: Any, replica: int, steps: Iterable[int]) -> AbstractContextManager[Any]:
        """Return the sampler that makes the batches ahead: with --loader-workers in processes, else in a thread."""
        job, ahead, workers = self.job, self.settings.prefetch_batches, self.settings.loader_workers
        # All requests of the replica are known now, and none of them is made before its turn.
        places = [job.batch.shares.place(number) for number in microbatch_numbers(replica, job.batches.accumulation)]
        requests = ((step, first, rows) for step in steps for first, rows in places)
        if not workers:
            from minidist.data import PrefetchingSampler

            return PrefetchingSampler(sampler, requests, ahead)
        from minidist.data.workers import WorkerSampler, open_sampler

        # A worker opens the data itself.
        config, held_out = job.config, job.config.evaluate_every is not None
        opening = partial(open_sampler, config.data, held_out, job.batches.global_batch, config.context, config.seed)
        # Two batches per worker, unless --prefetch-batches is given.
        return WorkerSampler(opening, sampler, requests, workers, -(-ahead // workers) or 2)
