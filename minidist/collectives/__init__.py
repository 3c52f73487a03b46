"""All collectives, the algorithms in addition to those of the core, and the choice among all of them.

algorithms.py           the table of all algorithms, and one call as data
call_checks.py          what can be wrong with a call, or with a sum, on one rank alone
rooted.py               reduce, gather and scatter
naive.py                the collectives through one rank
chain.py                broadcast and reduce along the ring
user_algorithms.py      algorithms of a program's own
closed_forms.py         what a call sends, how long it takes, and bandwidths that can be compared
auto.py                 the cheapest algorithm for a call
tuning.py               measured times, for the choice under MPI
segmented_ring.py       the ring in segments
ring_in_blocks.py       the ring that adds block by block, in the cache
binomial_tree.py        the binomial tree
recursive_doubling.py   for short messages
folding.py              any number of ranks for an algorithm of a power of two
recursive_halving.py    for long messages
bruck.py                Bruck's all-to-all
linear.py               all-to-all in one round
two_level.py            inside each node, then across nodes, which the program may name
one_event.py            a call in which one rank stands for many
ring_event.py           what a ring does on all of its ranks, at once
collective_check.py     compares a collective that a user has written with NumPy
summation_order.py      in which order a sum adds, found by calling it
reduction_order.py      the same of sums over ranks, and whether it depends on their number
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.collectives.closed_forms import bus_factor, seconds, volume
    from minidist.collectives.rooted import gather, reduce, scatter
    from minidist.collectives.two_level import TwoLevel
    from minidist.collectives.user_algorithms import algorithm, load_algorithm
    from minidist.core.collectives import all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
__getattr__, __dir__ = lazy_imports(__name__, __file__)
