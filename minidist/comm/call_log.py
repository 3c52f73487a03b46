"""Which collective calls a rank has made on a communicator, so that calls that differ between ranks can be named.

Two calls that differ are found when a message of one meets a receive of the other. But some never meet: when every rank
of a small broadcast passes itself as the root, all ranks send, none receives, and the program goes on. So each rank
also keeps a checksum of its calls (their names, reductions, roots and shapes), and under MPI the header of every
message of a call has two bytes of this checksum, which depend on what the sender had called before.

    rank 0   broadcast root 0 ── goes on ──▶ all_reduce ── message: the calls before it are 3f1a ──▶ rank 1
    rank 1   broadcast root 1 ── goes on ──▶ all_reduce: the calls before mine are 9c02, so they differ

The last calls are kept, with their lines, so that `unlike_calls` can name the first call that differed.

Proved by: tests/comm/test_call_log.py, tests/comm/mpi/test_failures.py
"""

from collections import deque
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from minidist.base.arrays import dtype_name
from minidist.comm.call_site import CallSite
from minidist.comm.message_checks import CheckedMessages

# What a rank has passed to a call: the dtype and the shape of its array; None where a call has no array.
Passed = tuple[Any, Sequence[int]] | None
# A collective call of a rank: how many it had made on the communicator before; the operation and what every rank must
# pass equal, "broadcast/ring root 1 [2, 3]"; the line; what was passed. (A plain tuple is made in a fifth of a named
# one's time.)
Call = tuple[int, str, CallSite | None, Passed]


class CallLog:
    """A rank's collective calls on one communicator.

    count: how many. checksum: of the keys of all, in their order. recent: the last ones.
    """

    __slots__ = ("checksum", "count", "recent")

    def __init__(self, kept: int) -> None:
        self.count, self.checksum = 0, 0
        self.recent: deque[Call] = deque(maxlen=kept)

    def note(self, comm: CheckedMessages, call: CheckedMessages, array: np.ndarray | None) -> None:
        """Note a call that begins. An attribute `passed` of the communicator replaces the array, for reports."""
        passed = getattr(comm, "passed", None)
        if passed is None and array is not None:
            passed = dtype_name(array.dtype), array.shape
        self.recent.append((self.count, call.match_key, call.opened, passed))
        self.count += 1

    def continue_with(self, key: str) -> bytes:
        """Continue the checksum with the key of a call; return two bytes of what it was before."""
        before = (self.checksum & 0xFFFF).to_bytes(2, "little")
        self.checksum = crc32(key.encode(), self.checksum)
        return before
