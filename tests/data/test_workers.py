"""Batches from worker processes: the same ones, in the same order, and every failure is one sentence."""

import os
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.data import LoaderError, WorkerSampler
from minidist.data.workers import open_sampler

OPEN = partial(open_sampler, "markov", False, 6, 8, 3)
REQUESTS = [(step, first, 2) for step in range(4) for first in (0, 2, 4)]


class Failing:
    """A sampler that raises for sample 7 and dies for sample 11, or cannot be opened. It can be pickled."""

    def __init__(self, how):
        self.how = how

    def __call__(self):
        if self.how == "opening":
            raise OSError("no such disk")
        return self

    def sample_indices(self, step):
        return np.arange(step * 4, step * 4 + 4)

    def batch(self, step, first, count):
        rows = self.sample_indices(step)[first : first + count]
        if step == 0 and first == 0:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, which means nothing to a worker
        if 7 in rows:
            raise ValueError("sample 7 is torn")
        if 11 in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows


def test_two_workers_make_the_batches_of_none_in_order_and_end_with_the_context():
    """Also a request out of order, which is made here."""
    here = OPEN()
    with WorkerSampler(OPEN, here, REQUESTS, workers=2, ahead=2) as workers:
        assert len(workers._expected) == 4  # no more than that wait
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # Ctrl-C still means us
        for number, request in enumerate(REQUESTS):
            if number == 5:
                assert np.array_equal(workers.batch(9, 1, 3)[0], here.batch(9, 1, 3)[0])
            for one, other in zip(workers.batch(*request), here.batch(*request), strict=True):
                assert np.array_equal(one, other)
                assert one.dtype == other.dtype
        assert workers.served == len(REQUESTS)
        processes = workers._processes
        assert len({process.pid for process in processes}) == 2
    assert [process.returncode for process in processes] == [0, 0]


def test_a_worker_that_raises_or_dies_is_one_sentence_with_its_samples():
    failing, requests = Failing("raises and dies"), [(0, 0, 2), (0, 2, 2), (1, 0, 2), (1, 2, 2), (2, 2, 2)]
    with WorkerSampler(failing, failing, requests, 1) as workers:
        assert workers.batch(*requests[0]).tolist() == [0, 1]
        assert workers.batch(*requests[1]).tolist() == [2, 3]
        assert workers.batch(*requests[2]).tolist() == [4, 5]
        torn = "loader worker 0 raised ValueError: sample 7 is torn, for sample 7, in step 1"
        with pytest.raises(LoaderError, match=torn):
            workers.batch(*requests[3])
        died = r"worker 0 \(process \d+\) was killed by signal 9 while it made step 2, samples \[10, 11\]; .* use fewer"
        with pytest.raises(LoaderError, match=died):
            workers.batch(*requests[4])
        began = time.perf_counter()
    assert time.perf_counter() - began < 5
    assert all(process.poll() is not None for process in workers._processes)


def test_a_worker_that_cannot_open_its_data_says_so():
    failing = Failing("opening")
    with WorkerSampler(failing, failing, [(0, 0, 2)], 1) as workers, pytest.raises(LoaderError, match="no such disk"):
        workers.batch(0, 0, 2)


def test_what_a_worker_cannot_import_is_refused(monkeypatch):
    monkeypatch.setattr(Failing, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Failing", Failing, raising=False)
    with pytest.raises(UsageError, match="is defined in the main program; move it to a separate module"):
        WorkerSampler(Failing("main"), None, [], 1).__enter__()


def test_a_function_that_cannot_be_sent_to_a_worker_is_refused():
    def local():
        return Failing("local")

    for make in (lambda: Failing("lambda"), local, partial(Failing, lambda: "main")):
        with pytest.raises(UsageError, match=r"cannot be sent to a loader worker, .*; pass a function of a module"):
            WorkerSampler(make, None, [], 1).__enter__()
