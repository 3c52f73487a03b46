"""Each simulated rank has its random generators and its event loop, as a process has."""

# ruff: noqa: NPY002  the legacy generators are the subject

import asyncio
import os
import random

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.sim.process_state import ProcessState, _words
from tests.cases import each


def seeded(comm):
    np.random.seed(comm.rank)
    random.seed(comm.rank)
    comm.barrier()
    drawn = [np.random.rand(), np.random.normal(), random.random(), random.gauss(0, 1)]
    comm.barrier()
    # The second of a pair of normal deviates waits in the generator.
    return [*drawn, np.random.normal(), random.gauss(0, 1), float(np.random.permutation(10)[0])]


def alone(rank):
    """What a process that is this rank draws."""
    np.random.seed(rank)
    random.seed(rank)
    drawn = [np.random.rand(), np.random.normal(), random.random(), random.gauss(0, 1)]
    return [*drawn, np.random.normal(), random.gauss(0, 1), float(np.random.permutation(10)[0])]


def test_every_rank_draws_what_a_process_would():
    assert SimWorld(4).run(seeded) == [alone(rank) for rank in range(4)]


def test_a_seed_counts_where_nothing_was_drawn_before_it():
    """A new process has drawn nothing, as after a seed; the run before has left its state of the beginning."""

    def main(comm):
        random.seed(comm.rank)
        comm.barrier()
        return random.random()

    def draws(comm):
        return random.random()

    for seed in 5, 6, 7:
        random.seed(seed)
        assert SimWorld(3).run(main) == [random.Random(rank).random() for rank in range(3)]
        random.seed(seed)
        assert SimWorld(2).run(draws) == [random.Random(seed).random()] * 2
        random.seed(seed)


@pytest.mark.mpi(2, timeout=30)
def test_the_same_numbers_under_mpi(comm):
    assert seeded(comm) == alone(comm.rank)


@each("draw", [np.random.rand, np.random.normal, random.random, lambda: random.gauss(0, 1)])
@each("drawn_before", [0, 1, 2, 623, 624, 625])
def test_ranks_begin_with_the_state_of_the_process_and_do_not_disturb_each_other(draw, drawn_before):
    np.random.seed(5)
    random.seed(5)
    for _ in range(drawn_before):
        draw()
    states = random.getstate(), np.random.get_state(legacy=False)

    def main(comm):
        numbers = []
        for _ in range(3):
            # One rank draws at a time, and the first one not at all in the first round.
            if comm.rank or numbers:
                numbers.append(draw())
            comm.barrier()
        return [*numbers, draw()]

    first, second, third = SimWorld(3).run(main)
    random.setstate(states[0])
    np.random.set_state(states[1])
    expected = [draw() for _ in range(4)]
    assert second == third == expected
    assert first == expected[: len(first)]


def test_after_the_run_the_process_has_the_state_of_rank_0():
    np.random.seed(1)
    SimWorld(3).run(lambda comm: [np.random.rand() for _ in range(comm.rank + 1)])
    after = np.random.rand()
    np.random.seed(1)
    np.random.rand()
    assert after == np.random.rand()


def test_a_program_that_draws_nothing_keeps_no_state():
    states = []

    def main(comm):
        states.append(comm.world.process)
        comm.barrier()

    np.random.seed(2)
    random.seed(2)
    SimWorld(3).run(main)
    assert states[0].kept == {}
    assert states[0].words is not None


def test_each_draw_and_seed_changes_a_word_that_is_read_in_place():
    drawn, seed, numpy = _words()
    changes = (
        (random.random, drawn),
        (lambda: random.seed(3), seed),
        (lambda: random.seed(4), seed),
        (np.random.rand, numpy),
    )
    for change, word in changes:
        before = word.value
        change()
        assert word.value != before
    # A block of exactly 624 words leaves the counter where it was.
    np.random.seed(0)
    np.random.bytes(4)
    before = numpy.value
    np.random.bytes(4 * 624)
    assert numpy.value != before


def test_each_rank_has_its_event_loop():
    async def exchange(comm):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        received = np.zeros(1, int)
        comm.sendrecv(np.full(1, comm.rank), 1 - comm.rank, received, 1 - comm.rank)
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0)
        return received

    def main(comm):
        assert asyncio._get_running_loop() is None
        return int(asyncio.run(exchange(comm))[0])

    assert SimWorld(2).run(main) == [1, 0]
    assert asyncio._get_running_loop() is None


def test_a_rank_that_changes_the_working_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()

    def main(comm):
        if comm.rank == 1:
            os.chdir("other")

    with pytest.warns(UserWarning, match="rank 1 has changed the working directory from .* simulated ranks share it"):
        SimWorld(2).run(main)
    os.chdir(tmp_path)


def test_the_state_of_the_beginning_is_read_once_while_nothing_draws():
    np.random.seed(3)
    random.seed(3)
    assert ProcessState().beginning is ProcessState().beginning
    np.random.rand()
    assert ProcessState().beginning[1]["state"]["pos"] == np.random.get_state()[2]
