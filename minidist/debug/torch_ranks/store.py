"""What ranks of one process find each other by: torch's stores, and the queues of multiprocessing.

A real store blocks the process until another one has set a key, and would keep the other ranks from running. Here a
rank that waits lets them run, as in a receive; a key that no rank sets is in the report of the hang:

    rank 1  store.get("port") ──▶ waits ··························▶ b"29500"
    rank 0                        computes, store.set("port", ...)

Proved by: tests/torch_ranks/test_processes.py
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from minidist.comm.call_site import CallSite, call_site
from minidist.core.base.errors import UsageError
from minidist.core.comm import ANY, Comm
from minidist.debug.torch_ranks.rank_thread import current_rank, in_rank


@dataclass
class Condition:
    """What a blocked rank waits in, for the report of a hang."""

    comm: Comm
    what: str
    site: CallSite
    peer: int = ANY

    def describe(self) -> str:
        """Return what the rank has called, and the line."""
        return f"{self.what}, at {self.site}"


@dataclass
class Shared:
    """What several ranks see. waiting: (world, stream) of the ranks that wait for a change.

    stores: kept until the run is over; a PrefixStore keeps only the half of a store that is not Python's.
    """

    store: dist.HashStore = field(default_factory=dist.HashStore)
    waiting: list[tuple[Any, Any]] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `is_there()`."""
        if is_there():
            return
        if not in_rank():
            raise UsageError(f"{what} outside of the ranks of a run waits for ever; call it in the main program")
        comm = current_rank().comm

        def block() -> None:
            world: Any = comm.world
            on = Condition(comm, what, call_site(sys._getframe(1)))
            while not is_there():
                self.waiting.append((world, world.state.running))
                world._block(on)

        current_rank().call(block)

    def changed(self) -> None:
        """Let every rank that waits look again; its clock is not behind the one that made the change."""
        for world, stream in self.waiting:
            stream.time = max(stream.time, world.state.running.time)
            world.state.ready.append(stream)
        self.waiting.clear()


class RankStore(dist.Store):
    """A store of torch that the ranks of a run share: a HashStore, in which whoever waits lets other ranks run."""

    of_run: ClassVar[dict[Any, Shared]] = {}  # by port or path; each run has another one

    def __init__(self, shared: Shared | None = None) -> None:
        super().__init__()
        self.shared = Shared() if shared is None else shared
        self.shared.stores.append(self)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        self.wait([key])
        return self.shared.store.get(key)

    def wait(self, keys: Iterable[str], timeout: Any = None) -> None:
        """Block until all keys are set. A time limit is that of the run."""
        for key in keys:
            self.shared.wait(partial(self.check, [key]), f"store.wait({key!r})")

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key when it holds `expected`, or is not set and `expected` is empty; return what it holds then."""
        held = self.shared.store.compare_set(key, expected, desired)
        if held == (desired.encode() if isinstance(desired, str) else desired):
            self.shared.changed()
        return held

    def multi_get(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of several keys, once all are set."""
        return [self.get(key) for key in keys]

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue, once there is one."""
        if block:
            self.shared.wait(lambda: self.queue_len(key) > 0, f"store.queue_pop({key!r})")
        return self.shared.store.queue_pop(key, False)

    def clone(self) -> "RankStore":
        return RankStore(self.shared)


def of_hash_store(name: str, changes: bool) -> Callable[..., Any]:
    """Return the operation of a HashStore. changes: whoever waits looks again after it."""

    def operation(self: RankStore, *arguments: Any) -> Any:
        result = getattr(self.shared.store, name)(*arguments)
        if changes:
            self.shared.changed()
        return result

    return operation


READS = "check delete_key has_extended_api list_keys num_keys queue_len"
WRITES = "add append multi_set queue_push set"
for _name in (*READS.split(), *WRITES.split()):
    if hasattr(dist.HashStore, _name):  # in this version of torch
        setattr(RankStore, _name, of_hash_store(_name, _name in WRITES.split()))
RankStore.deleteKey, RankStore.getNumKeys = RankStore.delete_key, RankStore.num_keys  # as a PrefixStore calls them


class RankTCPStore(RankStore):
    """Takes the place of TCPStore: ranks that name the same port share it."""

    def __init__(self, host_name: str, port: int, *_: Any, **__: Any) -> None:
        port = port or 29_500 + len(self.of_run)
        super().__init__(self.of_run.setdefault(port, Shared()))
        self.host, self.port = host_name, port


class RankFileStore(RankStore):
    """Takes the place of FileStore: ranks that name the same file share it. The file is not written."""

    def __init__(self, file_name: str, *_: Any, **__: Any) -> None:
        path = os.path.abspath(file_name)
        super().__init__(self.of_run.setdefault(path, Shared()))
        self.path = file_name
