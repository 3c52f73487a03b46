"""Nothing hangs: when an MPI operation is pending for too long, say who waits for what on every rank, and end the job.

A thread beside each rank looks once a second at what the main program waits in (reading one attribute: the rank pays
nothing) and writes it, with the trace so far, into a file of its own. The files survive a killed process. The first
rank that has waited longer than the timeout reads all of them and prints one report.
"""

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.base.trace import MessageEvent
from minidist.comm.call_site import Site, site_of, user_site
from minidist.comm.communicator import ANY, Comm, Request, Work
from minidist.comm.mpi.hints import hints
from minidist.comm.waiting import Waiting, error_line, find_cycle

if TYPE_CHECKING:
    from minidist.comm.mpi.world import MPIWorld

RETURNED = "has returned, and waits for the others to finish"
INTERVAL = 1.0  # seconds between two looks
_FIELDS = tuple(field.name for field in fields(MessageEvent))
_values = attrgetter(*_FIELDS)  # a tenth of the time of dataclasses.asdict


class Entering:
    """What a rank waits in while it makes a communicator: for the watchdog's report."""

    def __init__(self, comm: Comm) -> None:
        self.peers = [member for member in comm.members if member != comm.members[comm.rank]]
        self.text = f"making the communicator {comm.name} of ranks {list(comm.members)}, at {user_site(2)}"

    def describe(self) -> str:
        return self.text


class Exchanging:
    """What a rank waits in during a sendrecv of which no requests are kept."""

    __slots__ = ("comm", "dest", "nbytes", "source", "tag")

    def __init__(self, comm: Comm, dest: int, source: int, tag: int, nbytes: int) -> None:
        self.comm, self.dest, self.source, self.tag, self.nbytes = comm, dest, source, tag, nbytes

    def describe(self) -> str:
        dest, source = self.comm.members[self.dest], self.comm.members[self.source]
        return f"{self.comm.operation}: sendrecv to rank {dest} and from rank {source}, tag {self.tag}, {self.nbytes} B"


class Returned:
    """What a rank waits in when its program is over: for the others to finish, whom it may have to report."""


class Watchdog:
    """Watches one rank of an MPIWorld until `stop()`."""

    def __init__(self, world: "MPIWorld", timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.interval = min(INTERVAL, timeout / 4)
        folder = world.base.bcast(tempfile.mkdtemp(prefix="minidist-") if world.rank == 0 else None)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)  # on another host it is not there yet
        self.written = 0
        self.main_thread = threading.get_ident()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watchdog")
        self.thread.start()

    def stop(self) -> None:
        """The rank is done: forget everything."""
        self.stopping.set()
        self.thread.join()
        for path in (self._state_file(self.world.rank), self._trace_file()):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()  # the last rank of a host succeeds

    def _state_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.json"

    def _trace_file(self, rank: int | None = None) -> Path:
        return self.folder / f"rank{self.world.rank if rank is None else rank}.trace.jsonl"

    def _watch(self) -> None:
        self.write()
        seen: object = None
        completed, since = -1, time.monotonic()
        while not self.stopping.wait(self.interval):
            now = self.world.waiting
            if now is not seen or now is None or self.world.completed != completed:  # lanes may be busy meanwhile
                seen, completed, since = now, self.world.completed, time.monotonic()
            self.write()
            if now is not None and time.monotonic() - since > self.timeout:
                self.report()
                return

    def write(self) -> None:
        """This rank's state and its trace so far, into its files."""
        world, now = self.world, self.world.waiting
        waiting = Exchanging(*now) if isinstance(now, tuple) else now
        state: dict[str, object] = {"rank": world.rank, "state": world.state, "peers": []}
        if waiting is not None and world.state != "returned":
            assert isinstance(waiting, Request | Work | Entering | Exchanging)
            state |= {"state": "waiting", "what": waiting.describe()}
            if isinstance(waiting, Request):
                members = waiting.comm.members
                state["peers"] = (
                    [m for m in members if m != world.rank] if waiting.peer == ANY else [members[waiting.peer]]
                )
                state["message"] = dict(zip(_FIELDS, _values(waiting.event), strict=True))
            elif isinstance(waiting, Exchanging):
                state["peers"] = [waiting.comm.members[waiting.source]]
            elif isinstance(waiting, Entering):
                state["peers"] = waiting.peers
            site = self._site()
            if str(site) not in str(state["what"]):
                state["what"] = f"{state['what']}, waited for at {site}"
            if (error := world.handling) is not None:
                state["what"] = f"{state['what']}, while it handles {error_line(error)}"
            lanes = [waited.describe() for lane in tuple(world.active) if (waited := lane.waiting) is not None]
            if lanes:
                state["what"] = f"{state['what']}; its lane waits in {'; '.join(lanes)}"
        elif world.state == "computing":
            state["what"] = f"computing at {self._site()}"
        temporary = self._state_file(world.rank).with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.rename(self._state_file(world.rank))
        messages = world.trace.messages
        if len(messages) > self.written:
            new = messages[self.written :]
            with self._trace_file().open("a") as file:
                for message in new:
                    file.write(
                        json.dumps({"event": "message", **dict(zip(_FIELDS, _values(message), strict=True))}) + "\n"
                    )
            self.written += len(new)

    def _site(self) -> Site:
        """Where the main program is. While a lane has the processor, the main program's stack is its greenlet's."""
        return site_of(self.world.main.gr_frame or sys._current_frames().get(self.main_thread))

    def report(self) -> None:
        """Print every rank's pending operation (once for the job) and end the job."""
        try:
            os.close(os.open(self.folder / "reported", os.O_CREAT | os.O_EXCL))
            self._await_the_others()
            print(self.text(), file=sys.stderr, flush=True)
            time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the abort
        except FileExistsError:
            for _ in range(40):  # somebody else reports and ends the job; go on only if it could not
                self.write()
                time.sleep(self.interval)
        self.world.MPI.COMM_WORLD.Abort(1)

    def _await_the_others(self) -> None:
        """Until each has written what it does now: two looks, or more on a machine that is busy, at most 5 s."""
        began = time.time()
        time.sleep(1.5 * self.interval)
        self.write()
        files = [path for rank in range(self.world.size) if (path := self._state_file(rank)).exists()]
        while time.time() < began + 5 and any(path.exists() and path.stat().st_mtime < began for path in files):
            time.sleep(self.interval / 4)

    def _messages(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has posted so far."""
        path = self._trace_file(rank)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def text(self) -> str:
        """The report."""
        lines = [
            f"minidist: no progress on rank {self.world.rank} for {self.timeout:g} s (--timeout); "
            "every rank's pending operation:"
        ]
        waiting, states = [], {}
        for rank in range(self.world.size):
            path = self._state_file(rank)
            if not path.exists():
                lines.append(f"  rank {rank}: unknown (it runs on another host, or died before it could say)")
                continue
            state = states[rank] = json.loads(path.read_text())
            if state["state"] == "waiting":
                lines.append(f"  rank {rank}: waits in {state['what']}")
                waiting.append(Waiting(rank, "main", tuple(state["peers"]), state["what"]))
            else:
                lines.append(f"  rank {rank}: {RETURNED if state['state'] == 'returned' else state['what']}")
        cycle = find_cycle(waiting)
        if cycle:
            lines.append("  circle: " + " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])))
        lines += [f"  hint: {hint}" for hint in hints(states, {rank: self._messages(rank) for rank in states})]
        lines.append(f"  traces so far: {self.folder}/rank*.trace.jsonl; minidist report {self.folder} draws them")
        return "\n".join(lines)
