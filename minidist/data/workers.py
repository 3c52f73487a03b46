"""Worker processes that make batches: the batches have the same bits and the same order for any number of workers.

The order of the requests is known beforehand. Worker i mod N makes request i, and the trainer takes the results in the
order of the requests, so the speed of a worker does not change what is trained on:

    requests   0   1   2   3   4   5        worker 0 makes 0, 2, 4     trainer takes 0, 1, 2, 3, 4, 5
                                            worker 1 makes 1, 3, 5

Each worker has a separate pipe, and at most `ahead` requests whose results were not taken yet. So memory is bounded,
and no worker waits for another one. A worker is a new interpreter. It is not a fork, because a fork copies the locks of
threads and the state of MPI; and it does not run the main program again, as multiprocessing's "spawn" does, so any
script may have workers. A worker is sent the function that makes the sampler, not the data. It maps or makes the data
itself.

Nothing hangs. A worker that raises or dies is reported in one sentence with the samples that it was making; a worker
whose trainer has ended sees the end of its pipe and ends; Ctrl-C is delivered to the trainer alone; and at the end of
the context all workers are stopped.

Proved by: tests/data/test_workers.py
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from minidist.base.errors import MinidistError, UsageError, quoted, reason
from minidist.data.datasets import hold_out
from minidist.data.load import load_dataset
from minidist.data.sampler import GlobalBatchSampler

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Request = tuple[int, int, int]  # step, first row of the global batch, rows
STOP_SECONDS = 5.0  # the time that a worker has to end by itself before it is killed


class LoaderError(MinidistError):
    """A worker process raised an error, or died."""


class WorkerSampler:
    """A sampler whose batches are made ahead of time by worker processes. It is a context manager that stops them.

    make_sampler: a function of a module, or a partial of one, that makes the sampler in each worker. A function of the
    main program raises UsageError, because workers do not run the main program; so does a lambda. sampler: an equal
    sampler in this process, for requests out of order and for the numbers of samples in errors. requests: the requests
    in the order in which they will be made. ahead: the largest number of requests that a worker has at a time.
    """

    def __init__(
        self, make_sampler: Callable[[], Any], sampler: Any, requests: Iterable[Request], workers: int, ahead: int = 2
    ) -> None:
        self.sampler, self.workers, self.ahead = sampler, workers, max(1, ahead)
        self.served = 0  # batches that the workers made
        self._make_sampler, self._requests = make_sampler, iter(requests)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._expected: deque[tuple[int, Request]] = deque()  # (worker, request) of the results not taken yet
        self._next = 0  # the worker of the next request

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __enter__(self) -> Self:
        try:
            made = pickle.dumps(self._make_sampler)
        except Exception as error:  # an object's own __reduce__ may raise anything
            raise UsageError(
                f"{quoted(self._make_sampler)} cannot be sent to a loader worker, which makes its sampler with it"
                f" ({reason(error)}); pass a function of a module, or functools.partial of one with numbers and text"
            ) from None
        if b"__main__" in made:
            raise UsageError(
                "a loader worker cannot make its sampler: workers import modules, and the function is defined in the"
                " main program; move it to a separate module"
            )
        # A worker must not start MPI, so it gets no variable of the launcher. It imports from the same folders as this
        # program.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_"))}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        import multiprocessing  # where workers are started

        with _without_interrupts():
            for _ in range(self.workers):
                here, there = multiprocessing.Pipe()
                command = f"from minidist.data.workers import work; work({there.fileno()})"
                process = subprocess.Popen(
                    [sys.executable, "-c", command],
                    env=environment,
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                )
                # Close the worker's end here, so that each side sees when the other one has ended.
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(made)
        for _ in range(self.workers * self.ahead):
            self._ask()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # A worker that waits for a request, or for space in its pipe, sees that the pipe is closed, and ends.
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS if kind is None else 0.2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def batch(self, step: int, first: int, count: int) -> Any:
        """Return the sampler's batch, made by a worker when it is the next one in the order of the requests."""
        request = (step, first, count)
        if not self._expected or self._expected[0][1] != request:
            return self.sampler.batch(*request)
        worker, _ = self._expected.popleft()
        result = self._receive(worker, request)
        self._ask()
        self.served += 1
        return result

    def _ask(self) -> None:
        """Give the next request to the worker whose turn it is."""
        request = next(self._requests, None)
        if request is None:
            return
        self._expected.append((self._next, request))
        # A worker that has ended is reported when its result is taken.
        with suppress(OSError):
            self._pipes[self._next].send(request)
        self._next = (self._next + 1) % self.workers

    def _receive(self, worker: int, request: Request) -> Any:
        """Return a worker's result. Raises LoaderError when the worker has raised an error, or has ended."""
        pipe, process = self._pipes[worker], self._processes[worker]
        with suppress(EOFError, OSError):
            # What a worker sent before it ended can still be read; after that recv raises EOFError.
            result, error = pipe.recv()
            if error is None:
                return result
            raise LoaderError(f"loader worker {worker} {error}, in step {request[0]}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        code = process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        raise LoaderError(
            f"loader worker {worker} (process {process.pid}) {how} while it made step {request[0]}, samples"
            f" {self._samples(request)}; with signal 9 the machine may have run out of memory, so use fewer"
            " --loader-workers, or 0 to see the error here"
        )

    def _samples(self, request: Request) -> str:
        step, first, count = request
        return quoted(self.sampler.sample_indices(step)[first : first + count].tolist(), marks=False)


def open_sampler(data: str, held_out: bool, global_batch: int, context: int, seed: int) -> GlobalBatchSampler:
    """Return a job's sampler; workers call it. held_out: leave out the last tenth, on which the job is evaluated."""
    dataset = load_dataset(data)
    return GlobalBatchSampler(hold_out(dataset)[0] if held_out else dataset, global_batch, context, seed)


def work(descriptor: int) -> None:
    """Make batches until the pipe is closed. A worker process runs this function.

    descriptor: the file descriptor of the worker's end of the pipe.
    """
    from multiprocessing.connection import Connection

    pipe, sampler, closed = Connection(descriptor), None, None
    try:
        sampler = pickle.loads(pipe.recv_bytes())()
    except Exception as error:
        closed = f"could not open its data: {reason(error, named=True)}"
    # The pipe raises when the trainer has ended, or has left the context.
    with suppress(EOFError, OSError):
        while True:
            request = pipe.recv()
            result, failure = None, closed
            if sampler is not None:
                try:
                    result = sampler.batch(*request)
                except Exception as error:
                    failure = f"raised {reason(error, named=True)}, for {_first_wrong(sampler, request)}"
            pipe.send((result, failure))


def _first_wrong(sampler: Any, request: Request) -> str:
    """Return, as text, the first sample of a batch that raises. Makes the samples one by one."""
    step, first, count = request
    for row in range(first, first + count):
        try:
            sampler.batch(step, row, 1)
        except Exception:
            return f"sample {int(sampler.sample_indices(step)[row])}"
    return f"the batch of samples {quoted(sampler.sample_indices(step)[first : first + count].tolist(), marks=False)}"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT in processes that are started in the block: they inherit the mask. They end with the trainer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
