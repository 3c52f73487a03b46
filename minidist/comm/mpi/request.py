"""What the MPI world remembers of a message between its post and its wait, and of a lane."""

from collections import deque
from typing import Any

import numpy as np
from greenlet import greenlet

from minidist.base.trace import MessageEvent
from minidist.comm.call_site import Site
from minidist.comm.communicator import Comm, Request, Work


class MPIRequest(Request):
    """A request and what the MPI world must remember, and keep alive, until it has been waited for."""

    __slots__ = ("buffer", "checksum", "header", "header_request", "payload")

    def __init__(
        self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: Site, event: MessageEvent
    ) -> None:
        super().__init__(comm, kind, array, peer, tag, site, event)
        self.buffer = array  # on the host
        self.checksum: int | None = None  # of what is sent
        self.header: bytes | bytearray | None = None
        self.header_request: Any = None
        self.payload: Any = None  # MPI's request; None until the header has come


class Lane:
    """A communicator's lane on this rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.greenlet: greenlet | None = None
        self.queue: deque[Work] = deque()
        self.waiting: MPIRequest | None = None
