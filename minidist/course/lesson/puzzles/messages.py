"""The row of messages: m01 to m20.

Proved by: tests/lesson/test_puzzles.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.core.base.errors import BufferReuseError, DeadlockError, MismatchError, UnmatchedMessageError, UsageError
from minidist.course.lesson.exercise import Case, Hint, Least, returns, summed
from minidist.course.lesson.exercises import (
    e00_start_here,
    e03_ring_exchange,
    e04_ring_all_reduce,
    e05_latency_or_bandwidth,
)
from minidist.course.lesson.puzzles import MESSAGES, Puzzle, above, of_lesson, puzzle, raises, too_few

NOTE = (
    "This is rank comm.rank of comm.size; comm.send(array, to) and comm.recv(array, source) wait for each other, and an"
    " element has 8 B."
)
WAITS = (DeadlockError, UnmatchedMessageError)


def data(case: Case, rank: int) -> np.ndarray:
    """Return 10 r + 1, 10 r + 2, ...: the numbers show from which rank they came."""
    return 10.0 * rank + 1 + np.arange(case.size)


def own(case: Case, rank: int) -> tuple[np.ndarray]:
    """Return what a rank gets: its array."""
    return (data(case, rank),)


def table_of(case: Case, rank: int) -> tuple[np.ndarray]:
    """Return the rows of all ranks on rank 0, and zeros elsewhere."""
    rows = np.array([data(case, other) for other in range(case.ranks)])
    return (rows if rank == 0 else np.zeros_like(rows),)


def from_rank(source: Callable[[int, int], int]) -> Callable[[Case], Sequence[np.ndarray]]:
    """Return answers: the array of rank `source(rank, ranks)` on each rank."""
    return lambda case: [data(case, source(rank, case.ranks)) for rank in range(case.ranks)]


def each_number(messages: Callable[[Case], int], part: int = 1) -> Callable[[Case], Least]:
    """Return the least of so many messages, each with a rank's array or 1/part of it."""
    return lambda case: Least(messages(case), 8 * messages(case) * (case.size // part))


def sums(case: Case) -> list[np.ndarray]:
    """Return the sum of the arrays of ranks 0 to r, for each rank r."""
    return list(np.cumsum([data(case, rank) for rank in range(case.ranks)], axis=0))


def half_of_rank_0(case: Case) -> list[np.ndarray]:
    """Return the arrays of two ranks, with the first half of rank 0's at the beginning of both."""
    first, second = data(case, 0), data(case, 1)
    return [first, np.concatenate([first[: case.size // 2], second[case.size // 2 :]])]


def rows(case: Case, *from_first: int) -> np.ndarray:
    """Return all rows as a table; those of the ranks `from_first` are filled, or all."""
    (table,) = table_of(case, 0)
    kept = list(from_first or range(case.ranks))
    return np.where(np.isin(np.arange(case.ranks), kept)[:, None], table, 0.0)


others = each_number(lambda case: case.ranks - 1)
everyone = from_rank(lambda rank, n: 0)
swapped = from_rank(lambda rank, n: 1 - rank)
unchanged = from_rank(lambda rank, n: rank)
PAIR = (Case(2, 1), Case(2, 3))
FEW = (Case(2, 1), Case(3, 2), Case(4, 3))
NOT_X = raises(BufferReuseError, "x is still on its way out: receive into `incoming`")


def message(
    text: str,
    cases: Sequence[Case],
    expected: Callable[[Case], Sequence[Any]],
    least: Callable[[Case], Least],
    *hints: Hint,
    **more: Any,
) -> Puzzle:
    """Return a puzzle whose ranks get an array each, with its messages and their bytes as the target."""
    more = {"arguments": own, "limits": MESSAGES, **more}
    return puzzle(text, cases, *hints, note=NOTE, expected=expected, least=least, **more)


PUZZLES = [
    message(
        """
        m01 One number
        Rank 0 has the right array. Send it to rank 1, so that both return it.

        def one_number(comm, x):
            if comm.rank == 0:
                ____
            if comm.rank == 1:
                ____
            return x
        """,
        PAIR,
        everyone,
        others,
        returns(from_rank(lambda rank, n: 1), "it travels the wrong way: rank 0 sends to 1, rank 1 receives from 0"),
        raises(WAITS, "a message needs both: comm.send(x, to) on one rank and comm.recv(x, source) on the other"),
    ),
    message(
        """
        m02 There and back
        Rank 0 sends its array to rank 1, which doubles it. Bring the result back: both return it.

        def there_and_back(comm, x):
            if comm.rank == 0:
                comm.send(x, 1)
                ____
            else:
                comm.recv(x, 0)
                x *= 2
                ____
            return x
        """,
        PAIR,
        lambda case: [2 * data(case, 0)] * 2,
        each_number(lambda case: 2),
        too_few("rank 0 computes it again: what rank 1 has computed must come back in a message"),
        raises(WAITS, "rank 0 receives once, and rank 1 sends once: each of the two lines needs the other"),
    ),
    message(
        """
        m03 Swap without a deadlock
        Two ranks exchange their arrays. If both send first, both wait for ever.

        def swap(comm, x):
            other, incoming = 1 - comm.rank, np.empty_like(x)
            if comm.rank == 0:
                comm.send(x, other)
                comm.recv(incoming, other)
            else:
                ____
                ____
            return incoming
        """,
        PAIR,
        swapped,
        each_number(lambda case: 2),
        returns(lambda case: [data(case, 0)] * 2, "rank 0 gets its own numbers back: rank 1 sends x"),
        raises(DeadlockError, "one of the two must receive first; here it is rank 1"),
    ),
    message(
        """
        m04 Swap in one call
        comm.sendrecv(outgoing, to, incoming, source) does both at once, so that no rank has to be the first.

        def swap_at_once(comm, x):
            other, incoming = 1 - comm.rank, np.empty_like(x)
            ____
            return incoming
        """,
        PAIR,
        swapped,
        each_number(lambda case: 2),
        NOT_X,
        raises(DeadlockError, "the partner of each rank, for both directions, is `other`"),
        forbidden=("send", "recv", "isend", "irecv"),
    ),
    message(
        """
        m05 Start both, then wait
        comm.isend and comm.irecv return a request at once. Start one of each; the last line waits for both.

        def swap_with_requests(comm, x):
            other, incoming = 1 - comm.rank, np.empty_like(x)
            receive = ____
            send = ____
            comm.waitall([receive, send])
            return incoming
        """,
        PAIR,
        swapped,
        each_number(lambda case: 2),
        NOT_X,
        raises(DeadlockError, "send and recv wait where they stand; isend and irecv only start"),
    ),
    message(
        """
        m06 Half of it
        Rank 0 sends the first half of its array, and rank 1 keeps its own second half. A slice of an array is a
        buffer.

        def first_half(comm, x):
            half = x.size // 2
            if comm.rank == 0:
                ____
            else:
                ____
            return x
        """,
        (Case(2, 2), Case(2, 6)),
        half_of_rank_0,
        each_number(lambda case: 1, part=2),
        returns(everyone, "rank 1 has lost its second half: send and receive x[:half]"),
        raises(MismatchError, "both sides of a message have one size: x[:half] on rank 0 and x[:half] on rank 1"),
    ),
    message(
        """
        m07 Down the chain
        Rank 0 has the right array, and each rank speaks with its neighbours only. All return rank 0's array.

        def down_the_chain(comm, x):
            if comm.rank > 0:
                ____
            if comm.rank < comm.size - 1:
                ____
            return x
        """,
        FEW,
        everyone,
        others,
        returns(unchanged, "x is what it was: receive into x, and send it on"),
        raises(WAITS, "a rank receives from rank - 1, and sends to rank + 1"),
    ),
    message(
        """
        m08 One row for each
        Rank 0 has a table with one row per rank. Send every rank its row, and no more.

        def one_row_for_each(comm, table):
            if comm.rank == 0:
                for other in range(1, comm.size):
                    ____
                return table[0]
            row = np.empty(table.shape[1])
            ____
            return row
        """,
        FEW,
        unchanged,
        others,
        returns(everyone, "every rank gets row 0: the row for rank `other` is table[other]"),
        raises(MismatchError, "a rank expects one row: send table[other] instead of the whole table"),
        arguments=table_of,
    ),
    message(
        """
        m09 All rows on rank 0
        Rank 0 collects the arrays of all ranks as the rows of a table. The other ranks return their own array.

        def all_rows_on_rank_0(comm, x):
            if comm.rank > 0:
                ____
                return x
            table = np.zeros((comm.size, x.size))
            table[0] = x
            for other in range(1, comm.size):
                ____
            return table
        """,
        FEW,
        lambda case: [rows(case), *unchanged(case)[1:]],
        others,
        returns(lambda case: [rows(case, 0), *unchanged(case)[1:]], "the rows stay zero: receive into table[other]"),
        raises(WAITS, "each rank but 0 sends once, to rank 0, which receives from each of them"),
    ),
    message(
        """
        m10 A running sum
        Rank r returns the sum of the arrays of ranks 0 to r. Each rank adds its array to what arrives, and passes
        it on.

        def running_sum(comm, x):
            if comm.rank > 0:
                before = np.empty_like(x)
                ____
                ____
            if comm.rank < comm.size - 1:
                comm.send(x, comm.rank + 1)
            return x
        """,
        FEW,
        sums,
        others,
        returns(everyone, "x is replaced by what has arrived: add it, x += before"),
        returns(unchanged, "what has arrived is not used: x += before"),
        raises(WAITS, "the sum comes from the neighbour, rank - 1"),
    ),
    message(
        """
        m11 Two to the right
        On a ring, every rank sends its array to the rank that is two places to its right, and returns what it
        receives.

        def two_to_the_right(comm, x):
            incoming = np.empty_like(x)
            ____
            return incoming
        """,
        (Case(3, 1), Case(4, 2), Case(5, 3)),
        from_rank(lambda rank, n: (rank - 2) % n),
        each_number(lambda case: case.ranks),
        returns(from_rank(lambda rank, n: (rank + 2) % n), "it travels to the left: send to rank + 2"),
        returns(unchanged, "these are the rank's own numbers: return what has arrived"),
        raises(UsageError, "the ring closes with % comm.size, on both sides"),
        raises(DeadlockError, "every rank sends at once: use comm.sendrecv"),
        limits=(*MESSAGES, "time"),
    ),
    message(
        """
        m12 Whoever comes first
        Rank 0 adds the arrays of all ranks. Rank 1 is the last to be ready: do not wait for it while others are
        there. comm.recv(x, ANY) takes the first message that comes, from any rank.

        from minidist.core.comm import ANY


        def as_they_come(comm, x):
            total = x.copy()
            if comm.rank == 0:
                for other in range(1, comm.size):
                    ____
                    total += x
            else:
                comm.compute(seconds=1e-6 * (comm.size - comm.rank))
                ____
            return total
        """,
        (Case(2, 1), Case(3, 2), Case(5, 3)),
        lambda case: [sums(case)[-1], *unchanged(case)[1:]],
        lambda case: summed(case.ranks, 1, case.size),
        above("time", "rank 0 waits for rank 1 while the others wait for rank 0: receive from ANY"),
        raises(WAITS, "every rank but 0 sends once, to rank 0"),
        limits=(*MESSAGES, "time"),
    ),
    message(
        """
        m13 Everyone has everything
        In each step a rank sends one row to the right, and receives another one from the left: after n - 1 steps
        every rank has the whole table. It begins with its own row, and then passes on what it has just received.

        def everyone_has_everything(comm, x):
            n, rank = comm.size, comm.rank
            table = np.zeros((n, x.size))
            table[rank] = x
            for step in range(n - 1):
                leaving, arriving = ____, ____
                comm.sendrecv(table[leaving], (rank + 1) % n, table[arriving], (rank - 1) % n)
            return table
        """,
        FEW,
        lambda case: [rows(case)] * case.ranks,
        each_number(lambda case: case.ranks * (case.ranks - 1)),
        returns(
            lambda case: [rows(case, rank, (rank - 1) % case.ranks) for rank in range(case.ranks)],
            "the same two rows travel in each step: subtract the step, and close the ring with % n",
        ),
        Hint(
            lambda failure: "expected" in failure.message or failure.raised(BufferReuseError),
            "the row that arrives is the one that left rank - 1: with rank - step here, rank - 1 - step",
        ),
    ),
    message(
        """
        m14 A tree
        All return rank 0's array. In step 1, 2, 4, ... each rank that has it sends it to the rank at this distance,
        so that no rank sends more than log2 n messages, rounded up.

        def tree(comm, x):
            distance = 1
            while distance < comm.size:
                if comm.rank < distance and comm.rank + distance < comm.size:
                    ____
                elif distance <= comm.rank < 2 * distance:
                    ____
                distance *= 2
            return x
        """,
        (Case(2, 1), Case(5, 2), Case(8, 3)),
        everyone,
        others,
        raises((UsageError, *WAITS), "a rank below `distance` sends to rank + distance, which receives from it"),
        limits=(*MESSAGES, "time"),
    ),
    message(
        """
        m15 The largest, everywhere
        n is a power of two. In step 1, 2, 4, ... each rank exchanges arrays with the rank whose number differs in
        this bit, and keeps the larger number of each pair. All return the largest numbers of all ranks.

        def largest_everywhere(comm, x):
            incoming = np.empty_like(x)
            distance = 1
            while distance < comm.size:
                partner = ____
                comm.sendrecv(x, partner, incoming, partner)
                ____
                distance *= 2
            return x
        """,
        (Case(2, 1), Case(4, 2), Case(8, 3)),
        from_rank(lambda rank, n: n - 1),
        lambda case: summed(case.ranks, case.ranks, case.size),
        returns(lambda case: [sums(case)[-1]] * case.ranks, "this is the sum: np.maximum(x, incoming, out=x)"),
        raises((UsageError, *WAITS), "partners name each other: rank ^ distance changes one bit, in both ranks"),
    ),
    of_lesson(
        """
        m16 In rank order
        in_rank_order(comm, say)
        Every rank calls say("...") once: rank 0 first, then rank 1, and none before the one before it has finished.
        """,
        e00_start_here.EXERCISES[0],
    ),
    of_lesson(
        """
        m17 Round the ring by order
        by_order(comm, outgoing)
        Send `outgoing` to the right, and return what comes from the left, for any n, with comm.send and comm.recv
        only.
        """,
        e03_ring_exchange.EXERCISES[0],
    ),
    of_lesson(
        """
        m18 Round the ring by requests
        by_requests(comm, outgoing)
        The same with comm.isend, comm.irecv and comm.waitall only.
        """,
        e03_ring_exchange.EXERCISES[2],
    ),
    of_lesson(
        """
        m19 Ring all-reduce
        ring_all_reduce(comm, array)
        Sum `array` over all ranks in place, for any n and any size, with comm.sendrecv only: no rank may send more
        than 2 (n-1)/n of it.
        """,
        e04_ring_all_reduce.EXERCISES[0],
    ),
    of_lesson(
        """
        m20 Halving and doubling
        halving_doubling(comm, array)
        The same sum with 2 log2 n messages per rank, for any n: ranks beyond a power of two send their array to
        another rank, and receive the sum.
        """,
        e05_latency_or_bandwidth.EXERCISES[0],
    ),
]
EXERCISES = [item.exercise for item in PUZZLES if item.exercise.name.startswith("puzzle.")]
