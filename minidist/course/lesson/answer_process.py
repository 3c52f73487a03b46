"""The process that runs one answer, and the server that forks it: what judges is in neither.

The server is started anew, so it has never had an exercise in its memory: no case, no seed, no expected value. Each
answer runs in a fork of the server, in a new process group and an empty folder. A fork gets the ranks' inputs as data,
and sends a record of each message when the message is posted. It cannot take a record back.

    judge ── a socket ──▶ server: fork ──▶ process of an answer
    judge ── Task, then for each run the ranks' inputs ──▶ process of an answer: SimWorld, one greenlet per rank
    judge ◀── (rank, bytes, time) of each message, then what was returned ── process of an answer

When the judge ends, the server ends, and with it the answer's process and what that has forked.

Proved by: tests/lesson/test_judge.py, tests/lesson/test_cheats.py
"""

import contextlib
import ctypes
import importlib
import importlib.abc
import io
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn, Protocol

import numpy as np

from minidist.base.errors import DeadlockError, MinidistError, reason, text_of
from minidist.base.traces import Trace
from minidist.comm import SimWorld, call_site
from minidist.comm.errors import RankTimeoutError
from minidist.comm.program_lines import line_of_error
from minidist.comm.sim.watched import Watched
from minidist.core.comm import Comm
from minidist.core.comm.sim.matching import SimRequest
from minidist.course.lesson.library_calls import refuse_library_calls
from minidist.course.lesson.one_rank import Task, one_rank
from minidist.course.lesson.plain import plain
from minidist.course.lesson.wire import Channel, pack

BUFFERED = 1 << 40  # bytes up to which a send is buffered: all of them
MAX_PRINTED = 10_000  # characters of what an answer prints in a run
RECORD = struct.Struct("<ciqd")  # RECORDED, rank, bytes and time of a message
RECORDED = b"m"
EXERCISES = tuple(f"minidist.course.lesson.{folder}" for folder in ("exercises", "assignments", "puzzles"))
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # of Linux's prctl


class Answer(Protocol):
    """Loads the function that is judged, in the process that runs it: `transport.Packed`, `submission.Source`."""

    def load(self) -> Callable[..., Any]:
        """Return the function, with a new dictionary of globals."""


class EndlessError(MinidistError):
    """A program sends messages without end."""


@dataclass(frozen=True)
class Job:
    """What a process is to run. cells: the files of a notebook's cells and their names. See `runner.Limits`."""

    task: Task
    answer: Answer
    path: tuple[str, ...]
    cells: tuple[tuple[str, str], ...]
    compute_s: float
    memory: int | None


@dataclass(frozen=True)
class Question:
    """One run.

    inputs: of each rank, pickled. most: messages. apart: each rank has the function's globals for itself; the outcome
    names those that earlier runs have changed.
    """

    inputs: list[bytes]
    buffered: bool
    most: int
    apart: bool = False


# the server -----------------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Run one answer after the other, for the judge at the other end of the socket, until it closes it."""
    control = socket.socket(fileno=descriptor)
    _prctl(CHILD_SUBREAPER, 1)  # so that what an answer has forked is a child of this process when the answer ends
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with tempfile.TemporaryDirectory(prefix="minidist-answer-", ignore_cleanup_errors=True) as folder:
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                _be_answer(control, descriptors[0], folder, parent)
            os.close(descriptors[0])
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            question = control.recv(1)  # that the run is over, or the end of the judge
            code = _end(pid)
        if not question:
            return
        control.sendall(struct.pack("<i", code))


def _be_answer(control: socket.socket, descriptor: int, folder: str, parent: int) -> NoReturn:
    try:
        control.close()
        os.setpgid(0, 0)
        _prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.chdir(folder)
        if os.getppid() == parent:  # it may have ended before the signal was asked for
            serve(Channel(socket.socket(fileno=descriptor)))
    finally:
        os._exit(0)


def _end(pid: int) -> int:
    """Kill a process and what it has forked; return its exit code, which is its result if it had already ended."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError, ValueError):
        while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for child in map(int, children):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return code


def _prctl(option: int, value: int) -> None:
    """Ask Linux for something; other systems have no prctl."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value)


# the process of an answer ---------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    """Load the answer and run it for each question of the judge, until it closes the channel."""
    refuse_exercises()
    job: Job = pickle.loads(channel.receive())
    call_site.cells.update(job.cells)
    original = refuse_library_calls(job.task.written_by_hand)
    if job.memory is not None:
        bound = _address_space() + job.memory
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    sys.path[:] = [*job.path, *(place for place in sys.path if place and place not in job.path)]
    problem, function, loaded = None, None, {}
    try:
        function = original(job.answer.load())
        loaded = global_values(function)
    except BaseException as error:
        text = f"the function cannot be loaded in the process that runs it: {reason(error, named=True)}"
        problem = {"error": ["minidist.core.base.errors.UsageError"], "message": "".join(text)}

    traces: list[Trace] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            question: Question | None = pickle.loads(channel.receive())
            if question is None:
                channel.send(pack([_rows(trace) for trace in traces]))
            elif problem is not None or function is None:
                channel.send(pack(problem))
            else:
                copies = [original(job.answer.load()) for _ in question.inputs] if question.apart else function
                outcome, traces = run(job, copies, question, channel)
                if question.apart:
                    outcome["changed"] = _changed(loaded, global_values(function))
                channel.send(pack(outcome))


def _changed(before: dict[str, bytes], now: dict[str, bytes]) -> list[str]:
    """Return the names whose values differ from those before."""
    return [name for name, value in now.items() if value != before.get(name)]


def run(
    job: Job, function: Callable[..., Any] | Sequence[Callable[..., Any]], question: Question, channel: Channel
) -> tuple[dict[str, Any], list[Trace]]:
    """Run the function on all ranks; return what it did as plain values. Of several functions each rank runs one."""

    def main(comm: Comm) -> Any:
        own = function[comm.rank] if isinstance(function, Sequence) else function
        return one_rank(job.task, own, question.inputs[comm.rank], comm)

    world = CountedWorld(
        len(question.inputs),
        question.most,
        channel,
        links=job.task.links,
        eager_bytes=BUFFERED if question.buffered else 0,
        timeout=job.compute_s,
    )
    outcome: dict[str, Any] = {"answers": []}
    printed = _Printed()

    # Whatever the function raises becomes part of the outcome; sys.exit() and KeyboardInterrupt, too.
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            outcome["answers"] = [plain(answer) for answer in world.run(main)]
        except BaseException as error:
            text = sentence_of(error)
            name = "" if isinstance(error, DeadlockError) else type(error).__name__
            line = None if isinstance(error, MinidistError) else line_of_error(error)
            where = f", at {line}" if line is not None else ""
            # The answer's text may be an instance of a subclass of str; "".join makes it a str.
            outcome["message"] = "".join([": ".join(part for part in (name, text) if part), where])
            outcome["error"] = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
            if isinstance(error, DeadlockError):
                outcome["waiting"] = [(waiting.rank, str(waiting.what)) for waiting in error.waiting]

    for trace, shown in zip(world.traces, world.shown, strict=True):
        trace.memory, trace.spans = shown.memory, [*trace.spans, *shown.spans]
    outcome |= {
        "printed": printed.getvalue(),
        "time": world.end_time,
        # Only exercises about memory keep an account.
        "memory": max((sum(live.values()) for trace in world.traces for _, live in trace.memory), default=0),
    }
    return outcome, world.traces


def sentence_of(error: BaseException) -> str:
    """Return the text of an error; of one about time without its flag, for the time of an answer is fixed."""
    text = text_of(error)
    return text.partition(", or raise")[0] if isinstance(error, RankTimeoutError) else text


def _rows(trace: Trace) -> list[list[tuple[Any, ...]]]:
    """Return a trace's messages, spans and memory as plain values."""
    events = [
        [tuple(getattr(event, name) for name in event.__slots__) for event in events]
        for events in (trace.messages, trace.spans)
    ]
    return [*events, [(time, dict(live)) for time, live in trace.memory]]


def refuse_exercises() -> None:
    """Let no exercise be imported from here on."""
    sys.meta_path.insert(0, _NoExercises())


def _outside(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function uses, and the variables of the functions around it."""
    code, names = function.__code__, function.__globals__
    values = {name: names[name] for name in _names(code) if name in names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            values[name] = cell.cell_contents
    return values


def global_values(function: Callable[..., Any]) -> dict[str, bytes]:
    """Return the values of what calls of a function could share: containers among its globals, defaults and closure."""
    function = getattr(function, "__func__", getattr(function, "func", function))
    if not isinstance(function, FunctionType):
        return {}
    values: dict[str, Any] = {}
    todo, seen = [function], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _outside(one).items():
            if isinstance(value, FunctionType) and not (value.__module__ or "").startswith("minidist"):
                todo.append(value)
            elif isinstance(value, list | dict | set | bytearray | np.ndarray | int | float):
                values[name] = value
        for number, value in enumerate(one.__defaults__ or ()):
            values[f"default argument {number + 1} of {one.__name__}"] = value
    return {name: repr(plain(value)).encode() for name, value in values.items()}


def _names(code: CodeType) -> set[str]:
    """Return the names that the code, or code inside it, may look up as globals."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _address_space() -> int:
    """Return the bytes of this process's address space, as Linux counts them; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


class _NoExercises(importlib.abc.MetaPathFinder):
    """Refuses to import an exercise: its module computes what is expected."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(EXERCISES):
            raise ImportError(f"{name} belongs to the judge, and the process that runs an answer does without it")


class _Printed(io.StringIO):
    """What an answer prints, up to MAX_PRINTED characters."""

    def write(self, text: str) -> int:
        room = MAX_PRINTED - self.tell()
        super().write(text[: max(0, room)])
        return len(text)

    def close(self) -> None:
        """Stay open: what an answer closes is still read."""


class CountedWorld(SimWorld):
    """A simulated world that tells each message to the judge, and stops a program which sends without end.

    shown: the traces that a rank's program sees. The record of the run is another one.
    """

    def __init__(self, ranks: int, most: int, channel: Channel, **options: Any) -> None:
        super().__init__(ranks, **options)
        self.most, self.channel = most, channel
        self.shown = [Trace(rank, ranks) for rank in range(ranks)]

    def _new_matching(self) -> Watched:
        return _CountedMatching(self.most, self.channel, self.state, self._block, self._watchers())

    def trace_of(self, comm: Any) -> Trace:
        return self.shown[comm.members[comm.rank]]


class _CountedMatching(Watched):
    """The messages of a run: at most `most`, each told to the judge when it is sent."""

    def __init__(self, most: int, channel: Channel, *parts: Any) -> None:
        super().__init__(*parts)
        self.most, self.channel, self.posts = most, channel, 0

    def post(self, comm: Any, kind: str, array: np.ndarray, *more: Any) -> SimRequest:
        if self.posts > self.most:
            raise EndlessError(f"stopped after {self.posts} messages, many times what the solution sends")
        self.posts += 1
        request = super().post(comm, kind, array, *more)
        if kind == "send":
            stream = request.stream
            self.channel.send(RECORD.pack(RECORDED, stream.rank, array.nbytes, stream.time))
        return request
