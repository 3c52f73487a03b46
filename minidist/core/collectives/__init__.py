"""The collectives that training uses, built from send and receive alone; one file per family of algorithms.

    broadcast   all_gather   reduce_scatter   all_reduce   all_to_all   barrier

Each takes `(comm, array, ...)`, works for any number of ranks (also 1), any size (also smaller than the number of
ranks) and unequal counts, and with `async_op=True` returns a `Work` whose `wait()` gives the result.

calls.py        the algorithms of each collective, the sums, and the collectives as a user calls them
naive.py        a broadcast from the root to each rank, and the pairwise all-to-all
ring.py         the ring
ordered.py      sums whose bits depend on no layout
"""

from minidist.core.collectives import naive, ordered, ring  # they register the algorithms that most programs use
from minidist.core.collectives.calls import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
