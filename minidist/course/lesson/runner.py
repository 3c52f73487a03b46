"""Runs an answer on the cases of an exercise, in a separate process, and counts what the answer sent.

The process has the inputs of a case and not the expected values, and what an answer does to its process (exit, patch a
library, fill the memory) ends with it; see answer_process.py. What it says it has returned is read as plain values, and
what it has sent is counted here, from the record of each message.

Proved by: tests/lesson/test_judge.py, tests/lesson/test_cheats.py
"""

import atexit
import builtins
import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minidist.base.plain_pickle import BadPickleError
from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm import errors as message_errors
from minidist.comm.has_run import NotRunError
from minidist.comm.sim.links import LinkModel
from minidist.core.base import errors
from minidist.core.base.errors import MinidistError
from minidist.course.lesson.answer_process import MAX_PRINTED, RECORD, RECORDED, Answer, EndlessError, Job, Question
from minidist.course.lesson.exercise import Case, Exercise, Least
from minidist.course.lesson.library_calls import LibraryCallError
from minidist.course.lesson.one_rank import ForbiddenCallError, ParametersError, ProgramExitError
from minidist.course.lesson.plain import plain
from minidist.course.lesson.transport import dumps_of_exercise
from minidist.course.lesson.wire import Channel, unpack

SEED = "MINIDIST_LESSON_SEED"  # the environment variable that replaces today's date; not for the process of an answer
LINKS = LinkModel()
MAX_NAMES = 20  # of globals that an answer has changed
SERVER_S = 10.0  # seconds in which the server of processes ends one
OWNERS: list[Any] = []  # connections to the process that waits for the verdict: when one closes, nobody does


@dataclass(frozen=True)
class Limits:
    """How much an answer may use.

    compute_s: seconds that a rank may compute without communicating. run_s: seconds of a run, after which its process
    is killed. memory: bytes of address space above what the process has when it starts. messages: per run, as a
    multiple of what our solution sends.
    """

    compute_s: float = 2.0
    run_s: float = 30.0
    memory: int | None = None
    messages: int = 100


class ProcessEndedError(MinidistError):
    """The process that ran the answer ended, or had to be ended."""


@dataclass
class Outcome:
    """What one run returned, raised, sent, needed and printed.

    message: what the error says. changed: the globals of the function that runs have changed. sent: by all ranks
    together.
    """

    answers: list[Any]
    error: BaseException | None = None
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    sent: Least = Least(0, 0)  # noqa: RUF009 - a named tuple
    printed: str = ""
    changed: list[str] = field(default_factory=list)


class Account:
    """The messages of one run, by the record of each that the process sends when it is posted."""

    def __init__(self, ranks: int) -> None:
        self.messages, self.nbytes, self.last = [0] * ranks, [0] * ranks, 0.0

    def add(self, frame: bytes) -> None:
        try:
            _, rank, nbytes, when = RECORD.unpack(frame)
        except struct.error:
            raise BadPickleError("a record of a message that has another length") from None
        if not (0 <= rank < len(self.messages) and nbytes >= 0 and 0 <= when < math.inf):
            raise BadPickleError(f"a record of a message of {nbytes} B that rank {rank} sent at {when} s")
        self.messages[rank] += 1
        self.nbytes[rank] += nbytes
        self.last = max(self.last, when)

    def least_time(self) -> float:
        """Return the seconds that these messages take at least: the bytes of a rank leave one after the other."""
        busiest = LINKS.beta * max(self.nbytes) + LINKS.alpha * any(self.messages)
        return max(self.last, busiest) * (1 - 1e-9)


class Runner:
    """The process that runs one answer, as the judge sees it. A context manager; it ends with the block.

    cells: the files of a notebook's cells and their names.
    """

    def __init__(
        self,
        exercise: Exercise,
        answer: Answer,
        path: Sequence[str],
        limits: Limits,
        cells: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.exercise, self.limits = exercise, limits
        self.inputs: tuple[Case | None, list[bytes]] = (None, [])
        mine, theirs = socket.socketpair()
        mine.settimeout(limits.run_s)
        self.channel = Channel(mine)
        self.server = start_server()
        with theirs:
            self.server.start_process(theirs)
        job = Job(exercise.task, answer, tuple(path), cells, limits.compute_s, limits.memory)
        with suppress(OSError):
            self.channel.send(dumps_of_exercise(job))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, case: Case, buffered: bool, messages: int) -> Outcome:
        """Return the outcome of a run."""
        return self._ask(case, Question(self._inputs_of(case), buffered, self._most(messages)))

    def run_apart(self, case: Case, messages: int) -> Outcome:
        """Return the outcome of a run in which each rank has the function's globals for itself, as a process would.

        Its `changed` are the globals that the runs before it have changed.
        """
        return self._ask(case, Question(self._inputs_of(case), False, self._most(messages), True))

    def traces(self) -> list[Trace]:
        """Return the traces of the last run; none when the process has ended."""
        try:
            self.channel.send(pickle.dumps(None))
            rows = unpack(self.channel.receive(time.monotonic() + self.limits.run_s, OWNERS))
            return [
                Trace(rank, len(rows), [MessageEvent(*m) for m in messages], [SpanEvent(*s) for s in spans], memory)
                for rank, (messages, spans, memory) in enumerate(rows)
            ]
        except (EOFError, OSError, BadPickleError, TypeError, ValueError):
            return []

    def _inputs_of(self, case: Case) -> list[bytes]:
        if self.inputs[0] != case:
            self.inputs = case, [dumps_of_exercise(self.exercise.arguments(case, rank)) for rank in range(case.ranks)]
        return self.inputs[1]

    def _most(self, messages: int) -> int:
        return self.limits.messages * (messages + 10)

    def _ask(self, case: Case, question: Question) -> Outcome:
        account, until = Account(case.ranks), time.monotonic() + self.limits.run_s
        try:
            self.channel.send(pickle.dumps(question))
            while True:
                frame = self.channel.receive(until, OWNERS)
                if frame[:1] != RECORDED:
                    return outcome_of(unpack(frame), account, case.ranks)
                account.add(frame)
        except BadPickleError as error:
            why = f"what the process that ran the function sent is no outcome of a run: {error}"
        except TimeoutError:
            why = f"the run was still going on after {self.limits.run_s:g} s"
        except (EOFError, OSError):
            code = self._end()
            why = "the process that ran the function ended" + (f", with exit code {code}" if code is not None else "")
        self._end()
        return Outcome([], ProcessEndedError(why), why)

    def _end(self) -> int | None:
        """End the process and close the channel; return the process's exit code, None where nobody knows it."""
        if self.channel.socket.fileno() < 0:
            return None
        self.channel.socket.close()
        return self.server.end_process()


def outcome_of(value: Any, account: Account, ranks: int) -> Outcome:
    """Return the outcome that the process of an answer describes. Raises BadPickleError when it describes none."""
    if not isinstance(value, dict):
        raise BadPickleError("not a table")
    kinds = {"answers": list, "error": list, "message": str, "printed": str, "changed": list, "waiting": list}
    found = {name: value.get(name, kind()) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if not isinstance(found[name], kind):
            raise BadPickleError(f"its {name} is a {type(found[name]).__name__}")
    seconds, memory = value.get("time", 0.0), value.get("memory", 0)
    if not isinstance(seconds, float | int) or not isinstance(memory, int) or not math.isfinite(seconds):
        raise BadPickleError("its time or its memory is not a number")

    metrics = {
        "bytes": max(account.nbytes),
        "messages": max(account.messages),
        "time": float(seconds),
        "memory": memory,
    }
    error = error_of(found["error"], found["message"], found["waiting"]) if found["error"] else None
    if error is None and len(found["answers"]) != ranks:
        raise BadPickleError(f"{len(found['answers'])} answers of {ranks} ranks")
    if error is None and seconds < account.least_time():
        raise BadPickleError(f"it took {seconds:g} s, and its messages take at least {account.least_time():g} s")
    sent = Least(sum(account.messages), sum(account.nbytes))
    answers = [plain(answer) for answer in found["answers"]]  # within the limits of size and depth
    changed = [str(name)[:MAX_PRINTED] for name in found["changed"][:MAX_NAMES]]
    printed, message = found["printed"][:MAX_PRINTED], found["message"][:MAX_PRINTED]
    return Outcome(answers, error, message, metrics, sent, printed, changed)


def error_of(names: list[Any], message: str, waiting: list[Any]) -> BaseException:
    """Return an exception of the first of these classes that the judge knows, with this text."""
    kind = next((KNOWN[name] for name in names if isinstance(name, str) and name in KNOWN), RuntimeError)
    error: BaseException = kind.__new__(kind, message)
    error.args = (message,)
    with suppress(TypeError, ValueError):
        error.waiting = [SimpleNamespace(rank=rank, what=str(what)) for rank, what in waiting]  # type: ignore[attr-defined]
    return error


KNOWN: dict[str, type[BaseException]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *vars(builtins).values(),
        *vars(errors).values(),
        *vars(message_errors).values(),
        *(LibraryCallError, ForbiddenCallError, ParametersError),
        *(ProgramExitError, EndlessError, NotRunError),
    )
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def environment() -> dict[str, str]:
    """Return the environment variables of a process that imports this minidist, and computes in one thread."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}


def start_main(module: str, descriptor: int, variables: dict[str, str], **more: Any) -> "subprocess.Popen[bytes]":
    """Start `main(descriptor)` of a module of this folder in a process that prints nothing; it gets the descriptor.

    It has its own session, because Ctrl-C in the terminal of a notebook is for the notebook.
    """
    program = f"from minidist.course.lesson.{module} import main; main({descriptor})"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env=variables,
        **more,
    )


class Server:
    """The process that forks one process for each answer. It has never had an exercise in its memory."""

    def __init__(self) -> None:
        self.control, there = socket.socketpair()
        self.control.settimeout(SERVER_S)
        own = {name: value for name, value in environment().items() if name != SEED}
        with there:
            self.process = start_main("answer_process", there.fileno(), own, stderr=subprocess.DEVNULL)
        self.owner, self.is_busy = os.getpid(), False

    def start_process(self, end: socket.socket) -> None:
        """Start a process that serves the other end of a pair of sockets."""
        self.is_busy = True
        with suppress(OSError):
            socket.send_fds(self.control, [b"s"], [end.fileno()])

    @property
    def alive(self) -> bool:
        """Whether it runs, and belongs to this process: one that was forked has none."""
        return self.owner == os.getpid() and self.control.fileno() >= 0 and self.process.poll() is None

    def end_process(self) -> int | None:
        """End the process of the answer; return its exit code, or None when the server has ended, too."""
        try:
            self.control.sendall(b"e")
            data = self.control.recv(4)
            self.is_busy = False
            return int(struct.unpack("<i", data)[0])
        except (OSError, struct.error):
            self.process.kill()
            self.end()
            return None

    def end(self) -> None:
        """End the server, and with it the process that it has started."""
        if self.owner != os.getpid():
            return
        self.control.close()
        try:
            self.process.wait(SERVER_S if self.is_busy else 0)  # it ends what it has started
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()


_servers: list[Server] = []


def start_server() -> Server:
    """Return the server of this process, started now if there is none: it takes half a second to be ready."""
    if not _servers or not _servers[-1].alive:
        _servers[:] = [Server()]
        atexit.register(_servers[0].end)
    return _servers[0]
