"""A rank whose function is a generator or a coroutine has run nothing, and says so."""

import asyncio
import re
import warnings
from functools import partial

import numpy as np
import pytest

from minidist.comm import SimWorld, launch
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from tests.cases import each


def loop(comm):
    yield comm.rank


async def asynchronous(comm):
    return comm.rank


async def both(comm):
    yield comm.rank


class Callable:
    def __call__(self, comm):
        yield comm.rank


CASES = [
    (loop, "loop returned a generator"),
    (partial(loop), "returned a generator"),
    (lambda comm: loop(comm), "returned a generator"),
    (Callable(), "returned a generator"),
    (lambda comm: (i for i in range(3)), "returned a generator"),
    (asynchronous, "asynchronous returned a coroutine"),
    (both, "both returned an asynchronous generator"),
    (lambda comm: map(comm.send, range(3)), "returned a map"),
]


@each(("main", "words"), CASES)
def test_what_has_not_run_is_refused(main, words):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no coroutine "was never awaited"
        with pytest.raises(UsageError, match=rf"rank 0: .*{words}, so none of its lines has run; "):
            SimWorld(2).run(main)


def start_a_work(comm):
    comm.run_async(partial(loop, comm)).wait()


def test_a_work_is_refused_too():
    with pytest.raises(UsageError, match=r"rank 0: the function returned a generator, so none of its lines has run; "):
        SimWorld(2).run(start_a_work)


def test_launch_ends_with_the_sentence_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        launch(loop, argv=["--ranks", "2"])
    assert ended.value.code == 2
    assert "rank 0: loop returned a generator, so none of its lines has run; remove `yield`" in capsys.readouterr().err


@pytest.mark.mpi(2, timeout=30)
def test_a_rank_under_mpi(comm):
    for main, words in CASES:
        with pytest.raises(UsageError, match=re.escape(words)):
            comm.world.run(main)


def test_a_rank_may_run_a_coroutine_and_return_a_list():
    async def total(comm, values):
        await asyncio.sleep(0)
        values.append(comm.rank)
        comm.barrier()
        await asyncio.sleep(0)
        return [comm.rank, asyncio.get_running_loop() is not None]

    def main(comm):
        return asyncio.run(total(comm, []))

    assert SimWorld(3).run(main) == [[rank, True] for rank in range(3)]


def test_a_users_own_collective_that_is_a_generator_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def broken(comm, array, op):\n    yield array\n")
    with pytest.raises(UsageError, match="rank 0: broken returned a generator"):
        SimWorld(2).run(lambda comm: all_reduce(comm, np.ones(3), algorithm=f"{file}:broken"))
