"""Some ranks of a channel under numbers of their own, so that an algorithm for n ranks can run on a node's, or the
leaders'.

No new communicator: messages travel on the channel itself, with its tag. Two ranks' messages keep their order, so the
steps of one call that follow one another cannot meet.
"""

from collections.abc import Sequence

import numpy as np

from minidist.comm.communicator import Comm, Request


class Part(Comm):
    """`ranks` of `comm`, a channel, in that order; its caller's rank among them. Sends nothing to be made."""

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        self.whole, self.ranks = comm, list(ranks)
        self.world, self.name, self.call = comm.world, comm.name, comm.call
        self.members = [comm.members[rank] for rank in ranks]
        self.rank, self.size = self.ranks.index(comm.rank), len(self.ranks)

    def sendrecv(self, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int, tag: int = 0) -> None:
        self.whole.sendrecv(outgoing, self.ranks[dest], incoming, self.ranks[source], tag)

    def _post(self, kind: str, array: np.ndarray, peer: int, tag: int, guarded: bool) -> Request:
        return self.whole._post(kind, array, self.ranks[peer], tag, guarded)
