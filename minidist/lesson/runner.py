"""Runs an answer on the cases of an exercise, in a process of its own.

The judge forks such a process for each answer. It has the inputs of a case and not the expected values, and what an
answer does to its process (exit, patch a library, fill the memory) ends with it.

    judge ── (case, buffered, messages) ──▶ runner: SimWorld, one greenlet per rank ── Outcome ──▶ judge

Proved by: tests/lesson/test_judge.py
"""

import contextlib
import io
import pickle
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import CodeType, FunctionType
from typing import Any, Protocol

import numpy as np

from minidist.base.errors import DeadlockError, MinidistError, UsageError, reason, text_of
from minidist.base.trace import Trace
from minidist.comm import Comm, SimWorld, call_site
from minidist.comm.sim.matching import Matching
from minidist.comm.sim.state import SimRequest
from minidist.lesson.exercise import Case, Exercise
from minidist.lesson.library_calls import refuse_library_calls
from minidist.lesson.one_rank import one_rank
from minidist.lesson.plain import plain

BUFFERED = 1 << 40  # bytes up to which a send is buffered: all of them
MAX_PRINTED = 10_000  # characters of what an answer prints in a run


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


class Answer(Protocol):
    """Loads the function that is judged, in the process that runs it: `transport.Packed`, `submission.Source`."""

    def load(self) -> Callable[..., Any]:
        """Return the function, with globals of its own."""


class EndlessError(MinidistError):
    """A program sends messages without end."""


class ProcessEndedError(MinidistError):
    """The process that ran the answer ended, or had to be ended."""


@dataclass
class Outcome:
    """What one run returned, raised, recorded, needed and printed.

    message: what the error says. changed: the globals of the function that the run has changed.
    """

    answers: list[Any]
    error: BaseException | None = None
    message: str = ""
    traces: list[Trace] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    printed: str = ""
    changed: list[str] = field(default_factory=list)


def run(
    exercise: Exercise,
    function: Callable[..., Any] | Sequence[Callable[..., Any]],
    case: Case,
    *,
    buffered: bool = False,
    messages: int = 1000,
    limits: Limits | None = None,
) -> Outcome:
    """Run the function on all ranks of a case, in this process. Of several functions each rank runs its own."""
    limits = limits or Limits()

    def main(comm: Comm) -> Any:
        own = function[comm.rank] if isinstance(function, Sequence) else function
        return one_rank(exercise, own, case, comm)

    world = LimitedWorld(
        case.ranks, limits.messages * (messages + 10), eager_bytes=BUFFERED if buffered else 0, timeout=limits.compute_s
    )
    outcome, printed = Outcome([]), _Printed()

    # Whatever the function raises becomes part of the outcome; sys.exit() and KeyboardInterrupt, too.
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            outcome.answers = [plain(answer) for answer in world.run(main)]
        except BaseException as error:
            outcome.error = _portable(error)
            text = text_of(error)
            name = "" if isinstance(error, DeadlockError) else type(error).__name__
            line = None if isinstance(error, MinidistError) else call_site.line_of_error(error)
            where = f", at {line}" if line is not None else ""
            outcome.message = ": ".join(part for part in (name, text) if part) + where

    outcome.printed, outcome.traces = printed.getvalue(), world.traces
    outcome.metrics = {
        "bytes": max(sum(message.nbytes for message in trace.sent()) for trace in world.traces),
        "messages": max(len(trace.sent()) for trace in world.traces),
        "time": world.end_time,
        # Only exercises about memory keep an account.
        "memory": max((sum(live.values()) for trace in world.traces for _, live in trace.memory), default=0),
    }
    return outcome


def _portable(error: BaseException) -> BaseException:
    """Return the error, or one of its nearest base class that the judge knows and that can be sent to it."""
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] not in ("builtins", "minidist"):
            continue
        try:
            candidate = error if kind is type(error) else kind(text_of(error))
            pickle.loads(pickle.dumps(candidate))
        except Exception:  # a class whose arguments cannot be sent, or are others
            continue
        return candidate
    return RuntimeError(text_of(error))


class Runner:
    """The process that runs one answer, as the judge sees it. A context manager; it ends with the block."""

    def __init__(self, exercise: Exercise, answer: Answer, path: Sequence[str], limits: Limits) -> None:
        self.limits = limits
        context = get_context("fork")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, exercise, answer, path, limits), daemon=True)
        self.process.start()
        there.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()

    def run(self, case: Case, buffered: bool, messages: int) -> Outcome:
        """Return the outcome of a run, without its traces."""
        return self._ask((case, buffered, messages, False))

    def run_apart(self, case: Case, messages: int) -> Outcome:
        """Return the outcome of a run in which each rank has the function's globals for itself, as a process would.

        Its `changed` are the globals that the usual run of the case changes.
        """
        return self._ask((case, False, messages, True))

    def traces(self) -> list[Trace]:
        """Return the traces of the last run; none when the process has ended."""
        return self._ask(None).traces

    def _ask(self, question: object) -> Outcome:
        try:
            self.connection.send(question)
            if self.connection.poll(self.limits.run_s):
                outcome: Outcome = self.connection.recv()
                return outcome
            why = f"the run was still going on after {self.limits.run_s:g} s"
        except (EOFError, OSError):
            self.process.join()
            why = f"the process that ran the function ended, with exit code {self.process.exitcode}"
        return Outcome([], ProcessEndedError(why), why)


def _serve(connection: Connection, exercise: Exercise, answer: Answer, path: Sequence[str], limits: Limits) -> None:
    """Answer the judge's questions until it closes the connection."""
    problem, function = None, None
    original = refuse_library_calls(exercise)
    # What judges is not here: an answer that looks around finds the inputs only.
    seen = replace(exercise, expected=_withheld, check_answers=_withheld, hints=())
    if limits.memory is not None:
        bound = _address_space() + limits.memory
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    sys.path[:] = [*path, *(place for place in sys.path if place not in path)]
    try:
        function = original(answer.load())
    except BaseException as error:
        text = f"the function cannot be loaded in the process that runs it: {reason(error, named=True)}"
        problem = Outcome([], UsageError(text), text)

    traces: list[Trace] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = connection.recv()
            if question is None:
                connection.send(Outcome([], traces=traces))
            elif problem is not None or function is None:
                connection.send(problem)
            else:
                case, buffered, messages, apart = question
                before = global_values(function) if apart else {}
                outcome = run(seen, function, case, buffered=buffered, messages=messages, limits=limits)
                if apart:
                    changed = [name for name, value in global_values(function).items() if value != before.get(name)]
                    copies = [original(answer.load()) for _ in range(case.ranks)]
                    outcome = run(seen, copies, case, messages=messages, limits=limits)
                    outcome.changed = changed
                traces = outcome.traces
                connection.send(replace(outcome, traces=[]))


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
        named = {name: one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__}
        closure = dict(
            zip(one.__code__.co_freevars, (cell.cell_contents for cell in one.__closure__ or ()), strict=True)
        )
        for name, value in {**named, **closure}.items():
            if isinstance(value, FunctionType) and not value.__module__.startswith("minidist"):
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


def _withheld(*arguments: Any) -> Any:
    raise UsageError("the judge knows this, and this process does not")


def _address_space() -> int:
    """Return the bytes of this process's address space, as Linux counts them; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


class _Printed(io.StringIO):
    """What an answer prints, up to MAX_PRINTED characters."""

    def write(self, text: str) -> int:
        room = MAX_PRINTED - self.tell()
        super().write(text[: max(0, room)])
        return len(text)


class LimitedWorld(SimWorld):
    """A simulated world that stops a program which sends without end."""

    def __init__(self, ranks: int, limit: int, **options: Any) -> None:
        super().__init__(ranks, **options)
        self.limit = limit

    def _new_matching(self) -> Matching:
        return _LimitedMatching(self.limit, self.state, self.failures, self._block)


class _LimitedMatching(Matching):
    """The messages of a run: at most `limit`."""

    def __init__(self, limit: int, *parts: Any) -> None:
        super().__init__(*parts)
        self.limit = limit

    def post(self, *arguments: Any, **keywords: Any) -> SimRequest:
        if self.posts > self.limit:
            raise EndlessError(f"stopped after {self.posts} messages, many times what the solution sends")
        return super().post(*arguments, **keywords)
