"""Nothing hangs: when an MPI operation is pending for too long, the pending operations of all ranks are reported.

A thread beside each rank looks once a second at what the main program waits in (reading one attribute: the rank pays
nothing) and writes it, with the trace so far, into a file of its own. The files survive a killed process. The first
rank that has waited longer than the timeout reads all of them, prints one report and ends the job.

    rank 0   waits ... timeout ──▶ read rank*.json, rank*.trace.jsonl ──▶ report ──▶ Abort
    rank 1   waits ... writes what it waits in ──▶ rank1.json, rank1.trace.jsonl

Proved by: tests/comm/mpi/test_failures.py
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
from typing import Any

from minidist.base.trace import MessageEvent
from minidist.comm.call_site import CallSite, call_site
from minidist.comm.mpi.hints import hints
from minidist.comm.mpi.waits import Entering, Exchanging, Watched
from minidist.comm.point_to_point import ANY, Request, Work
from minidist.comm.waiting import Waiting, error_line, find_cycle

INTERVAL = 1.0  # seconds between two looks
_FIELDS = tuple(field.name for field in fields(MessageEvent))
_values = attrgetter(*_FIELDS)


class Watchdog:
    """Watches one rank of an MPIWorld until `stop()`. Making one is a call of all ranks."""

    def __init__(self, world: Watched, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.interval = min(INTERVAL, timeout / 4)

        # One folder for the job: rank 0 makes it and tells the others.
        folder = world.base.bcast(tempfile.mkdtemp(prefix="minidist-") if world.rank == 0 else None)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)  # on another host it is not there yet

        self.written = 0
        self.main_thread = threading.get_ident()
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watchdog")
        self.thread.start()

    def stop(self) -> None:
        """End the watch and remove the files: the rank is done."""
        self.stopping.set()
        self.thread.join()
        for path in (self._state_file(self.world.rank), self._trace_file(self.world.rank)):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()  # the last rank of a host succeeds

    def _state_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.json"

    def _trace_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.trace.jsonl"

    def _watch(self) -> None:
        # The clock starts again with each new wait, and with each message that a stream completes meanwhile.
        self.write()
        seen: object = None
        completed, since = -1, time.monotonic()
        while not self.stopping.wait(self.interval):
            now = self.world.waiting
            if now is not seen or now is None or self.world.completed != completed:  # streams may be busy meanwhile
                seen, completed, since = now, self.world.completed, time.monotonic()
            self.write()
            if now is not None and time.monotonic() - since > self.timeout:
                self.report()
                return

    def write(self) -> None:
        """Write this rank's state, and what is new in its trace, into its files."""
        # The state goes through a file of another name, so that no reader sees half of it.
        path = self._state_file(self.world.rank)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._state()))
        temporary.rename(path)

        messages = self.world.trace.messages
        if len(messages) > self.written:
            new = messages[self.written :]
            with self._trace_file(self.world.rank).open("a") as file:
                for message in new:
                    file.write(json.dumps({"event": "message", **_as_dict(message)}) + "\n")
            self.written += len(new)

    def _state(self) -> dict[str, object]:
        """Return what this rank does now: rank, state, peers, and what it waits in, with the line."""
        world, now = self.world, self.world.waiting
        waiting = Exchanging(*now) if isinstance(now, tuple) else now
        state: dict[str, object] = {"rank": world.rank, "state": world.state, "peers": []}
        if world.state == "returned":
            return state
        if waiting is None:
            return state | {"what": f"computing at {self._site()}"}

        # What it waits in, and which ranks could end the wait.
        assert isinstance(waiting, Request | Work | Entering | Exchanging)
        what = waiting.describe()
        if isinstance(waiting, Request):
            members = waiting.comm.members
            others = [member for member in members if member != world.rank]
            state["peers"] = others if waiting.peer == ANY else [members[waiting.peer]]
            state["message"] = _as_dict(waiting.event)
        elif isinstance(waiting, Exchanging):
            state["peers"] = [waiting.comm.members[waiting.source]]
        elif isinstance(waiting, Entering):
            state["peers"] = waiting.peers

        # What the operation itself does not know: the line of the wait, an exception before it, the other streams.
        site = self._site()
        if str(site) not in what:
            what += f", waited for at {site}"
        if world.handling is not None:
            what += f", while it handles {error_line(world.handling)}"
        pending = [item.describe() for stream in tuple(world.active) if (item := stream.waiting) is not None]
        if pending:
            what += f"; its stream waits in {'; '.join(pending)}"
        return state | {"state": "waiting", "what": what}

    def _site(self) -> CallSite:
        """Return where the main program is. While a stream runs, the main program's stack is its greenlet's."""
        return call_site(self.world.main.gr_frame or sys._current_frames().get(self.main_thread))

    def report(self) -> None:
        """Print every rank's pending operation (once for the job) and end the job."""
        try:
            # Creating this file succeeds on one rank alone: that one reports.
            os.close(os.open(self.folder / "reported", os.O_CREAT | os.O_EXCL))
            self._await_the_others()
            print(self.text(), file=sys.stderr, flush=True)
            time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the abort
        except FileExistsError:
            for _ in range(40):  # another rank reports and ends the job; go on only if it could not
                self.write()
                time.sleep(self.interval)
        self.world.MPI.COMM_WORLD.Abort(1)

    def _await_the_others(self) -> None:
        """Wait until each has written what it does now: two looks, or more on a busy machine, at most 5 s."""
        # Their watchdogs write once per interval; a file older than this moment may be out of date.
        began = time.time()
        time.sleep(1.5 * self.interval)
        self.write()
        files = [path for rank in range(self.world.size) if (path := self._state_file(rank)).exists()]
        while time.time() < began + 5 and any(path.exists() and path.stat().st_mtime < began for path in files):
            time.sleep(self.interval / 4)

    def _messages(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has posted so far."""
        path = self._trace_file(rank)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def text(self) -> str:
        """Return the report."""
        lines = [
            f"minidist: no progress on rank {self.world.rank} for {self.timeout:g} s (--timeout); "
            "every rank's pending operation:"
        ]

        # Each rank's own file says what it waits in.
        waiting, states = [], {}
        for rank in range(self.world.size):
            path = self._state_file(rank)
            if not path.exists():
                lines.append(f"  rank {rank}: unknown (it runs on another host, or died before it could write)")
                continue
            state = states[rank] = json.loads(path.read_text())
            if state["state"] == "waiting":
                lines.append(f"  rank {rank}: waits in {state['what']}")
                waiting.append(Waiting(rank, "main", tuple(state["peers"]), state["what"]))
            elif state["state"] == "returned":
                lines.append(f"  rank {rank}: has returned, and waits for the others to finish")
            else:
                lines.append(f"  rank {rank}: {state['what']}")

        # What only all of them together show.
        cycle = find_cycle(waiting)
        if cycle:
            lines.append("  circle: " + " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])))
        lines += [f"  hint: {hint}" for hint in hints(states, {rank: self._messages(rank) for rank in states})]
        lines.append(f"  traces so far: {self.folder}/rank*.trace.jsonl; minidist report {self.folder} draws them")
        return "\n".join(lines)


def _as_dict(event: MessageEvent) -> dict[str, Any]:
    """Return the event's fields, in a tenth of the time of `dataclasses.asdict`."""
    return dict(zip(_FIELDS, _values(event), strict=True))
