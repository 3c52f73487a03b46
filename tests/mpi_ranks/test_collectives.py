"""Collectives against what MPI says of them, on several numbers of ranks, in all three forms."""

from array import array
from collections import Counter

import numpy as np
import pytest

from minidist.core.base.errors import DeadlockError, MismatchError, UsageError
from tests.mpi_ranks.on_ranks import on_ranks

RANKS = (1, 2, 3, 5)


def in_three_forms(comm, name, *arguments):
    """Call an operation as Gather, Igather and twice as Gather_init; yields after each."""
    getattr(comm, name)(*arguments)
    yield
    getattr(comm, f"I{name[0].lower()}{name[1:]}")(*arguments).Wait()
    yield
    request = getattr(comm, f"{name}_init")(*arguments)
    for _ in range(2):
        request.Start()
        request.Wait()
        yield


def every_collective(comm, MPI):
    r, n = comm.rank, comm.size
    root = n - 1
    mine = np.array([r, 10.0 * r])
    every = np.array([[k, 10.0 * k] for k in range(n)])
    counts = [k % 3 for k in range(n)]
    starts = [4 * k for k in range(n)]
    ragged = np.full(counts[r], float(r))

    def check(name, result, expected, *arguments):
        for _ in in_three_forms(comm, name, *arguments):
            assert np.array_equal(result, expected), (name, n, r, result)
            result[...] = -1

    both, whole = np.empty(2), np.empty((n, 2))
    in_gaps = np.full(4 * n, -1.0)
    expected = in_gaps.copy()
    for k in range(n):
        expected[starts[k] : starts[k] + counts[k]] = k
    check("Allgather", whole, every, mine, whole)
    check("Allgatherv", in_gaps, expected, ragged, [in_gaps, (counts, starts), MPI.DOUBLE])
    check("Alltoall", whole, np.repeat([[r, 10.0 * r]], n, 0), every, whole)
    to_each = np.repeat(np.arange(float(n)), 2)
    check("Alltoallv", both := np.empty(2 * n), np.full(2 * n, float(r)), [to_each, [2] * n], [both, [2] * n])
    for op, right in ((MPI.SUM, every.sum(0)), (MPI.MAX, every.max(0)), (MPI.MIN, every.min(0))):
        check("Allreduce", both := np.empty(2), right, mine, both, op)
    check("Reduce_scatter_block", both := np.empty(2), n * every[r], every, both)
    check("Reduce_scatter", some := np.empty(counts[r]), np.full(counts[r], n), np.ones(sum(counts)), some, counts)
    check("Scan", both := np.empty(2), every[: r + 1].sum(0), mine, both)
    if r == root:
        check("Gather", whole, every, mine, whole, root)
        check("Scatter", both := np.empty(2), every[r], every, both, root)
        check("Reduce", both, every.prod(0), mine, both, MPI.PROD, root)
        check("Gatherv", in_gaps, expected, ragged, [in_gaps, counts, starts, MPI.DOUBLE], root)
    else:
        check("Gather", np.zeros(0), np.zeros(0), mine, None, root)
        check("Scatter", both := np.empty(2), every[r], None, both, root)
        check("Reduce", np.zeros(0), np.zeros(0), mine, None, MPI.PROD, root)
        check("Gatherv", np.zeros(0), np.zeros(0), ragged, None, root)
    for _ in in_three_forms(comm, "Bcast", data := mine.copy(), root):
        assert np.array_equal(data, every[root])
    for _ in in_three_forms(comm, "Exscan", mine, both := np.full(2, -1.0)):
        assert np.array_equal(both, every[:r].sum(0) if r else [-1, -1])
    for _ in in_three_forms(comm, "Barrier"):
        pass


def objects(comm, MPI):
    r, n = comm.rank, comm.size
    assert comm.bcast({"r": r} if r == n - 1 else None, n - 1) == {"r": n - 1}
    assert comm.allgather("x" * r) == ["x" * k for k in range(n)]
    assert comm.gather(r, n - 1) == (list(range(n)) if r == n - 1 else None)
    assert comm.scatter([k * k for k in range(n)] if r == 0 else None) == r * r
    assert comm.alltoall([(r, k) for k in range(n)]) == [(k, r) for k in range(n)]
    assert comm.allreduce([r], MPI.SUM) == list(range(n))
    assert comm.reduce((r, -r), MPI.MAXLOC, 0) == ((n - 1, 1 - n) if r == 0 else None)
    assert comm.scan(str(r), lambda a, b: a + b) == "".join(map(str, range(r + 1)))
    assert comm.exscan(1) == (r if r else None)
    comm.barrier()
    with pytest.raises(ValueError, match="expecting"):
        comm.alltoall([0] * (n + 1))


def operations(comm, MPI):
    r, n = comm.rank, comm.size
    pair = np.array([(abs(r - 1), r)], np.dtype([("value", float), ("index", "i4")], align=True))
    best = np.zeros_like(pair)
    comm.Allreduce([pair, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MINLOC)
    assert tuple(best[0]) == (min(abs(k - 1) for k in range(n)), min(1, n - 1))

    def apply(first, inout, datatype):  # x after y as 2 x 2 matrices: the order matters
        a, b = (np.frombuffer(x, float).reshape(-1, 2, 2) for x in (first, inout))
        b[...] = a @ b

    compose = MPI.Op.Create(apply, commute=False)
    matrices = [np.array([[1.0, k], [k, 2.0]]) for k in range(n)]
    out = np.empty((2, 2))
    comm.Allreduce(matrices[r], out, compose)
    assert np.array_equal(out, np.linalg.multi_dot([np.eye(2), np.eye(2), *matrices]))
    comm.Scan(matrices[r], out, compose)
    assert np.array_equal(out, np.linalg.multi_dot([np.eye(2), np.eye(2), *matrices[: r + 1]]))
    compose.Free()
    assert compose == MPI.OP_NULL
    copies = MPI.Op.Create(lambda first, inout, _: inout.__setitem__(slice(None), array("d", [7.0])))
    comm.Scan(np.ones(1), last := np.zeros(1), copies)  # a buffer takes the bytes of any other
    assert last[0] == (7 if r else 1)
    flags, some = np.array([r == 0, True]), np.empty(2, bool)
    comm.Allreduce(flags, some, MPI.LAND)
    assert some.tolist() == [n == 1, True]
    comm.Allreduce(MPI.IN_PLACE, total := np.array([r], np.int8), MPI.BXOR)
    assert total[0] == np.bitwise_xor.reduce(np.arange(n))
    last = np.array([float(r)])
    MPI.SUM.Reduce_local(np.array([2.0]), last)
    assert last[0] == r + 2


def test_every_collective_does_what_mpi_says():
    for main in (every_collective, objects, operations):
        for ranks in RANKS:
            on_ranks(ranks, main)


def test_nonblocking_collectives_do_not_block():
    """Rank 1 enters late, and only because rank 0 goes on after it has started."""

    def main(comm, MPI):
        total = np.zeros(1)
        if comm.rank:
            comm.recv(source=0)
        request = comm.Iallreduce(np.ones(1), total)
        if comm.rank == 0:
            assert not request.Test()
            comm.send(None, 1)
        comm.Barrier()  # an operation of the same communicator in between
        request.Wait()
        assert total[0] == 2

    on_ranks(2, main)


def test_collectives_that_differ_are_named(capfd):
    def run(*calls):
        return on_ranks(len(calls), lambda comm, MPI: calls[comm.rank](comm, MPI))

    one, two = np.ones(1), np.ones(2)
    for found, *calls in (
        ("operation mismatch.* Bcast .* Barrier", lambda c, m: c.Bcast(one), lambda c, m: c.Barrier()),
        ("roots differ", lambda c, m: c.Bcast(one, 0), lambda c, m: c.Bcast(one, 1)),
        ("reduction mismatch", lambda c, m: c.Allreduce(one, two[:1]), lambda c, m: c.Allreduce(one, two[:1], m.MAX)),
        ("shape mismatch", lambda c, m: c.Bcast(one), lambda c, m: c.Bcast(two)),
        ("dtype mismatch", lambda c, m: c.Bcast(one), lambda c, m: c.Bcast(np.ones(1, "f"))),
        ("sends float64 and receives float32", lambda c, m: c.Allgather(one, np.ones(1, "f"))),
        ("sends 2 elements as its own part, .* room for 1 ", *[lambda c, m: c.Gather(two, np.ones(2))] * 2),
        ("sends 2 elements as its own part, .* room for 1 ", *[lambda c, m: c.Allgather(two, np.ones(2))] * 2),
        ("sends 2 elements as its own part, .* room for 1 ", *[lambda c, m: c.Scatter(np.ones(4), one)] * 2),
        ("sends 2 elements as its own part, .* room for 1 ", *[lambda c, m: c.Alltoall(np.ones(4), two)] * 2),
    ):
        with pytest.raises((MismatchError, DeadlockError), match=found) as error:
            run(*calls)
        assert found.startswith("sends") or "test_collectives.py" in str(error.value)
    # What a rank prints is not shown after the first difference: it goes on with zeros.
    out = capfd.readouterr().out
    with pytest.raises(MismatchError):
        run(lambda c, m: print("before", c.Bcast(two)), lambda c, m: (print("before"), c.bcast(two), print("after")))
    assert (capfd.readouterr().out, out) == ("before\n", "")
    with pytest.raises(DeadlockError, match=r"rank 1 has returned"):
        run(lambda c, m: c.Barrier(), lambda c, m: None)
    with pytest.raises(UsageError, match=r"Comm_spawn|Spawn is not simulated by minidist mpi.*, at \S+test_coll"):
        run(lambda c, m: c.Spawn("worker"))


def test_bytes_are_those_of_the_algorithms():
    def main(comm, MPI):
        comm.Allreduce(np.ones(30), np.empty(30))
        comm.Gather(np.ones(5), np.empty((comm.size, 5)) if comm.rank == 0 else None)

    world = on_ranks(3, main).world
    sent = Counter()
    for trace in world.traces:
        for message in trace.sent():
            sent[message.operation] += message.nbytes
    assert sent == {"Allreduce SUM": 3 * 2 * 2 * 80, "Gather": 2 * 40}


def test_a_program_may_derive_a_class_from_a_topology():
    def main(world, MPI):
        class Named(MPI.Cartcomm):
            name = "grid"

        made = world.Create_cart([world.size])
        grid = Named(made)
        assert type(made) is MPI.Cartcomm  # Create_cart still makes the class of mpi4py
        assert (grid.name, grid.dims, grid.coords) == ("grid", [world.size], [world.rank])
        with pytest.raises(TypeError, match="no such topology"):
            Named(world.Create_graph([1, 2], [1, 0]))

    on_ranks(2, main)


def test_neighbors_in_grids_and_graphs():
    def main(world, MPI):
        grid = world.Create_cart([2, 3], periods=[True, False])
        row, column = grid.coords
        assert grid.Get_cart_rank([row, column]) == grid.rank == 3 * row + column
        assert repr(grid.topo) == f"([2, 3], [1, 0], {grid.coords})"
        assert grid.topo[1] == grid.periods
        left, right = grid.Shift(1, 1)
        other = grid.Get_cart_rank([1 - row, column])
        assert (left == MPI.PROC_NULL, right == MPI.PROC_NULL) == (column == 0, column == 2)
        assert grid.inedges == [other, other, left, right]
        # Both neighbors along the first axis are one rank: each side gets what was sent to it.
        sides = np.array([grid.rank * 10.0 + side for side in range(4)])
        into = np.full(4, -1.0)
        for _ in in_three_forms(grid, "Neighbor_alltoall", sides, into):
            assert into[:2].tolist() == [other * 10 + 1, other * 10]
            assert into[2] == (-1 if column == 0 else left * 10 + 3)
            assert into[3] == (-1 if column == 2 else right * 10 + 2)
        line = grid.Sub([False, True])
        assert (line.size, line.dims, line.coords) == (3, [3], [column])
        assert line.Shift(0, 1) == (
            column - 1 if column else MPI.PROC_NULL,
            column + 1 if column < 2 else MPI.PROC_NULL,
        )
        ring = world.Create_dist_graph([world.rank], [1], [(world.rank + 1) % world.size], [7])
        assert ring.inedges == [(world.rank - 1) % world.size]
        assert ring.Get_dist_neighbors()[2] == ([7], [7])
        assert ring.neighbor_allgather(world.rank) == ring.inedges
        star = world.Create_graph([5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 0, 0, 0, 0, 0])
        assert star.neighbor_alltoall([world.rank] * star.outdegree) == star.neighbors
        assert MPI.Compute_dims(12, 2) == [4, 3]
        assert MPI.Compute_dims(12, [0, 6]) == [2, 6]
        with pytest.raises(TypeError):
            MPI.Cartcomm(ring)
        assert world.Create_cart([4]) == MPI.COMM_NULL or world.rank < 4

    on_ranks(6, main)
