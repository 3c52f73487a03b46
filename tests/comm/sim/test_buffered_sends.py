"""When is a simulated send buffered? By its size alone: neither by being empty nor by who ran first."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import DeadlockError
from minidist.core.comm import LinkModel


def test_an_empty_message_is_synchronous_by_default():
    def main(comm):
        comm.send(np.empty(0), 1 - comm.rank)
        comm.recv(np.empty(0), 1 - comm.rank)

    with pytest.raises(DeadlockError):
        SimWorld(2).run(main)
    SimWorld(2, eager_bytes=1).run(main)


@pytest.mark.parametrize("sender", [0, 1])  # rank 0 runs first: the send is posted before, or after, its receive
def test_a_buffered_send_takes_the_same_time_whichever_side_ran_first(sender):
    def main(comm):
        if comm.rank == sender:
            comm.send(np.ones(1), 1 - sender)
            return comm.time()
        comm.compute(seconds=5.0)
        comm.recv(np.ones(1), sender)
        return None

    world = SimWorld(2, eager_bytes=8, links=LinkModel(alpha=1.0, beta=0.0))
    assert world.run(main)[sender] == 0.0
