"""Communicators that the ranks of an MPI job make unlike: one sentence with both, at once; none waits for ever."""

import re

import pytest


def test_a_rank_that_has_made_it_and_gone_on_is_named_by_the_report(run):
    """A group of one rank waits for nobody, so the others wait for a claim that never comes."""
    program = """
def main(comm):
    comm.group([0] if comm.rank == 0 else [0, 1, 2], "part")
    comm.barrier()
"""
    output = run(program, 3, "--timeout", "1", code=1)
    assert re.search(
        r"hint: members differ: rank 0 makes the communicator world\.1part of the world's ranks \[0\], but rank [12]"
        r" makes it of \[0, 1, 2\], at program.py:",
        output,
    ), output


def test_a_claim_that_comes_late_is_told_by_the_rank_that_went_on(run):
    """Rank 1 makes its pair with rank 2 and is done; rank 0's claim is still in its queue."""
    program = """
def main(comm):
    if comm.rank == 0:
        time.sleep(0.5)
    comm.group([[0, 1], [1, 2], [1, 2]][comm.rank], "pair")
    if comm.rank:
        time.sleep(1)
        comm.group([1, 2], "again")
"""
    output = run(program, 3, code=1)
    assert re.search(
        r"members differ: rank 0 makes the communicator world\.1pair of the world's ranks \[0, 1\], but rank 1 makes"
        r" it of \[1, 2\], at program.py:",
        output,
    ), output


@pytest.mark.mpi(3)
def test_ranks_that_are_ahead_are_not_mistaken(comm):
    """Claims of a communicator that a rank has not made yet wait for it."""
    pairs = []
    if comm.rank != 2:
        pairs.append(comm.group([0, 1], "first"))
    else:
        comm._children += 1
    pairs += [comm.group([2, 0, 1], "second"), comm.dup(), comm.split(comm.rank % 2), comm.dup()]
    for part in pairs:
        part.barrier()
