"""All-to-all in one round: every rank posts all its receives and all its sends at once, and waits for them.

    rank 0 ──▶ 1, 2, 3        n-1 messages of each rank are on their way together, so the latency is paid once;
    rank 1 ──▶ 2, 3, 0        pairwise, which waits after each partner, pays it n-1 times

The price is n-1 buffers in flight. Rank r begins with r+1, so no two ranks send to the same one at the same moment.

Source: MPICH's alltoall_scattered, Open MPI's "linear" all-to-all.
Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import offsets
from minidist.core.collectives.calls import algorithm
from minidist.core.collectives.naive import fan
from minidist.core.comm.communicator import PointToPoint


@algorithm(
    "all_to_all",
    "linear",
    sends=lambda sizes, rank: (len(sizes) - 1, sum(sizes) - sizes[rank]),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: fan(nbytes / n, n, alpha, beta, overhead),
)
def all_to_all(comm: PointToPoint, array: np.ndarray, send_sizes: list[int], receive_sizes: list[int]) -> np.ndarray:
    """Rank r sends its piece j straight to rank j: all of `array` but its own piece, in n-1 messages."""
    # The own piece is copied, not sent.
    n, rank = comm.size, comm.rank
    flat, start, place = array.reshape(-1), offsets(send_sizes), offsets(receive_sizes)
    out = xp.empty_like(flat, shape=(place[-1],))
    out[place[rank] : place[rank + 1]] = flat[start[rank] : start[rank + 1]]

    # Receives in the order in which the others' messages come: rank - 1 is the first to send here.
    partners = [(rank + distance) % n for distance in range(1, n)]
    receives = [comm.irecv(out[place[p] : place[p + 1]], p) for p in reversed(partners)]
    sends = [comm.isend(flat[start[p] : start[p + 1]], p) for p in partners]
    comm.waitall(receives)
    comm.waitall(sends)
    return out
