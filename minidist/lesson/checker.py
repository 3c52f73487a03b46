"""Checks an exercise as minidist's own tests check minidist: by properties, on generated cases.

The cases have one rank, numbers of ranks that are not a power of two, sizes that do not divide, empty arrays,
synchronous and buffered sends. They run from the smallest on, so the first failure is the smallest counterexample. At
the end the function runs under `mpiexec`, where ranks share nothing: a list that "communicates" for free in one process
fails there.

Proved by: tests/lesson/test_checker.py, tests/lesson/test_exercises.py
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minidist.base.errors import DeadlockError, RankTimeoutError
from minidist.base.trace import Trace
from minidist.comm import Comm, SimWorld
from minidist.comm.sim.matching import Matching
from minidist.comm.sim.state import SimRequest
from minidist.lesson.exercise import METRICS, Case, Exercise, Failure, Hint, find
from minidist.lesson.mpi_leg import run_under_mpi
from minidist.lesson.one_rank import one_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUFFERED = 1 << 40  # bytes up to which a send is buffered: all of them
TIMEOUT = 2.0  # seconds that a rank may compute
MAX_MESSAGES_OVER_PAR = 100  # a program that sends this many times the solution's messages counts as endless


class EndlessError(RuntimeError):
    """A program sends messages without end."""


@dataclass
class Result:
    """What a check found: whether it passed, the text that `check` prints, and the counterexample's picture."""

    name: str
    passed: bool
    text: str
    hint: str = ""
    figure: "Figure | None" = None
    failure: Failure | None = None
    par: dict[str, float] = field(default_factory=dict)
    yours: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.passed


@dataclass
class Outcome:
    """What one run returned, raised, recorded and needed."""

    answers: list[Any]
    error: Exception | None
    traces: list[Trace]
    metrics: dict[str, float]


def check(name: str, function: Callable[..., Any], *, mpi: bool = True) -> None:
    """Check `function` as the answer to exercise `name` and print what was found; in a notebook also draw it."""
    from minidist.report import show

    result = examine(name, function, mpi=mpi)
    print(result.text)
    if result.figure is not None:
        show(result.figure)


def examine(name: str, function: Callable[..., Any], *, mpi: bool = True) -> Result:
    """Do what `check` does without printing; mpi=False leaves out the leg under mpiexec."""
    exercise = find(name)
    cases = exercise.cases()

    # The first failure ends the check; par is what the solution needs on the same case.
    for case in cases:
        ours = run(exercise, exercise.solution, case)
        for buffered in (False, True) if exercise.communicates else (False,):
            outcome = run(
                exercise, function, case, buffered=buffered, messages=sum(len(t.messages) for t in ours.traces)
            )
            failure = find_failure(exercise, case, outcome, buffered, ours.metrics)
            if failure is not None:
                return failed(exercise, failure, outcome)

    par, yours = (run(exercise, answer, exercise.par).metrics for answer in (exercise.solution, function))
    lines = [f"{name}: correct {_range(exercise, cases)}"]
    shown = (*METRICS * exercise.communicates, *("memory",) * (par["memory"] > 0))
    if shown:
        lines.append(f"  {exercise.describe(exercise.par)}: {compare(par, yours, *shown)}")

    # In separate processes: what works only because ranks share memory fails here.
    if exercise.communicates and mpi:
        problem, note = run_under_mpi(exercise, function, [case for case in cases if case.ranks == 3])
        if problem:
            failure = Failure("mpi", problem, Case(3, 0))
            return failed(exercise, failure, None)
        lines.append(f"  mpiexec: {note}")
    return Result(name, True, "\n".join(lines), par=par, yours=yours)


def run(
    exercise: Exercise, function: Callable[..., Any], case: Case, *, buffered: bool = False, messages: int = 1000
) -> Outcome:
    """Run the function on all ranks of a case."""

    def main(comm: Comm) -> Any:
        return one_rank(exercise, function, case, comm)

    world = Limited(
        case.ranks, MAX_MESSAGES_OVER_PAR * (messages + 10), eager_bytes=BUFFERED if buffered else 0, timeout=TIMEOUT
    )
    error, answers = None, []

    # Whatever the function raises becomes part of the outcome.
    try:
        answers = world.run(main)
    except Exception as caught:
        error = caught

    metrics = {
        "bytes": max(sum(message.nbytes for message in trace.sent()) for trace in world.traces),
        "messages": max(len(trace.sent()) for trace in world.traces),
        "time": world.end_time,
        # Only exercises about memory keep an account.
        "memory": max((sum(live.values()) for trace in world.traces for _, live in trace.memory), default=0),
    }
    return Outcome(answers, error, world.traces, metrics)


def find_failure(
    exercise: Exercise, case: Case, outcome: Outcome, buffered: bool, par: dict[str, float]
) -> Failure | None:
    """Return what is wrong with a run: an error, a wrong answer, or a metric above par; None when it is right."""
    error = outcome.error
    if error is not None:
        message = str(error) if isinstance(error, DeadlockError) else f"{type(error).__name__}: {error}"
        return Failure("raised", message.removesuffix(": "), case, buffered, error)
    message = exercise.problem(case, outcome.answers)
    if message:
        expected = exercise.expected(case) if exercise.check_answers is None else ()
        return Failure("wrong", message, case, buffered, answers=outcome.answers, expected=expected)
    for metric in exercise.limits:
        if not buffered and outcome.metrics[metric] > par[metric] * (1 + 1e-9):
            message = f"correct, but above par in {_label(metric)}: {compare(par, outcome.metrics, metric)}"
            return Failure(
                "limit", message, case, buffered, answers=outcome.answers, metric=metric, traces=outcome.traces
            )
    return None


def failed(exercise: Exercise, failure: Failure, outcome: Outcome | None) -> Result:
    """Return the result of a failure: the text, the hint that fits best, and the picture."""
    # The exercise's own hints come before the general ones.
    hint = next((hint.text for hint in (*exercise.hints, *GENERAL) if hint.when(failure)), "")

    if failure.kind == "mpi":
        where = "under mpiexec, on 3 ranks"
    else:
        sends = f", {'buffered' if failure.buffered else 'synchronous'} sends" if exercise.communicates else ""
        where = f"smallest counterexample: {exercise.describe(failure.case)}{sends}"
    lines = [f"{exercise.name}: not yet", f"  {where}", *(f"  {line}" for line in failure.message.splitlines())]
    if hint:
        lines.append(f"  hint: {hint}")

    # The picture of messages, or that of memory when the peak is above par; none when nothing was recorded.
    figure = None
    pictures = [("space-time", "messages"), ("memory", "memory")]
    for picture, events in pictures[::-1] if failure.metric == "memory" else pictures:
        if figure is None and outcome is not None and any(getattr(trace, events) for trace in outcome.traces):
            from minidist.report import draw

            figure = draw(picture, outcome.traces, {"command": f'minidist.lesson.check("{exercise.name}", ...)'})
    return Result(exercise.name, False, "\n".join(lines), hint, figure, failure)


GENERAL = (
    Hint(lambda f: f.raised(NotImplementedError), "this is the stub; write the function, then run this cell again"),
    Hint(lambda f: "returned None" in f.message, "does every path of your function end in a return?"),
    Hint(lambda f: f.raised(RankTimeoutError), "a loop does not end: does its condition change?"),
    Hint(lambda f: f.raised(EndlessError), "a loop sends again and again: count its steps for 2 ranks on paper"),
    Hint(
        lambda f: f.raised(DeadlockError) and not f.buffered,
        "follow the circle in the report: which of these ranks could receive first, or do both at once?",
    ),
    Hint(
        lambda f: f.kind == "mpi",
        "ranks share nothing but messages; a list, a global or a default argument that every rank sees exists only "
        "where all ranks live in one process",
    ),
)


def compare(par: dict[str, float], yours: dict[str, float], *metrics: str) -> str:
    """Return text such as "most bytes from a rank: par 96 B, yours 96 B; ..."."""
    return "; ".join(f"{_label(m)}: par {_number(m, par[m])}, yours {_number(m, yours[m])}" for m in metrics or METRICS)


def _label(metric: str) -> str:
    labels = {"bytes": "most bytes from a rank", "messages": "most messages from a rank", "time": "virtual time"}
    return labels.get(metric, "peak memory")


def _number(metric: str, value: float) -> str:
    if metric == "time":
        return f"{value * 1e6:.6g} µs"
    return f"{value:.0f}" if metric == "messages" else f"{value:,.0f} B"


def _range(exercise: Exercise, cases: list[Case]) -> str:
    smallest, largest = min(c.size for c in cases), max(c.size for c in cases)
    sizes = f"{smallest} to {largest} {exercise.unit}s" if smallest < largest else f"{smallest} {exercise.unit}"
    if not exercise.communicates:
        return f"on {len(cases)} cases"
    ranks = f"{min(c.ranks for c in cases)} to {max(c.ranks for c in cases)} ranks"
    return f"on {2 * len(cases)} runs ({ranks}, {sizes}, synchronous and buffered sends)"


class Limited(SimWorld):
    """A simulated world that stops a program which sends without end."""

    def __init__(self, ranks: int, limit: int, **options: Any) -> None:
        super().__init__(ranks, **options)
        self.limit = limit

    def _new_matching(self) -> Matching:
        return LimitedMatching(self.limit, self.state, self.failures, self._block)


class LimitedMatching(Matching):
    """The messages of a run: at most `limit`."""

    def __init__(self, limit: int, *parts: Any) -> None:
        super().__init__(*parts)
        self.limit = limit

    def post(self, *arguments: Any, **keywords: Any) -> SimRequest:
        if self.posts > self.limit:
            raise EndlessError(f"stopped after {self.posts} messages; a hundred times fewer would do")
        return super().post(*arguments, **keywords)
