"""A job's folder in the temporary directory: what each rank does now, its messages so far, and who has reported.

Ranks that hang or die can tell each other nothing through MPI, but files survive a killed process. Nothing in here
raises: a full disk or a removed folder costs what the file would have said, and nothing else.

    minidist-run-ab12/  rank0.json  rank0.trace.jsonl  rank1.json  rank1.trace.jsonl  reported

When ranks disagree, a file `asked` makes each write its last collective calls, too: rank0.calls.json.

A job that ends by itself removes its folder. One that was killed leaves it, and a report names it; the first job on the
same host that starts a week later removes it.

Proved by: tests/comm/mpi/test_watchdog.py, tests/comm/mpi/test_failures.py
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minidist.base.read_file import parse_json

PREFIX = "minidist-run-"
KEPT_DAYS = 7
NOWHERE = os.path.join(os.devnull, "no folder")  # in which no file can be made
_OURS = re.compile(r"rank\d+(\.calls)?\.(json|tmp)|rank\d+\.(trace\.jsonl|interrupted)|reported|asked|said-[0-9a-f]+")


class JobFolder:
    """The folder of a job on this host; path: None when none could be made, and then nothing is written."""

    def __init__(self, path: str | None) -> None:
        self.exists, self.path = path is not None, Path(path or NOWHERE)
        self._make()  # on another host than rank 0's it is not there yet

    def _make(self) -> None:
        with suppress(OSError):
            self.path.mkdir(parents=True, exist_ok=True)

    # what a rank writes -----------------------------------------------------------------------------------------------

    def write_state(self, rank: int, state: Mapping[str, object], what: str = "") -> None:
        """Write what a rank does now, in place of what it wrote before. what: ".calls" for its collective calls."""
        path = self.path / f"rank{rank}{what}.json"
        text = json.dumps(state, default=str)

        # Through a file of another name, so that no reader sees half of it. Somebody may have cleaned up meanwhile.
        for _ in range(2):
            try:
                temporary = path.with_suffix(".tmp")
                temporary.write_text(text)
                temporary.rename(path)
                return
            except OSError:
                self._make()

    def ask(self) -> float:
        """Ask all ranks for their collective calls, from now on; return the time of the question."""
        self.first("asked")
        return time.time()

    def is_asked(self) -> bool:
        """Return whether a rank has asked for the collective calls."""
        return (self.path / "asked").exists()

    def append_messages(self, rank: int, messages: Iterable[Mapping[str, Any]]) -> bool:
        """Add messages to those that a rank has posted so far; return whether they are written."""
        path, size = self.path / f"rank{rank}.trace.jsonl", None
        try:
            with path.open("a") as file:
                size = file.tell()
                file.writelines(json.dumps({"event": "message", **message}, default=str) + "\n" for message in messages)
        except OSError:
            with suppress(OSError):
                if size is not None:
                    os.truncate(path, size)  # half a line would spoil the ones that follow
            return False
        return True

    # what the others read ---------------------------------------------------------------------------------------------

    def state(self, rank: int, what: str = "") -> dict[str, Any] | None:
        """Return what a rank wrote last; None when there is nothing, or nothing that can be read."""
        try:
            found = parse_json((self.path / f"rank{rank}{what}.json").read_text(), any_float=True)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and (what or "state" in found) else None

    def written_at(self, rank: int, what: str = "") -> float | None:
        """Return when a rank wrote last, in seconds since the epoch; None when it has not."""
        try:
            return (self.path / f"rank{rank}{what}.json").stat().st_mtime
        except OSError:
            return None

    def messages(self, rank: int) -> list[dict[str, Any]]:
        """Return the messages that a rank has posted so far, as far as they can be read."""
        found = []
        with suppress(OSError, ValueError):  # a full disk leaves half a line at the end
            for line in (self.path / f"rank{rank}.trace.jsonl").read_text().splitlines():
                found.append(parse_json(line, any_float=True))
        return found

    def first(self, what: str) -> bool:
        """Return whether this is the first rank of its host that asks for `what`: that one reports it."""
        for _ in range(2):
            try:
                os.close(os.open(self.path / what, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return True
            except FileExistsError:
                return False
            except OSError:
                self._make()
        return True

    def is_gone(self) -> bool:
        """Return whether the folder has been removed."""
        return self.exists and not self.path.exists()

    def note_interrupt(self, rank: int, computes: bool) -> bool:
        """Note whether a rank computes after Ctrl-C, and may save; return whether another one of this host does."""
        mine = self.path / f"rank{rank}.interrupted"
        with suppress(OSError):
            mine.touch() if computes else mine.unlink(missing_ok=True)
            return any(path != mine for path in self.path.glob("rank*.interrupted"))
        return False

    # its end ----------------------------------------------------------------------------------------------------------

    def leave(self, rank: int) -> None:
        """Remove a rank's files; the last rank of a host removes the folder."""
        written = ("json", "tmp", "trace.jsonl", "calls.json", "calls.tmp", "interrupted")
        for name in (*(f"rank{rank}.{ending}" for ending in written), "asked"):
            with suppress(OSError):
                (self.path / name).unlink()
        with suppress(OSError):
            self.path.rmdir()

    def discard(self) -> None:
        """Remove the folder with everything in it: the job ends, and no report names it."""
        shutil.rmtree(self.path, ignore_errors=True)


def make_job_folder() -> str | None:
    """Make a folder for a new job and return its path; None where there is no room for one."""
    try:
        return tempfile.mkdtemp(prefix=PREFIX)
    except OSError:
        return None


def remove_old_folders(days: float = KEPT_DAYS) -> None:
    """Remove the folders that killed jobs of this user have left on this host, and that have not changed for `days`."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
            with suppress(OSError):
                old = time.time() - path.stat().st_mtime > days * 86400
                mine = not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()
                # Only what a job of ours writes: a name alone proves nothing.
                if old and mine and all(_OURS.fullmatch(entry.name) for entry in path.iterdir()):
                    shutil.rmtree(path, ignore_errors=True)
