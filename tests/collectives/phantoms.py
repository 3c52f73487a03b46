"""A collective on `nbytes` phantom bytes in all, and how long it takes on the virtual clock."""

import numpy as np

from minidist import collectives
from minidist.base.layout import chunk_sizes
from minidist.base.phantom import Phantom
from minidist.comm import LinkModel, SimWorld


def call(comm, operation, algorithm, nbytes):
    counts = chunk_sizes(nbytes, comm.size)
    whole, mine = Phantom(nbytes, np.uint8), Phantom(counts[comm.rank], np.uint8)
    function = getattr(collectives, operation)
    if operation in ("gather", "all_gather"):
        return function(comm, mine, counts=counts, algorithm=algorithm)
    if operation == "scatter":
        return function(comm, whole if comm.rank == 0 else None, mine, algorithm=algorithm)
    if operation == "all_to_all":
        whole = Phantom(-(-nbytes // comm.size) * comm.size, np.uint8)
    return function(comm, whole, algorithm=algorithm)


def seconds(operation, algorithm, ranks, nbytes, links=None):
    world = SimWorld(ranks, checks=False, record=False, timeout=0, links=links or LinkModel())
    world.run(call, operation, algorithm, nbytes)
    return world.end_time
