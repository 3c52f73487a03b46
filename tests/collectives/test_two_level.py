"""Two-level collectives: right sums for any colouring, and on the slow links only what the formula says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.collectives import TwoLevel
from minidist.collectives.auto import virtual_seconds
from minidist.collectives.two_level import sends_inside_and_across, two_level_seconds
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core import collectives
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.base.layout import chunk_sizes
from minidist.core.comm.mesh import init_device_mesh
from tests.cases import each
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
    """Every operation, nodes of any size in any place, ragged counts."""
    n = len(colors)
    root, eager = data.draw(st.integers(0, n - 1)), data.draw(st.sampled_from([0, 1 << 20]))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=n - 1, max_size=n - 1)))
    check_values(colors, size, op, async_op, root, eager, cuts)


@each("op", OPS)
@each("colors", [(0, 1, 1), (2, 0, 2, 0, 2), (0, 1, 1, 0)], ids=str)
def test_values_of_every_operation_on_equal_and_unequal_nodes(colors, op):
    """What a draw may miss: each operation with data in every chunk."""
    n = len(colors)
    check_values(colors, 2 * n + 1, op, False, n - 1, 0, [2 * rank + 1 for rank in range(1, n)])


def check_values(colors, size, op, async_op, root, eager, cuts):
    n = len(colors)
    counts = np.diff([0, *cuts, size]).tolist()
    start = [0, *cuts, size]
    arrays = [array % 17 + 2 if op == "prod" else array for array in inputs(n, size)]

    def program(comm):
        levels, mine = TwoLevel(comm, colors[comm.rank]), arrays[comm.rank]
        summed, copy = mine.copy(), mine.copy()
        results = [
            levels.all_reduce(summed, op, async_op=async_op),
            levels.broadcast(copy, root, async_op=async_op),
            levels.reduce(mine, root, op, async_op=async_op),
            levels.reduce_scatter(mine, op, counts=counts, async_op=async_op),
            levels.all_gather(mine[: counts[comm.rank]], counts=counts, async_op=async_op),
            levels.barrier(async_op=async_op),
        ]
        if async_op:
            results = [work.wait() for work in results]
        assert results[0] is summed
        assert results[1] is copy
        assert np.array_equal(mine, arrays[comm.rank])
        return results

    expected = arrays[0]
    for array in arrays[1:]:
        expected = UFUNCS[op](expected, array)
    expected = expected / n if op == "avg" else expected
    gathered = np.concatenate([arrays[r][: counts[r]] for r in range(n)])
    for rank, (total, copy, reduced, chunk, whole, _) in enumerate(SimWorld(n, eager_bytes=eager).run(program)):
        assert np.array_equal(total, expected)
        assert np.array_equal(copy, arrays[root])
        assert (reduced is None) == (rank != root)
        assert reduced is None or np.array_equal(reduced, expected)
        assert np.array_equal(chunk, expected[start[rank] : start[rank + 1]])
        assert np.array_equal(whole, gathered)


def on_mesh(comm, size, shape):
    """Nodes are the rows of a mesh. A DDP bucket would be reduced so."""
    mesh = init_device_mesh(comm, shape, ("node", "local"))
    levels = TwoLevel(comm, mesh.get_local_rank("node"))
    comm.barrier()
    array = np.arange(size) + 1000.0 * comm.rank
    before = len(comm.trace.messages), comm.time()
    levels.all_reduce(array)
    return array, before[0], comm.time() - before[1]


@each("shape", [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (4, 4)])
@each("size", [0, 1, 5, 11, 96])
def test_traffic_inside_and_across(shape, size):
    nodes, local = shape
    world = SimWorld(nodes * local)
    for rank, (array, start, _) in enumerate(world.run(on_mesh, size, shape)):
        assert np.array_equal(array, world.size * np.arange(size) + 1000.0 * sum(range(world.size)))
        sent = [m for m in world.traces[rank].messages[start:] if m.kind == "send"]
        inside = [m for m in sent if m.peer // local == rank // local]
        across = [m for m in sent if m.peer // local != rank // local]
        parts = [chunk_sizes(part, nodes) for part in chunk_sizes(size, local)]
        sizes = [[part[node] for part in parts] for node in range(nodes)]
        volumes = sends_inside_and_across("all_reduce", sizes, rank // local, rank % local)
        for messages, (count, elements) in zip((inside, across), volumes, strict=True):
            assert (len(messages), sum(m.nbytes for m in messages)) == (count, 8 * elements)
        if size == 96:  # divides: 2 (M-1)/M of N/L across, 2 (L-1)/L of N inside
            assert sum(m.nbytes for m in across) == 2 * (nodes - 1) * 8 * 96 // local // nodes
            assert sum(m.nbytes for m in inside) == 2 * (local - 1) * 8 * 96 // local


def sent_by(world, colors, before):
    """For each rank (messages, bytes) that stayed in its node, and that left it, since message number `before`."""
    result = []
    for rank, trace in enumerate(world.traces):
        sent = [m for m in trace.messages[before[rank] :] if m.kind == "send"]
        sides = [[m for m in sent if (colors[m.peer] == colors[rank]) == inside] for inside in (True, False)]
        result.append(tuple((len(side), sum(m.nbytes for m in side)) for side in sides))
    return result


def call(comm, colors, operation, *arguments, **options):
    levels = TwoLevel(comm, colors[comm.rank])
    comm.barrier()
    before = len(comm.trace.messages)
    getattr(levels, operation)(*arguments, **options)
    return before


@each("colors", [[0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [2, 2, 2], [0, 1, 2]])
@each("operation", ["reduce_scatter", "all_gather"])
def test_traffic_of_reduce_scatter_and_all_gather(operation, colors):
    n, places = len(colors), {c: [r for r, color in enumerate(colors) if color == c] for c in dict.fromkeys(colors)}
    counts = [3 + (5 * rank) % 4 for rank in range(n)]
    sizes = [[counts[rank] for rank in node] for node in places.values()]
    world = SimWorld(n)

    def program(comm):
        array = np.ones(sum(counts) if operation == "reduce_scatter" else counts[comm.rank])
        return call(comm, colors, operation, array, counts=counts)

    for rank, traffic in enumerate(sent_by(world, colors, world.run(program))):
        node = list(places).index(colors[rank])
        inside, across = sends_inside_and_across(operation, sizes, node, places[colors[rank]].index(rank))
        assert traffic == ((inside[0], 8 * inside[1]), (across[0], 8 * across[1]))


@each("colors", [[0, 0, 1, 1], [0, 1, 1, 1, 2], [0, 1, 2]])
@each("operation", ["broadcast", "reduce"])
def test_a_slow_link_carries_the_array_once_for_each_node(operation, colors):
    for root in range(len(colors)):
        world = SimWorld(len(colors))
        before = world.run(lambda comm, root=root: call(comm, colors, operation, np.ones(5), root))
        traffic = sent_by(world, colors, before)
        slow = len(set(colors)) - 1
        assert (sum(across[0] for _, across in traffic), sum(across[1] for _, across in traffic)) == (slow, 40 * slow)
        assert sum(inside[0] for inside, _ in traffic) == len(colors) - 1 - slow


@pytest.mark.parametrize("colors", [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
def test_a_barrier_lets_nobody_out_before_everybody_is_in(colors):
    def program(comm):
        levels = TwoLevel(comm, colors[comm.rank])
        comm.compute(seconds=1.0 + comm.rank)
        levels.barrier()
        return comm.time()

    assert min(SimWorld(len(colors)).run(program)) >= len(colors)


def test_time_on_links_that_differ():
    nodes, local, size = 4, 4, 64
    links = LinkModel(link=lambda a, b: FAST if a // local == b // local else SLOW)
    seconds = two_level_seconds(8 * size, nodes, local, FAST, SLOW)

    def program(comm):
        levels = TwoLevel(comm, comm.rank // local)
        comm.compute(seconds=1.0 - comm.time())  # so that all ranks begin at once
        levels.all_reduce(np.ones(size))
        return comm.time() - 1.0

    two_level = SimWorld(nodes * local, links=links).run(program)
    assert max(two_level) == pytest.approx(seconds, rel=1e-12)
    for operation in ("reduce_scatter", "all_gather"):
        assert virtual_seconds(operation, "two_level", nodes * local, 8 * size, links) == pytest.approx(
            seconds / 2, rel=1e-12
        )
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
