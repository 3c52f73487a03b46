"""Every collective, built from send and receive alone; one file per family of algorithms.

    broadcast   reduce   gather   scatter   all_gather   reduce_scatter   all_reduce   all_to_all   barrier

Each takes `(comm, array, ...)`, works for any number of ranks (1 too), any size (smaller than the number of ranks too)
and ragged counts, and with `async_op=True` returns a `Work` whose `wait()` gives the result. An algorithm is chosen by
name, or with `algorithm="auto"` by its cost on the communicator's links (see auto.py).

`volume` and `seconds` are the closed forms of what an algorithm sends and how long it takes. Each is in the file of
its algorithm, beside the code: the ring's in ring.py.

calls.py                the collectives as a user calls them
call_checks.py          what can be wrong with a call on one rank alone
registry.py             the algorithms of each collective
user_algorithms.py      algorithms of a program's own
closed_forms.py         what a whole call sends, and bandwidths that can be compared
auto.py                 the cheapest algorithm for a call
tuning.py               measured times, for the choice under MPI
operations.py           sum, avg, max, min, prod
naive.py                everything through one rank
ring.py                 the ring
segmented_ring.py       the ring in segments
ordered.py              sums whose bits depend on no layout
recursive_doubling.py   for short messages
recursive_halving.py    for long messages
folding.py              any number of ranks for an algorithm of a power of two
binomial_tree.py        the binomial tree
bruck.py                Bruck's all-to-all
linear.py               all-to-all in one round
two_level.py            inside each node, then across nodes
nodes.py                two levels whose nodes the program names
call.py                 one call as data
one_event.py            a call of ranks of which one stands for many
ring_event.py           what a ring does on all of its ranks, at once
"""

from typing import TYPE_CHECKING

from minidist.base import hooks
from minidist.base.lazy import lazy_imports
from minidist.collectives import naive, ordered, ring  # noqa: F401  register the algorithms that most programs use
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
from minidist.collectives.registry import ALGORITHMS, Volume, seconds, volume

if TYPE_CHECKING:
    from minidist.collectives.closed_forms import bus_factor
    from minidist.collectives.nodes import TwoLevel
    from minidist.collectives.user_algorithms import algorithm, load_algorithm

__all__ = [
    "ALGORITHMS",
    "TwoLevel",
    "Volume",
    "algorithm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "bus_factor",
    "gather",
    "load_algorithm",
    "reduce",
    "reduce_scatter",
    "scatter",
    "seconds",
    "volume",
]


def _others() -> None:
    """Register the other algorithms of this part, which few programs use."""
    from minidist.collectives import binomial_tree, recursive_doubling  # noqa: F401


hooks.more_algorithms.append(_others)
__getattr__, __dir__ = lazy_imports(__name__, __file__)
