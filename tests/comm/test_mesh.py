"""A mesh's groups: ranks that differ in one coordinate only (museum 3), and errors that print the product."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_gather
from minidist.core.comm import init_device_mesh
from tests.cases import each

NAMES = ("pp", "dp", "tp", "cp")


def check_axis_groups(shape):
    """Every rank's group along each axis, and pair of axes, against the definition."""
    names = NAMES[: len(shape)]

    def program(comm):
        mesh = init_device_mesh(comm, shape, names)
        groups = {name: mesh[name] for name in names}
        if len(shape) > 1:
            groups[names[:2]] = mesh[names[:2]]
        seen = {key: all_gather(group, np.array([comm.rank])).tolist() for key, group in groups.items()}
        return seen, {name: mesh.get_local_rank(name) for name in names}, {k: g.rank for k, g in groups.items()}

    for rank, (seen, coordinates, places) in enumerate(SimWorld(int(np.prod(shape))).run(program)):
        mine = np.array(np.unravel_index(rank, shape))  # last axis fastest
        for key, members in seen.items():
            along = [names.index(name) for name in ((key,) if isinstance(key, str) else key)]
            for place, other in enumerate(members):
                theirs = np.array(np.unravel_index(other, shape))
                fixed = [axis for axis in range(len(shape)) if axis not in along]
                assert (theirs[fixed] == mine[fixed]).all(), f"rank {rank}'s group {key} has a stranger, rank {other}"
                assert np.ravel_multi_index(theirs[along], np.array(shape)[along]) == place
            assert len(members) == np.prod([shape[axis] for axis in along])
            assert members[places[key]] == rank
        for axis, name in enumerate(names):
            assert coordinates[name] == mine[axis]


@each("shape", [(1,), (4,), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2), (1, 3, 2, 2)])
def test_a_group_along_an_axis_differs_in_that_axis_only(shape):
    check_axis_groups(shape)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_shape(shape):
    check_axis_groups(tuple(shape))


def test_the_picture_in_the_docstring():
    def program(comm):
        mesh = init_device_mesh(comm, (2, 2, 2), ("pp", "dp", "tp"))
        return [list(mesh[name].members) for name in ("tp", "dp", "pp")]

    assert SimWorld(8).run(program)[5] == [[4, 5], [5, 7], [1, 5]]


def test_making_a_mesh_sends_nothing():
    world = SimWorld(6)
    world.run(lambda comm: init_device_mesh(comm, (2, 3), ("dp", "tp")) and None)
    assert not any(trace.messages for trace in world.traces)


@pytest.mark.parametrize(
    ("shape", "names", "words"),
    [
        ((2, 2), ("dp", "tp"), r"'dp': 2, 'tp': 2.*2 x 2 = 4 ranks, but there are 6"),
        ((2, 3), ("dp",), "one distinct name for each axis"),
        ((2, 3), ("dp", "dp"), "one distinct name"),
        ((-2, -3), ("dp", "tp"), "but there are 6"),
    ],
)
def test_a_mesh_that_does_not_fit(shape, names, words):
    with pytest.raises(UsageError, match=words):
        SimWorld(6).run(lambda comm: init_device_mesh(comm, shape, names))


def test_parallel_slices_are_communicators_of_different_names():
    """A trace, a report and a replay tell them apart by name."""

    def program(comm):
        mesh = init_device_mesh(comm, (2, 2, 2), ("pp", "dp", "tp"))
        keys = ["pp", "dp", "tp", ("pp", "dp"), ("dp", "tp")]
        return [(mesh[key].name, tuple(mesh[key].members)) for key in keys]

    for slices in zip(*SimWorld(8).run(program), strict=True):
        assert len({name for name, _ in slices}) == len({members for _, members in slices}) == len(set(slices))


def test_an_unknown_axis():
    with pytest.raises(UsageError, match=r"no axis 'pt' \(did you mean 'tp'\?\); it has dp, tp"):
        SimWorld(2).run(lambda comm: init_device_mesh(comm, (1, 2), ("dp", "tp"))["pt"])


def test_axes_may_be_in_any_collection():
    def program(comm):
        mesh = init_device_mesh(comm, (2, 1), ("dp", "tp"))
        return [mesh[axes].size for axes in (["dp", "tp"], {"dp": 2, "tp": 1}.keys(), {"tp"})]

    assert SimWorld(2).run(program) == [[2, 2, 1]] * 2
