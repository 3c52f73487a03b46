"""A collective on `nbytes` bytes of meta arrays in all, and how long it takes on the virtual clock: the benchmark's own
measure.
"""

from minidist.collectives.auto import virtual_seconds
from minidist.comm.sim.links import LinkModel


def seconds(operation, algorithm, ranks, nbytes, links=None):
    return virtual_seconds(operation, algorithm, ranks, nbytes, links or LinkModel())
