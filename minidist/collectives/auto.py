"""`algorithm="auto"`: the cheapest algorithm for this many bytes, ranks and links, by the alpha-beta cost of each.

No algorithm is best everywhere: short messages want few rounds (latency alpha a message), long ones few bytes (beta a
byte), and where the two meet depends on the network:

    bytes      1 B ─────────── KiB ─────────────────── MiB ──▶
    all-reduce   few rounds    recursive doubling,      every byte sent twice only: rabenseifner,
                               trees                    segmented ring

The cost is `closed_form.TIMES`, the same formulas that the traces of the algorithms are tested against. Links are those of
the communicator's world (for links that differ, the slowest pair's alpha and beta); a world that does not know its links
(MPI) is taken for the `LinkModel` that is the default. All ranks choose alike, because they choose from what all know.

Source of the method: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from functools import lru_cache

from minidist.collectives import closed_form
from minidist.comm.clock import LinkModel
from minidist.comm.communicator import Comm


def choose(comm: Comm, operation: str, nbytes: int) -> str:
    """The name of the cheapest algorithm of `operation` on an array of `nbytes` in all."""
    alpha, beta = _slowest(getattr(comm.world, "links", LinkModel()), tuple(comm.members))
    return cheapest(operation, nbytes, comm.size, alpha, beta)


@lru_cache(4096)
def cheapest(operation: str, nbytes: int, ranks: int, alpha: float, beta: float) -> str:
    """The same, from numbers alone. Of equal costs the first in alphabetical order."""
    costs = {
        name: time(nbytes, ranks, alpha, beta)
        for (what, name), time in sorted(closed_form.TIMES.items())
        if what == operation
    }
    return min(costs, key=costs.__getitem__)


@lru_cache(256)
def _slowest(links: LinkModel, members: tuple[int, ...]) -> tuple[float, float]:
    if links.link is None:
        return links.alpha, links.beta
    costs = [links.cost(a, b) for a in members for b in members if a != b] or [(0.0, 0.0)]
    return max(alpha for alpha, _ in costs), max(beta for _, beta in costs)
