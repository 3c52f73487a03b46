"""Programs of ranks in threads: one at a time, their errors and their ends. Needs no PyTorch."""

import sys
import threading
from functools import partial

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import DeadlockError
from minidist.core.collectives import all_reduce
from minidist.debug.torch_ranks.rank_thread import RankThread, current_rank, in_rank


def run(program, ranks, **hooks):
    """The results of `program()` on every rank, each in its thread."""
    nothing = {"on_leave": lambda: None, "on_return": lambda: None, **hooks}
    return SimWorld(ranks).run(lambda comm: RankThread(comm, program, **nothing).run())


def reduce(value):
    """The sum of all ranks' values."""
    rank = current_rank()
    array = np.full(3, float(value))
    rank.call(lambda: all_reduce(rank.comm, array))
    return array[0]


def test_ranks_in_threads_communicate_and_return():
    assert run(lambda: reduce(current_rank().comm.rank + 1), 4) == [10.0] * 4


def test_only_one_thread_runs_at_a_time():
    running, most = [], []

    def program():
        for _ in range(5):
            running.append(threading.get_ident())
            most.append(len(running))
            running.pop()
            reduce(1)

    run(program, 3)
    assert max(most) == 1
    assert len(most) == 15


def test_hooks_run_in_the_rank_s_thread_around_what_others_do():
    seen = []

    def note(what):
        return lambda: seen.append((current_rank().comm.rank, what))

    run(lambda: reduce(1), 2, on_leave=note("leaves"), on_return=note("returns"))
    mine = [what for rank, what in seen if rank == 0]
    assert mine == ["returns", "leaves", "returns", "leaves"]
    assert seen != sorted(seen)  # the other rank ran in between


def test_an_error_of_one_rank_ends_the_threads_of_all():
    ended = []

    def program():
        try:
            reduce(1)
            if current_rank().comm.rank == 1:
                raise ValueError("mine")
            reduce(1)
        finally:
            ended.append(current_rank().comm.rank)

    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"):
        run(program, 3)
    assert sorted(ended) == [0, 1, 2]
    assert threading.active_count() <= before + 1  # a watchdog may still be ending


def test_a_deadlock_names_the_line_of_the_program_and_ends_all_threads():
    ended = []

    def program():
        rank = current_rank()
        try:
            rank.call(lambda: rank.comm.recv(np.empty(2), (rank.comm.rank + 1) % 2))
        finally:
            ended.append(rank.comm.rank)

    with pytest.raises(DeadlockError, match="circle: rank 0 -> rank 1 -> rank 0") as raised:
        run(program, 2)
    assert str(raised.value).count("test_rank_thread.py:") == 2
    assert sorted(ended) == [0, 1]


def test_a_report_names_the_very_line_that_communicates():
    """What is handed over is no function of this file, as it is none of the program where torch communicates."""
    lines = {}

    def program():
        rank = current_rank()
        if rank.comm.rank:
            lines[1] = sys._getframe().f_lineno + 1
            rank.call(partial(rank.comm.recv, np.empty(2), 0))
        lines[0] = sys._getframe().f_lineno + 1
        rank.call(partial(rank.comm.recv, np.empty(2), 1))

    with pytest.raises(DeadlockError) as raised:
        run(program, 2)
    for rank in range(2):
        assert f"rank {rank} waits in receive from rank {1 - rank}, tag 0, 16 B, at " in str(raised.value)
        assert f"test_rank_thread.py:{lines[rank]}\n" in str(raised.value)


def test_an_error_of_the_communicator_is_raised_in_the_program():
    def program():
        rank = current_rank()
        with pytest.raises(ValueError, match="names rank 7"):
            rank.call(lambda: rank.comm.send(np.ones(1), 7))
        return "went on"

    assert run(program, 2) == ["went on"] * 2


def test_this_thread_is_no_rank():
    assert not in_rank()
