"""Museum: a rank that skips a collective. The others wait, or receive the bytes of
another step; here an error reports it.

The bug comes as `if rank == 0: log(all_reduce(...))`, or as a rank whose data ran out, or whose gradients overflowed.
With every algorithm the simulated world reports it at once; what it says depends on what the rank did instead.
"""

import numpy as np
import pytest

import minidist
from minidist.comm import SimWorld
from minidist.core import collectives
from minidist.core.base.errors import DeadlockError, MismatchError
from tests.cases import each

ALGORITHMS = sorted(minidist.ALGORITHMS["all_reduce"])
SENDS = [0, 1 << 20]


def training(comm, algorithm, skip, then=None):
    """Three steps of a sum over all ranks. skip: (rank, step) that does not take part."""
    total = 0.0
    for step in range(3):
        loss = np.array([comm.rank + 10.0 * step])
        if (comm.rank, step) != skip:
            total += collectives.all_reduce(comm, loss, algorithm=algorithm)[0]
        elif then:
            then(comm)
    return total


@each("algorithm", ALGORITHMS)
@each("eager_bytes", SENDS)
@each("skip", [(0, 2), (2, 2), (1, 0), (3, 1)])
def test_a_skipped_step_leaves_other_ranks_waiting(algorithm, eager_bytes, skip):
    """The sums continue, one step off, until the ranks that did not skip wait for one that has returned."""
    world = SimWorld(4, eager_bytes=eager_bytes)
    assert world.run(training, algorithm, None) == [3 * 6.0 + 4 * 30.0] * 4
    with pytest.raises(DeadlockError, match=rf"rank {skip[0]} has returned"):
        world.run(training, algorithm, skip)


@each("algorithm", ALGORITHMS)
@each("eager_bytes", SENDS)
def test_another_collective_in_its_place_is_named(algorithm, eager_bytes):
    instead = lambda comm: collectives.all_gather(comm, np.ones(2))  # noqa: E731
    names = rf"(?s)all_reduce/{algorithm}.*all_gather/ring|all_gather/ring.*all_reduce/{algorithm}"
    with pytest.raises((MismatchError, DeadlockError), match=names):  # met, or each waiting for the other: both named
        SimWorld(3, eager_bytes=eager_bytes).run(training, algorithm, (1, 1), instead)
