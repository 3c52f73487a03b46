"""The recorded messages, bytes and virtual times are those of the closed forms, for every algorithm there is."""

from itertools import product
from math import ceil, log2

import numpy as np
import pytest

from minidist.collectives import recursive_doubling, recursive_halving
from minidist.collectives.closed_forms import seconds, volume
from minidist.collectives.folding import Fold
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.layout import chunk_sizes
from tests.cases import each
from tests.collectives.cases import ALL, Case
from tests.collectives.ragged_times import pairwise, ring_all_gather, ring_all_reduce, ring_reduce_scatter

ALPHA, BETA = 2.0**-10, 2.0**-20  # binary fractions: sums of them are exact
RANKS = [1, 2, 3, 4, 5, 7, 8, 9]


def volume_of(case, rank):
    """The closed form of one rank of a case."""
    ragged = case.algorithm == "bruck" and case.counts is not None
    options = {"rows": [case.row(r) for r in range(case.ranks)]} if ragged else {}
    elements = case.row(rank) if case.operation == "all_to_all" else case.sizes
    return volume(case.operation, case.algorithm, elements, case.ranks, rank, case.root, **options)


@each(("kind", "ranks", "async_op"), list(product(ALL, RANKS, (False, True))), sampled=16)
def test_messages_and_bytes_of_each_rank(kind, ranks, async_op):
    operation, algorithm = kind
    for size in (0, 1, ranks, 5 * ranks + 2):
        ragged = tuple(chunk_sizes(size, ranks)[::-1])
        for counts in {None, ragged}:
            case = Case(operation, algorithm, ranks, size, counts=counts, root=ranks // 2, async_op=async_op)
            world = SimWorld(ranks)
            world.run(case.call)
            for rank, trace in enumerate(world.traces):
                messages, elements = volume_of(case, rank)
                assert (len(trace.sent()), sum(m.nbytes for m in trace.sent())) == (messages, 8 * elements), case
                assert all(m.operation == f"{operation}/{algorithm}" for m in trace.messages)


@each(("operation", "algorithm"), ALL, sampled=8)
@each("ranks", RANKS)
@each("eager_bytes", [0, 1 << 20])
@each("async_op", [False, True])
def test_virtual_time(operation, algorithm, ranks, eager_bytes, async_op):
    size = 16 * ranks
    counts = None if operation == "all_to_all" else (16,) * ranks
    case = Case(operation, algorithm, ranks, size, counts=counts, root=ranks // 2, async_op=async_op)
    nbytes = 8 * (sum(case.row(0)) if operation == "all_to_all" else size)
    world = SimWorld(ranks, eager_bytes=eager_bytes, links=LinkModel(alpha=ALPHA, beta=BETA))
    world.run(case.call)
    expected = seconds(operation, algorithm, nbytes, ranks, ALPHA, BETA)
    assert world.end_time == max(expected, 1e-6 if async_op else 0.0)


RAGGED = {
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("all_gather", "ring"): ring_all_gather,
    ("all_reduce", "ring"): ring_all_reduce,
    ("all_to_all", "pairwise"): pairwise,
    ("reduce_scatter", "recursive_halving"): recursive_halving.reduce_scatter_seconds,
    ("all_gather", "recursive_doubling"): recursive_doubling.all_gather_seconds,
    ("all_reduce", "rabenseifner"): recursive_halving.all_reduce_seconds,
}


@each(("operation", "algorithm"), RAGGED, sampled=6)
@each("ranks", RANKS)
@each("eager_bytes", [0, 1 << 20])
def test_virtual_time_from_the_actual_chunk_sizes(operation, algorithm, ranks, eager_bytes):
    for size, seed in ((5 * ranks + 2, 0), (40, 1), (ranks - 1, 2), (0, 3)):
        cuts = np.sort(np.random.default_rng(seed).integers(0, size + 1, ranks - 1))
        counts = tuple(np.diff([0, *cuts, size]).tolist())
        case = Case(operation, algorithm, ranks, size, counts=counts)
        if operation == "all_to_all":
            chunks = [[8 * n for n in case.row(rank)] for rank in range(ranks)]
        elif operation == "all_reduce":  # cuts as it likes
            chunks = [8 * n for n in chunk_sizes(size, Fold(ranks).power if algorithm == "rabenseifner" else ranks)]
        else:
            chunks = [8 * n for n in counts]
        options = {"buffered": eager_bytes > 0} if algorithm == "pairwise" else {}
        more = (ranks,) if algorithm == "rabenseifner" else ()
        world = SimWorld(ranks, eager_bytes=eager_bytes, links=LinkModel(alpha=ALPHA, beta=BETA))
        world.run(case.call)
        assert world.end_time == RAGGED[operation, algorithm](chunks, *more, ALPHA, BETA, **options), (size, chunks)


@each("ranks", [*RANKS, 1000])
def test_barrier(ranks):
    world = SimWorld(ranks, links=LinkModel(alpha=ALPHA, beta=BETA))
    world.run(lambda comm: comm.barrier())
    rounds = ceil(log2(ranks))
    assert world.end_time == ALPHA * rounds
    for trace in world.traces:
        assert [m.nbytes for m in trace.sent()] == [0] * rounds


def test_the_ring_is_as_good_as_bandwidth_allows_and_the_naive_way_is_not():
    """Without latency: 2 (n-1)/n against 2 (n-1) times the array."""
    nbytes, n = 1e6, 8
    ring, naive = (seconds("all_reduce", name, nbytes, n, 0.0, 1e-9) for name in ("ring", "naive"))
    assert naive == pytest.approx(n * ring)
    assert ring == pytest.approx(2 * (n - 1) / n * nbytes * 1e-9)
