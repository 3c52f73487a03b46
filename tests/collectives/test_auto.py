"""algorithm="auto" is within 5 % of the best fixed choice, measured on the virtual clock with meta arrays."""

from types import SimpleNamespace

import numpy as np
import pytest

from minidist.collectives import TwoLevel
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.auto import cheapest, choose, fastest, virtual_seconds
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core import collectives
from minidist.core.base.errors import MismatchError
from tests.cases import each
from tests.collectives.cases import ALL, Case
from tests.collectives.virtual_time import seconds

SIZES = [1, 2**8, 2**12, 2**15, 2**18, 2**20, 2**23, 2**26]
ETHERNET = LinkModel(alpha=5e-5, beta=8e-9)
OPERATIONS = sorted(ALGORITHMS)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("ranks", "links"), [*((n, LinkModel()) for n in (2, 3, 5, 8, 13)), (6, ETHERNET)], ids=lambda v: str(v)[:2]
)
def test_within_5_percent_of_the_best(operation, ranks, links):
    # A thousand segments a rank take long.
    for nbytes in SIZES if ranks < 13 or operation == "all_reduce" else SIZES[:-1]:
        fixed = {name: seconds(operation, name, ranks, nbytes, links) for name in ALGORITHMS[operation]}
        assert seconds(operation, "auto", ranks, nbytes, links) <= 1.05 * min(fixed.values()), (nbytes, fixed)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("ranks", "nbytes"), [(64, 1), (64, 2**14), (33, 2**20), (64, 2**21)])
def test_within_5_percent_on_many_ranks(operation, ranks, nbytes):
    fixed = [seconds(operation, name, ranks, nbytes) for name in ALGORITHMS[operation]]
    assert seconds(operation, "auto", ranks, nbytes) <= 1.05 * min(fixed)


def test_a_gibibyte_needs_no_memory():
    assert seconds("all_reduce", "rabenseifner", 64, 2**30) == pytest.approx(2 * 63 / 64 * 2**30 * 1e-10, rel=0.01)


def test_it_matters_and_no_algorithm_is_always_best():
    """Where the choices cross over: at least three algorithms are needed, and the wrong one costs several times as
    much.
    """
    chosen = {cheapest("all_reduce", nbytes, 16, 1e-6, 1e-10, overhead=0.0) for nbytes in SIZES}
    assert len(chosen) >= 3
    short, long = (
        [seconds("all_reduce", name, 16, nbytes) for name in ("recursive_doubling", "rabenseifner", "ring")]
        for nbytes in (8, 2**26)
    )
    assert short[2] > 5 * short[0]
    assert long[0] > 2 * long[1]


@each(("operation", "algorithm"), ALL)
def test_meta_arrays_take_the_time_of_real_arrays(operation, algorithm):
    """The same code on data: the same seconds."""
    ranks = 5
    case = Case(operation, algorithm, ranks, 40)
    world = SimWorld(ranks)
    world.run(case.call)
    nbytes = 8 * sum(case.row(0)) if operation == "all_to_all" else 8 * 40
    assert seconds(operation, algorithm, ranks, nbytes) == pytest.approx(world.end_time, rel=1e-12)


@each("operation", OPERATIONS)
@each("ranks", [1, 4, 7])
def test_auto_is_the_algorithm_that_it_chose(operation, ranks):
    case = Case(operation, "auto", ranks, 24)
    world = SimWorld(ranks)
    results = world.run(case.call)
    names = {m.operation for trace in world.traces for m in trace.messages}
    assert len(names) == (ranks > 1)
    for name in names:
        case.algorithm = name.split("/")[1]
        assert case.algorithm in ALGORITHMS[operation]
        for rank, result in enumerate(results):
            case.check(rank, result)


@pytest.mark.parametrize("operation", ["gather", "all_gather", "scatter", "reduce_scatter"])
def test_ragged_chunks_are_chosen_for_by_the_whole(operation):
    """By its own chunk each rank would choose alone: here one chunk is 32 KiB and the others nothing."""
    case = Case(operation, "auto", 8, 2**12, counts=(0, 0, 0, 2**12, 0, 0, 0, 0))
    world = SimWorld(8)
    results = world.run(case.call)
    (taken,) = {m.operation for trace in world.traces for m in trace.messages}
    case.algorithm = taken.split("/")[1]
    for rank, result in enumerate(results):
        case.check(rank, result)


def test_ragged_all_to_all_is_pairwise_because_nobody_knows_all_counts():
    case = Case("all_to_all", "auto", 4, 24, counts=(9, 7, 5, 3))
    world = SimWorld(4)
    for rank, result in enumerate(world.run(case.call)):
        case.check(rank, result)
    assert {m.operation for m in world.traces[0].messages} == {"all_to_all/pairwise"}


FAST, SLOW = (1e-6, 1e-10), (1e-4, 2e-9)
TWO_NODES = LinkModel(link=lambda a, b: FAST if a // 4 == b // 4 else SLOW)
RAGGED = LinkModel(link=lambda a, b: FAST if (a < 3) == (b < 3) else SLOW)


def test_each_communicator_chooses_by_its_own_links():
    """A group inside a fast node and one across nodes choose differently for the same array, by formula; both by
    trying.
    """

    def program(comm):
        inside, across = comm.split(comm.rank // 4), comm.split(comm.rank % 4)
        return tuple(choose(group, "all_reduce", 2**16) for group in (inside, across, comm))

    ((inside, across, both),) = set(SimWorld(16, links=TWO_NODES).run(program))
    assert inside == cheapest("all_reduce", 2**16, 4, *FAST, overhead=0.0)
    assert across == cheapest("all_reduce", 2**16, 4, *SLOW, overhead=0.0)
    assert inside != across
    assert both == fastest("all_reduce", 2**16, TWO_NODES, tuple(range(16)))


@each(("ranks", "links"), [(8, TWO_NODES), (7, RAGGED)], ids=["equal nodes", "ragged nodes"], sampled=6)
@each("operation", OPERATIONS)
def test_within_5_percent_where_links_differ_by_node(operation, ranks, links):
    for nbytes in (1, 2**12, 2**16, 2**20, 2**24):
        fixed = {name: seconds(operation, name, ranks, nbytes, links) for name in ALGORITHMS[operation]}
        assert seconds(operation, "auto", ranks, nbytes, links) <= 1.05 * min(fixed.values()), (nbytes, fixed)


def test_many_ranks_on_links_that_differ_choose_by_the_slowest_link():
    """Formulas, not trials: 65 ranks, and one of them is far away."""
    links = LinkModel(link=lambda a, b: SLOW if 64 in (a, b) else FAST)
    for nbytes in (2**10, 2**16, 2**22):
        comm = SimpleNamespace(world=SimpleNamespace(links=links), members=range(65), size=65, choices=None)
        assert choose(comm, "all_reduce", nbytes) == cheapest("all_reduce", nbytes, 65, *SLOW, overhead=0.0)
    assert cheapest("all_reduce", 2**16, 65, *SLOW) != cheapest("all_reduce", 2**16, 65, *FAST)


def test_long_arrays_take_two_levels_where_links_differ_and_nowhere_else():
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        chosen = fastest(operation, 2**24, TWO_NODES, tuple(range(8)))
        assert chosen == "two_level", operation
        others = [seconds(operation, name, 8, 2**24, TWO_NODES) for name in ALGORITHMS[operation] if name != chosen]
        assert seconds(operation, "two_level", 8, 2**24, TWO_NODES) < 0.75 * min(others)
        assert cheapest(operation, 2**24, 8, *SLOW) != "two_level"


def test_a_communicator_that_was_told_its_nodes_is_taken_at_its_word():
    """The links say two nodes of four, the color four nodes of two: two_level then is another algorithm."""

    def program(comm):
        told = TwoLevel(comm, comm.rank // 2).comm
        choose(told, "all_reduce", 2**24)
        return fastest("all_reduce", 2**24, TWO_NODES, tuple(range(8)), ((0, 1), (2, 3), (4, 5), (6, 7)))

    SimWorld(8, links=TWO_NODES).run(program)
    two = virtual_seconds("all_reduce", "two_level", 8, 2**24, TWO_NODES)
    four = virtual_seconds("all_reduce", "two_level", 8, 2**24, TWO_NODES, ((0, 1), (2, 3), (4, 5), (6, 7)))
    assert two < four


def test_a_world_without_a_link_model_is_taken_for_the_default():
    comm = SimpleNamespace(world=SimpleNamespace(), members=range(8), size=8, choices=None)
    assert choose(comm, "all_reduce", 2**20) == cheapest("all_reduce", 2**20, 8, 1e-6, 1e-10, overhead=0.0)


def test_ranks_with_arrays_of_unequal_size_choose_differently_and_are_told():
    def program(comm):
        collectives.all_reduce(comm, np.ones(1 if comm.rank else 2**20), algorithm="auto")

    with pytest.raises(MismatchError, match="all_reduce/"):
        SimWorld(8).run(program)
