"""Where the papers' conditions hold (n a power of two, equal chunks) our closed forms are the papers' expressions.

What the closed forms say is what the traces show: `test_closed_form` proves that. N: bytes of the whole array.
"""

from math import ceil, floor, log2

import numpy as np

from minidist import collectives
from minidist.collectives import ring_in_blocks
from minidist.collectives.closed_forms import seconds, volume
from minidist.collectives.segmented_ring import SEGMENT_BYTES
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.layout import chunk_sizes
from tests.cases import each
from tests.collectives.cases import ALL, DTYPES, Case

A, B, N = 2.0**-10, 2.0**-20, 3 * 2.0**12
POWERS = [1, 2, 4, 8, 16, 64]
PAPERS = {
    ("all_reduce", "rabenseifner"): lambda p: 2 * log2(p) * A + 2 * N * (p - 1) / p * B,
    ("all_reduce", "recursive_doubling"): lambda p: log2(p) * (A + N * B),
    ("all_reduce", "binomial"): lambda p: 2 * ceil(log2(p)) * (A + N * B),
    ("all_gather", "recursive_doubling"): lambda p: log2(p) * A + N * (p - 1) / p * B,
    ("reduce_scatter", "recursive_halving"): lambda p: log2(p) * A + N * (p - 1) / p * B,
    ("broadcast", "binomial"): lambda p: ceil(log2(p)) * (A + N * B),
    ("reduce", "binomial"): lambda p: ceil(log2(p)) * (A + N * B),
    ("gather", "binomial"): lambda p: log2(p) * A + N * (p - 1) / p * B,
    ("all_to_all", "bruck"): lambda p: log2(p) * A + N / 2 * log2(p) * B,
}


@each(("operation", "algorithm"), PAPERS)
@each("ranks", POWERS)
def test_times_of_the_papers(operation, algorithm, ranks):
    assert seconds(operation, algorithm, N, ranks, A, B) == PAPERS[operation, algorithm](ranks)


@each("ranks", range(1, 65))
def test_other_numbers_of_ranks_stay_within_the_papers_bounds(ranks):
    """Rabenseifner for any n, as MPICH states it with q, the largest power of two in n; trees take ceil(log2 n)."""
    q = 2 ** floor(log2(ranks))
    bound = (2 * log2(q) + 2) * A + (2 * (q - 1) / q + 2) * N * B
    assert seconds("all_reduce", "rabenseifner", N, ranks, A, B) <= bound
    for name in (("broadcast", "binomial"), ("reduce", "binomial")):
        assert seconds(*name, N, ranks, A, B) <= ceil(log2(ranks)) * (A + N * B)
    assert seconds("all_reduce", "recursive_doubling", N, ranks, A, B) <= (log2(q) + 2) * (A + N * B)


@each("ranks", [1, 2, 3, 4, 7, 64])
def test_a_segmented_chain_takes_the_time_of_a_pipeline(ranks):
    k = 12
    time = seconds("broadcast", "segmented_ring", k * SEGMENT_BYTES, ranks, A, B)
    hops = (ranks - 1) * (A + SEGMENT_BYTES * B)
    assert time == (hops + (k - 1) * SEGMENT_BYTES * B if ranks > 1 else 0)


@each("operation", ["broadcast", "reduce", "all_reduce"], sampled=6)
@each("ranks", [2, 3, 5])
@each("alpha", [2.0**-10, 1.0])  # the port is the bottleneck; the latency is
@each("eager_bytes", [0, 1 << 30])
def test_several_segments(operation, ranks, alpha, eager_bytes):
    """Values, messages, bytes and time where messages are really cut; sums in the ring's order."""
    size = 3 * SEGMENT_BYTES // 8 * (ranks if operation == "all_reduce" else 1)
    arrays = [np.random.default_rng(rank).standard_normal(size) for rank in range(ranks)]

    def program(comm, algorithm):
        function = getattr(collectives, operation)
        result = function(comm, arrays[comm.rank].copy(), algorithm=algorithm)
        return None if result is None else result.tobytes()

    world = SimWorld(ranks, eager_bytes=eager_bytes, links=LinkModel(alpha=alpha, beta=B))
    assert world.run(program, "segmented_ring") == SimWorld(ranks).run(program, "ring")
    world.run(program, "segmented_ring")
    for rank, trace in enumerate(world.traces):
        messages, elements = volume(operation, "segmented_ring", size, ranks, rank)
        assert (len(trace.sent()), sum(m.nbytes for m in trace.sent())) == (messages, 8 * elements)
        assert messages % 3 == 0
        assert all(m.nbytes == SEGMENT_BYTES for m in trace.sent())
    assert world.end_time == seconds(operation, "segmented_ring", 8 * size, ranks, alpha, B)


def test_segments_of_unequal_size_and_another_dtype():
    size, ranks = 100_003, 3
    world = SimWorld(ranks)
    arrays = [Case("broadcast", "ring", ranks, size, DTYPES["float32"]).input(rank) for rank in range(ranks)]
    results = world.run(lambda comm: collectives.all_reduce(comm, arrays[comm.rank].copy(), algorithm="segmented_ring"))
    expected = SimWorld(ranks).run(
        lambda comm: collectives.all_reduce(comm, arrays[comm.rank].copy(), algorithm="ring")
    )
    for rank, trace in enumerate(world.traces):
        assert results[rank].tobytes() == expected[rank].tobytes()
        messages, elements = volume("all_reduce", "segmented_ring", size, ranks, rank, itemsize=4)
        assert (len(trace.sent()), sum(m.nbytes for m in trace.sent())) == (messages, 4 * elements)
        assert max(m.nbytes for m in trace.sent()) <= SEGMENT_BYTES
    assert {m.nbytes for m in world.traces[0].sent()} != {SEGMENT_BYTES}


@each("ranks", [1, 2, 3, 4])
def test_a_ring_in_blocks_has_the_bits_of_the_ring(ranks, monkeypatch):
    """41 elements, in blocks of at most 4 where they are summed."""
    monkeypatch.setattr(ring_in_blocks, "BLOCK_BYTES", 32)
    arrays = [Case("all_reduce", "ring", ranks, 41).input(rank) for rank in range(ranks)]

    def program(comm, name):
        return collectives.all_reduce(comm, arrays[comm.rank].copy(), "avg", algorithm=name).tobytes()

    world = SimWorld(ranks)
    assert world.run(program, "ring_in_blocks") == SimWorld(ranks).run(program, "ring")
    for rank, trace in enumerate(world.traces):
        sent = [m.nbytes for m in trace.sent()]
        messages, elements = volume("all_reduce", "ring_in_blocks", 41, ranks, rank)
        assert (len(sent), sum(sent)) == (messages, 8 * elements)
        # The largest chunk of 41, 21, 14 or 11 elements has 11, 6, 4 or 3 blocks.
        assert messages == (ranks - 1) * ([11, 6, 4, 3][ranks - 1] + 1)
        assert max(sent[: 1 - ranks], default=0) <= 32


def test_the_time_of_a_ring_in_blocks(monkeypatch):
    """A chunk of 8 elements in two blocks, five ranks."""
    monkeypatch.setattr(ring_in_blocks, "BLOCK_BYTES", 32)
    world = SimWorld(5, links=LinkModel(alpha=A, beta=B))
    world.run(lambda comm: collectives.all_reduce(comm, np.ones(40), algorithm="ring_in_blocks"))
    assert world.end_time == seconds("all_reduce", "ring_in_blocks", 320, 5, A, B) == 4 * (3 * A + 128 * B)


@each("algorithm", sorted(name for operation, name in ALL if operation == "all_reduce"))
@each("ranks", [2, 3, 4, 7, 8])
def test_all_ranks_have_the_same_bits_even_of_zeros_and_nans(algorithm, ranks):
    """max(0, -0) and the sum of two NaNs depend on which comes first: everybody must take the same first."""

    def program(comm, op):
        special = [0.0, -0.0, np.nan, -np.nan]
        array = np.array([special[(comm.rank + i) % 4] for i in range(8)])
        return collectives.all_reduce(comm, array, op, algorithm=algorithm).tobytes()

    with np.errstate(invalid="ignore"):
        for op in ("sum", "max", "min"):
            assert len(set(SimWorld(ranks).run(program, op))) == 1


def test_chunk_sizes_that_do_not_divide_change_the_traffic_as_the_closed_form_says():
    assert chunk_sizes(11, 3) == [4, 4, 3]
    # rank 0 hands over 11; rank 1 sends chunk {2} in its round and chunk 0 back; rank 2 sends chunks {0, 1}
    scattered = [volume("reduce_scatter", "recursive_halving", 11, 3, rank) for rank in range(3)]
    assert scattered == [(1, 11), (2, 3 + 4), (1, 8)]
    gathered = [volume("all_gather", "recursive_doubling", [4, 4, 3], 3, rank) for rank in range(3)]
    assert gathered == [(1, 4), (2, 8 + 11), (1, 3)]
