"""What the MPI world remembers of a message between its post and its wait, and of a stream.

Proved by: tests/comm/test_conformance.py
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.base.traces import MessageEvent
from minidist.comm.call_site import CallSite
from minidist.comm.message_checks import CheckedMessages
from minidist.comm.tags import describe
from minidist.core.base.fibers import Fiber
from minidist.core.comm.communicator import Request, Work


@dataclass(slots=True, eq=False)
class MPIRequest(Request):
    """A request and what the MPI world must remember, and keep alive, until it has been waited for."""

    comm: CheckedMessages
    site: CallSite
    event: MessageEvent
    buffer: np.ndarray  # the array, or its copy on the host
    checksum: int | None = field(default=None, init=False)  # of what is sent
    header: bytes | bytearray | None = field(default=None, init=False)
    header_request: Any = field(default=None, init=False)
    payload: Any = field(default=None, init=False)  # MPI's request; None until the header has come
    describe = describe


class Stream:
    """The execution context of a communicator's asynchronous work on this rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fiber: Fiber | None = None
        self.queue: deque[Work] = deque()
        self.resumed = 0  # how often it has run
        self.waiting: MPIRequest | None = None
