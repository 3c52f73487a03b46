"""Prefetching: the next batches are made while the current one trains, by a thread, in an order known beforehand.

    training thread    | step 0 | step 1 | step 2 |
    this thread      0 | 1  | 2 |  3  ... at most `depth` batches wait

Which rows a rank will ask for is known for the whole job, so the thread needs no messages: it makes the batches in that
order. NumPy releases the interpreter while it copies, and a memory-mapped file is read while no one waits for it. The
numbers are the same; a request out of the expected order is served at once, without the thread.

Proved by: tests/data/test_loading.py
"""

import threading
from collections.abc import Iterable
from queue import Empty, Full, Queue
from types import TracebackType
from typing import Any, Self

Request = tuple[int, int, int]  # step, first row of the global batch, rows


class PrefetchingSampler:
    """A sampler whose batches are made ahead of time by a thread. A context manager, at whose end the thread stops.

    sampler: has `batch(step, first, count)`. requests: in the order in which they will be asked for. depth: the largest
    number of batches that wait. An error in the thread is raised by the `batch` call whose result it would have been.
    """

    def __init__(self, sampler: Any, requests: Iterable[Request], depth: int = 2) -> None:
        self.sampler, self.requests, self.depth = sampler, requests, depth
        self.served = 0  # batches that the thread made
        self._queue: Queue[tuple[Request, Any, BaseException | None]] = Queue(max(1, depth))
        self._stop, self._one_at_a_time = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._work, name="minidist prefetch", daemon=True)
        self._waiting: tuple[Request, Any, BaseException | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # The thread looks at `_stop` every 50 ms, also while it waits for a free place in the queue.
        self._stop.set()
        self._thread.join()

    def batch(self, step: int, first: int, count: int) -> Any:
        """Return the sampler's batch, made by the thread when it is the next one in its order."""
        # The oldest result waits for its own request. Any other request is served here, with the lock, because a
        # sampler keeps state.
        request = (step, first, count)
        ready = self._waiting or self._next()
        if ready is None or ready[0] != request:
            self._waiting = ready
            with self._one_at_a_time:
                return self.sampler.batch(*request)

        # It is the one: return it, or raise the error that the thread met.
        self._waiting = None
        if ready[2] is not None:
            raise ready[2]
        self.served += 1
        return ready[1]

    def _next(self) -> tuple[Request, Any, BaseException | None] | None:
        """Return the oldest result, or None when the thread has ended and left none."""
        while True:
            try:
                return self._queue.get(timeout=0.05)
            except Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    return None

    def _work(self) -> None:
        """Make the batches one after the other until all are made, one fails, or the context ends."""
        for request in self.requests:
            # [1] Make the batch. An error is kept, to be raised where the result is asked for.
            result: Any = None
            error: Exception | None = None
            try:
                with self._one_at_a_time:
                    result = self.sampler.batch(*request)
            except Exception as caught:
                error = caught

            # [2] Wait for a free place in the queue, but not longer than the context lasts.
            while not self._stop.is_set():
                try:
                    self._queue.put((request, result, error), timeout=0.05)
                    break
                except Full:
                    continue

            # [3] After an error no further batch is made: the trainer stops there.
            if error is not None or self._stop.is_set():
                return
