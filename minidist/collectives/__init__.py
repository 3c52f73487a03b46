"""Every collective, built from send and receive alone; one file an algorithm family.

    broadcast   reduce   gather   scatter   all_gather   reduce_scatter   all_reduce   all_to_all   barrier

Each takes `(comm, array, ...)`, works for any number of ranks (1 too), any size (smaller than the number of ranks too)
and ragged counts, and with `async_op=True` returns a `Work` whose `wait()` gives the result. An algorithm is chosen by
name, or with `algorithm="auto"` by its cost on the communicator's links (see auto.py).
"""

from minidist.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from minidist.collectives.nodes import TwoLevel

__all__ = [
    "TwoLevel",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
