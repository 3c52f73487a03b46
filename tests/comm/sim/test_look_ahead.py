"""What a report says of the calls after the first difference, and that nothing a program does then leaves a trace."""

import re
import traceback

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.sim import look_ahead
from minidist.core.base.errors import MismatchError
from minidist.core.collectives import all_gather, all_reduce, broadcast
from minidist.core.comm import ANY


def reduce_all(comm, sizes, **options):
    for size in sizes:
        all_reduce(comm, np.ones(size), **options)


def shorter_on_rank_2(comm):
    reduce_all(comm, [5 if comm.rank == 2 else 8])


def other_root_on_rank_2(comm):
    broadcast(comm, np.ones(4), root=2 if comm.rank == 2 else 0)


def rank_3_returns(comm):
    if comm.rank != 3:
        other_root_on_rank_2(comm)


def rank_1_skips(comm):
    for step in range(3):
        reduce_all(comm, [8, 16] if comm.rank == 1 and step == 1 else [128, 8, 16])


def rank_0_alone_enters_the_barrier(comm):
    if comm.rank == 0:
        comm.barrier()
    reduce_all(comm, [3, 2])


def rank_1_exchanges_two(comm):
    reduce_all(comm, [2, 4] if comm.rank == 1 else [4, 2])


def rank_1_begins_with_the_last(comm):
    works = [all_reduce(comm, np.ones(n), async_op=True) for n in ([4, 2, 3, 7] if comm.rank == 1 else [2, 3, 4, 7])]
    for work in works:
        work.wait()


def two_that_take_turns(comm):
    reduce_all(comm, ([2, 3] * 6)[comm.rank == 1 :])


def rank_3_skips_a_gather(comm):
    # Rank 1 comes late, so that rank 0 waits in a sendrecv with both messages in flight.
    if comm.rank in (1, 2):
        comm.sendrecv(np.ones(1), 3 - comm.rank, np.ones(1), 3 - comm.rank)
    if comm.rank != 3:
        all_gather(comm, np.ones(16))
    broadcast(comm, np.ones(300), root=2, algorithm="segmented_ring")


def one_more_on_rank_1_of_a_gather(comm):
    all_gather(comm, np.ones(4 + (comm.rank == 1)))


SAID = {
    shorter_on_rank_2: r"shape mismatch: call 0 of world is all_reduce of float64\[8\] on ranks 0, 1, 3 and of"
    r" float64\[5\] on rank 2, at \S*:\d+; every rank must pass an array of the same shape$",
    other_root_on_rank_2: r"roots differ: .*root 0 on ranks 0, 1, 3 and broadcast/naive root 2 on rank 2, at",
    rank_3_returns: r"roots differ: .*root 0 on ranks 0, 1 and .*root 2 on rank 2, at \S*; rank 3 made no such call;",
    rank_1_skips: r"call 3 of world is .*\[128\] on ranks 0, 2, 3 and of float64\[8\] on rank 1, at \S*; rank 1 made"
    r" no call like call 3 of rank 0, and its later calls are rank 0's, one earlier; every",
    rank_0_alone_enters_the_barrier: r"operation mismatch: .*barrier on rank 0 at .*; ranks 1, 2, 3 made no call like"
    " call 0 of rank 0, and their later calls are rank 0's, one earlier; every",
    rank_1_exchanges_two: r"on rank 1, at \S*; rank 1 makes calls 0 and 1 in the other order; every",
    rank_1_begins_with_the_last: r"on rank 1, at \S*; rank 1 makes calls 0 to 2 in another order; every",
    two_that_take_turns: "; rank 1 makes calls 0 and 1 in the other order, or rank 1 made no call like call 0 of",
    rank_3_skips_a_gather: "rank 3 made no call like call 0 of rank 0, and its later calls are rank 0's, one earlier",
    one_more_on_rank_1_of_a_gather: r"all_gather of float64\[4\] on ranks 0, 2, 3 and of float64\[5\] on rank 1, at",
}


@pytest.mark.parametrize("eager_bytes", [0, 1024])
def test_all_ranks_that_differ_are_named_and_who_has_skipped_a_call(eager_bytes):
    for program, words in SAID.items():
        with pytest.raises(MismatchError) as raised:
            SimWorld(4, eager_bytes=eager_bytes).run(program)
        assert re.search(words, str(raised.value)), (program.__name__, str(raised.value))
        if program is not rank_1_begins_with_the_last:  # whose calls run on a stream
            stack = [step.name for step in traceback.extract_tb(raised.value.__traceback__)]
            assert program.__name__ in stack, "the stack of the rank that has noticed it"


def test_a_program_leaves_no_trace_while_the_world_looks_ahead(tmp_path, capsys, monkeypatch):
    """It prints, writes a file, receives what it takes for a size, and goes on for ever."""
    monkeypatch.setattr(look_ahead, "SECONDS", 0.1)
    reached, kept = [], tmp_path / "kept"
    kept.write_text("before")

    def program(comm):
        reduce_all(comm, [5 if comm.rank == 1 else 8])
        print("after the difference")
        reached.append(comm.rank)
        length = np.full(1, 10**15)
        comm.recv(length, ANY)
        np.empty(int(length[0]))
        while comm.rank == 2:
            comm.sendrecv(np.ones(1), 0, length, 0)
        kept.write_text("after")

    with pytest.raises(MismatchError, match="shape mismatch: call 0"):
        SimWorld(3).run(program)
    assert sorted(reached) == [0, 1, 2]
    assert kept.read_text() == "before"
    assert "after" not in "".join(capsys.readouterr())
    (tmp_path / "another").write_text("files can be opened again")
