"""Two-level collectives: right sums for any colouring, and on the slow links only what the formula says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import collectives
from minidist.base.errors import MismatchError, UsageError
from minidist.collectives import TwoLevel, closed_form
from minidist.comm import LinkModel, SimWorld
from minidist.comm.mesh import init_device_mesh
from tests.collectives.cases import OPS, UFUNCS, primes

FAST, SLOW = (2.0**-20, 2.0**-30), (2.0**-10, 2.0**-20)


def inputs(ranks, size):
    """Integer values in float64: sums are exact in any order. Products stay below 2^53."""
    return [primes((rank + 1) * size + 1)[rank * size : (rank + 1) * size].astype(np.float64) for rank in range(ranks)]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(0, 9),
    st.sampled_from(OPS),
    st.booleans(),
    st.data(),
)
def test_values_for_any_colouring(colors, size, op, async_op, data):
    n = len(colors)
    root, eager = data.draw(st.integers(0, n - 1)), data.draw(st.sampled_from([0, 1 << 20]))
    arrays = [array % 17 + 2 if op == "prod" else array for array in inputs(n, size)]

    def program(comm):
        levels = TwoLevel(comm, colors[comm.rank])
        mine, other = arrays[comm.rank].copy(), arrays[comm.rank].copy()
        first, second = levels.all_reduce(mine, op, async_op=async_op), levels.broadcast(other, root, async_op=async_op)
        if async_op:
            first, second = first.wait(), second.wait()
        assert first is mine
        assert second is other
        return mine, other

    expected = arrays[0]
    for array in arrays[1:]:
        expected = UFUNCS[op](expected, array)
    expected = expected / n if op == "avg" else expected
    for total, copy in SimWorld(n, eager_bytes=eager).run(program):
        assert np.array_equal(total, expected)
        assert np.array_equal(copy, arrays[root])


def on_mesh(comm, size, shape):
    """Nodes are the rows of a mesh. A DDP bucket would be reduced so."""
    mesh = init_device_mesh(comm, shape, ("node", "local"))
    levels = TwoLevel(comm, mesh.get_local_rank("node"))
    comm.barrier()
    array = np.arange(size) + 1000.0 * comm.rank
    before = len(comm.trace.messages), comm.time()
    levels.all_reduce(array)
    return array, before[0], comm.time() - before[1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize("size", [0, 1, 5, 11, 96])
def test_traffic_inside_and_across(shape, size):
    nodes, local = shape
    world = SimWorld(nodes * local)
    for rank, (array, start, _) in enumerate(world.run(on_mesh, size, shape)):
        assert np.array_equal(array, world.size * np.arange(size) + 1000.0 * sum(range(world.size)))
        sent = [m for m in world.traces[rank].messages[start:] if m.kind == "send"]
        inside = [m for m in sent if m.peer // local == rank // local]
        across = [m for m in sent if m.peer // local != rank // local]
        volumes = closed_form.two_level_all_reduce(size, nodes, local, rank // local, rank % local)
        for messages, (count, elements) in zip((inside, across), volumes, strict=True):
            assert (len(messages), sum(m.nbytes for m in messages)) == (count, 8 * elements)
        if size == 96:  # divides: 2 (M-1)/M of N/L across, 2 (L-1)/L of N inside
            assert sum(m.nbytes for m in across) == 2 * (nodes - 1) * 8 * 96 // local // nodes
            assert sum(m.nbytes for m in inside) == 2 * (local - 1) * 8 * 96 // local


def test_time_on_links_that_differ():
    nodes, local, size = 4, 4, 64
    links = LinkModel(link=lambda a, b: FAST if a // local == b // local else SLOW)
    seconds = closed_form.two_level_time(8 * size, nodes, local, FAST, SLOW)

    def program(comm):
        levels = TwoLevel(comm, comm.rank // local)
        comm.compute(seconds=1.0 - comm.time())  # so that all ranks begin at once
        levels.all_reduce(np.ones(size))
        return comm.time() - 1.0

    two_level = SimWorld(nodes * local, links=links).run(program)
    assert max(two_level) == pytest.approx(seconds, rel=1e-12)
    flat = SimWorld(nodes * local, links=links)
    flat.run(lambda comm: collectives.all_reduce(comm, np.ones(size)))
    assert flat.end_time > 2 * seconds


BAD = {
    "color": (lambda c: TwoLevel(c, -1), "rank 0: a node needs a color of at least 0, got -1"),
    "root": (lambda c: TwoLevel(c, 0).broadcast(np.ones(2), 2), "ranks are 0..1"),
    "op": (lambda c: TwoLevel(c, 0).all_reduce(np.ones(2), "add"), "one of sum"),
    "strides": (lambda c: TwoLevel(c, 0).all_reduce(np.ones(4)[::2]), "strides"),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_arguments(what):
    with pytest.raises(UsageError, match=BAD[what][1]):
        SimWorld(2).run(BAD[what][0])


def test_ranks_that_disagree_are_told():
    def program(comm):
        TwoLevel(comm, 0).all_reduce(np.ones(4 + comm.rank))

    with pytest.raises(MismatchError, match="two_level"):
        SimWorld(2).run(program)
