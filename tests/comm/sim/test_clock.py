"""The cost model: the roofline of computing, and parameters that make no sense."""

import pytest

from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from minidist.core.comm.sim.matching import AlphaBeta
from minidist.core.comm.sim.world import Sim


def test_each_operation_costs_its_slower_part():
    links = LinkModel(flops=4.0, memory_bandwidth=2.0)
    assert links.seconds([(8.0, 2.0), (4.0, 6.0)]) == 2.0 + 3.0

    def program(comm):
        comm.compute(operations=[(8.0, 2.0), (4.0, 6.0)], seconds=0.5)
        return comm.time()

    assert SimWorld(1, links=links).run(program) == [5.5]


def test_operations_may_be_a_generator():
    def program(comm):
        comm.compute((8.0 * n, 0.0) for n in (1, 2))
        return comm.time()

    assert SimWorld(1, links=LinkModel(flops=4.0)).run(program) == [6.0]


@pytest.mark.parametrize("name", ["alpha", "beta", "overhead", "flops", "memory_bandwidth"])
def test_negative_costs_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} is -1"):
        LinkModel(**{name: -1.0})


def test_all_costs_may_be_given_by_position():
    def link(source, destination):
        return 0.0, 0.0

    links = LinkModel(1.0, 2.0, 3.0, 4.0, link, None, 0.5, True)
    named = LinkModel(alpha=1.0, beta=2.0, flops=3.0, memory_bandwidth=4.0, link=link, overhead=0.5, free_startup=True)
    assert links == named


@pytest.mark.parametrize("links", [AlphaBeta(), 3])
def test_a_world_takes_the_links_that_it_counts_all_costs_of(links):
    with pytest.raises(UsageError, match=r"^SimWorld: links=.*; it must be a LinkModel$"):
        SimWorld(2, links=links)


@pytest.mark.parametrize(
    ("name", "value"), [("link", lambda a, b: (1, 0)), ("slowdown", lambda rank: 2.0), ("overhead", 1e-7)]
)
def test_the_cores_world_refuses_costs_that_it_would_ignore(name, value):
    with pytest.raises(UsageError, match=rf"Sim has no {name} .* use SimWorld"):
        Sim(2, links=LinkModel(**{name: value}))
    SimWorld(2, links=LinkModel(**{name: value}))
    assert Sim(2, links=LinkModel(alpha=2e-6)).links.alpha == 2e-6
