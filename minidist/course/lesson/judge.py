"""The judge: a process that decides whether an answer is right. It alone computes what is expected.

    notebook ── Request: exercise, function as bytes, seed ──▶ judge ── fork ──▶ runner: runs the function
    notebook ◀── Verdict: right or not, text, hint, traces ─── judge ◀── plain answers ── runner

A cell can change nothing here, and the answer runs in a third process. A notebook starts one judge, at its first check,
and ends it when it ends. Par is what our own solution needs on the same case; see par.py.

Proved by: tests/lesson/test_judge.py, tests/lesson/test_checker.py, tests/lesson/test_exercises.py
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from minidist.base.traces import Trace
from minidist.course.lesson.answer_process import Answer
from minidist.course.lesson.catalogue import exercises, find
from minidist.course.lesson.exercise import METRICS, Case, Exercise, Failure, Least
from minidist.course.lesson.hints import hint_for
from minidist.course.lesson.mpi_leg import run_under_mpi
from minidist.course.lesson.par import Par, par_of
from minidist.course.lesson.runner import OWNERS, Limits, Outcome, Runner, start_server


@dataclass(frozen=True)
class Request:
    """What is to be judged.

    function: loads it in the process that runs it. path: the places where modules are found (sys.path). launcher: the
    mpiexec of the leg in processes; None leaves it out, and `without_mpi` says why. cells: the file of
    a notebook's cell and the cell's name. share_nothing: run one case in which each rank has the function's globals for
    itself. needs_par: a metric above par fails the exercise, where it has a limit.
    """

    name: str
    function: Answer
    seed: int
    path: tuple[str, ...] = ()
    launcher: str | None = None
    without_mpi: str = ""
    limits: Limits = field(default_factory=Limits)
    cells: tuple[tuple[str, str], ...] = ()
    share_nothing: bool = False
    needs_par: bool = True


@dataclass
class Verdict:
    """What the judge found: whether the answer is right, why, and in what it differs from par.

    above: for each metric that was above par on some case, a sentence about the first one.
    """

    name: str
    passed: bool
    text: str
    hint: str = ""
    failure: Failure | None = None
    par: dict[str, float] = field(default_factory=dict)
    yours: dict[str, float] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    printed: str = ""
    above: dict[str, str] = field(default_factory=dict)


def judge(request: Request) -> Verdict:
    """Run the answer on all cases of its exercise, the fixed ones from the smallest on, then those drawn by the seed.

    The first failure ends it, so the first failure is the smallest counterexample.
    """
    exercise = find(request.name)
    fixed, drawn = exercise.cases(), exercise.drawn(request.seed)
    above: dict[str, str] = {}
    with Runner(exercise, request.function, request.path, request.limits, request.cells) as runner:
        verdict = judge_cases(request, runner, fixed, drawn, above)
        if verdict is not None:
            return verdict

        # What works because simulated ranks share memory is not distributed.
        if request.share_nothing and exercise.communicates:
            failure = without_shared_globals(runner, _largest(fixed, 3))
            if failure is not None:
                return failed(exercise, failure, "")

        # Right. How it compares with par, on one case.
        par = par_of(request.name, exercise.par)
        outcome = runner.run(exercise.par, False, par.messages)

    lines = [f"{exercise.name}: correct {_range(exercise, fixed)}"]
    if drawn:
        lines.append(f"  and on {len(drawn)} cases drawn by seed {request.seed}")
    shown = dict.fromkeys(
        (*METRICS * exercise.communicates, *exercise.limits, *("memory",) * (par.metrics["memory"] > 0))
    )
    if shown and outcome.error is None:
        lines.append(f"  {exercise.describe(exercise.par)}: {compare(par.metrics, outcome.metrics, *shown)}")

    # In separate processes: what works only because ranks share memory fails here.
    if exercise.communicates:
        problem, note = "", request.without_mpi
        if request.launcher is not None:
            cases = [case for case in fixed if case.ranks == 3]
            problem, note = run_under_mpi(exercise, request.function, cases, request.launcher, request.path)
        if problem:
            return failed(exercise, Failure("mpi", problem, Case(3, 0)), outcome.printed)
        if note:
            lines.append(f"  mpiexec: {note}")
    return Verdict(
        exercise.name,
        True,
        "\n".join(lines),
        par=par.metrics,
        yours=outcome.metrics,
        printed=outcome.printed,
        above=above,
    )


def _largest(cases: list[Case], ranks: int) -> Case:
    """Return the largest of the cases on at most `ranks` ranks."""
    return max((case for case in cases if case.ranks <= ranks), key=lambda case: (case.ranks, case.size))


def _above(ours: dict[str, float], yours: dict[str, float]) -> dict[str, str]:
    """Return a sentence for each metric of an answer that is above ours."""
    metrics = (*METRICS, "memory")
    return {name: compare(ours, yours, name) for name in metrics if yours[name] > ours[name] * (1 + 1e-9)}


def judge_cases(
    request: Request, runner: Runner, fixed: list[Case], drawn: list[Case], above: dict[str, str]
) -> Verdict | None:
    """Return the verdict of the first case that fails, else None. above: gets a sentence for each metric above par."""
    exercise = runner.exercise
    few: tuple[Failure, str, int | None] | None = None
    for case in (*fixed, *drawn):
        ours = par_of(request.name, case)
        for buffered in (False, True) if exercise.communicates else (False,):
            outcome = runner.run(case, buffered, ours.messages)
            failure = find_failure(exercise, case, outcome, buffered, ours, request.needs_par)
            if not buffered and outcome.error is None:
                for metric, text in _above(ours.metrics, outcome.metrics).items():
                    above.setdefault(metric, f"{exercise.describe(case)}: {text}")
            if failure is None or (failure.kind == "few" and few is not None):
                continue
            failure.traces = runner.traces()
            seed = request.seed if case in drawn and case not in fixed else None
            if failure.kind != "few":
                return failed(exercise, failure, outcome.printed, seed, runner)
            few = failure, outcome.printed, seed  # unless it is wrong on another case, which says more
    if few is None:
        return None
    failure, printed, seed = few
    return failed(exercise, without_shared_globals(runner, failure.case) or failure, printed, seed)


def without_shared_globals(runner: Runner, case: Case) -> Failure | None:
    """Run a case with separate globals for each rank; return the failure of ranks that communicate through them."""
    ours = par_of(runner.exercise.name, case)
    outcome = runner.run_apart(case, ours.messages)
    failure = find_failure(runner.exercise, case, outcome, False, ours, False)
    if failure is None or (failure.kind == "few" and not outcome.changed):
        return failure
    names = " and ".join(repr(name) for name in outcome.changed) or "state of the function"
    message = f"ranks communicate through {names}, which they share in one process only: with separate globals for each"
    return replace(failure, kind="shared", message=f"{message} rank, {failure.message}")


def find_failure(
    exercise: Exercise, case: Case, outcome: Outcome, buffered: bool, ours: Par, needs_par: bool = True
) -> Failure | None:
    """Return what is wrong with a run: an error, a wrong answer, (with needs_par) a metric above par, or fewer messages
    or bytes than ranks need to know their answers; else None.
    """
    if outcome.error is not None:
        return Failure("raised", outcome.message, case, buffered, outcome.error)
    try:
        message = exercise.problem(case, outcome.answers, ours.forms)
    except Exception as error:  # whatever comparing raises that meets values of another kind
        message = f"the answers cannot be compared ({type(error).__name__})"
    if message:
        expected = exercise.expected(case) if exercise.check_answers is None else ()
        return Failure("wrong", message, case, buffered, answers=outcome.answers, expected=expected)
    for metric in exercise.limits if needs_par else ():
        if not buffered and outcome.metrics[metric] > ours.metrics[metric] * (1 + 1e-9):
            message = f"correct, but above par in {_label(metric)}: {compare(ours.metrics, outcome.metrics, metric)}"
            return Failure("limit", message, case, buffered, answers=outcome.answers, metric=metric)
    if exercise.least is not None and case.ranks > 1:
        least = exercise.least(case)
        if outcome.sent.messages < least.messages or outcome.sent.nbytes < least.nbytes:
            message = (
                f"these ranks did not get the others' numbers by messages: together they sent {said(outcome.sent)},"
                f" and what they return takes at least {said(least)}"
            )
            return Failure("few", message, case, buffered, answers=outcome.answers)
    return None


def failed(
    exercise: Exercise, failure: Failure, printed: str, seed: int | None = None, runner: Runner | None = None
) -> Verdict:
    """Return the verdict of a failure: the text and the hint that fits best.

    seed: that drew the case, if one did. runner: runs the case of par, where the failure leaves the hint open.
    """

    def on_par() -> Failure | None:
        if runner is None or failure.case == exercise.par:
            return None
        ours = par_of(exercise.name, exercise.par)
        return find_failure(exercise, exercise.par, runner.run(exercise.par, False, ours.messages), False, ours, False)

    hint = hint_for(exercise, failure, on_par)
    if failure.kind == "shared":
        where = f"{exercise.describe(failure.case)}, each with separate globals"
    elif failure.kind == "mpi":
        where = "under mpiexec, on 3 ranks"
    else:
        sends = f", {'buffered' if failure.buffered else 'synchronous'} sends" if exercise.communicates else ""
        by = "" if seed is None else f" (drawn by seed {seed})"
        where = f"smallest counterexample: {exercise.describe(failure.case)}{sends}{by}"
    # The world's own hint, in a report of a deadlock, knows less than that of the exercise.
    message = [line for line in failure.message.splitlines() if not (hint and line.lstrip().startswith("hint:"))]
    lines = [f"{exercise.name}: not yet", f"  {where}", *(f"  {line}" for line in message)]
    if hint:
        lines.append(f"  hint: {hint}")
    return Verdict(exercise.name, False, "\n".join(lines), hint, failure, traces=list(failure.traces), printed=printed)


def said(sent: Least) -> str:
    """Return text such as "1 message with 8 B"."""
    return f"{sent.messages:,} message{'s' * (sent.messages != 1)} with {sent.nbytes:,} B"


def compare(par: dict[str, float], yours: dict[str, float], *metrics: str) -> str:
    """Return text such as "most bytes from a rank: par 96 B, yours 96 B; ..."."""
    return "; ".join(f"{_label(m)}: par {_number(m, par[m])}, yours {_number(m, yours[m])}" for m in metrics or METRICS)


def target(par: dict[str, float], metrics: Sequence[str]) -> str:
    """Return par in words: "most bytes from a rank 96 B, most messages from a rank 3"."""
    return ", ".join(f"{_label(metric)} {_number(metric, par[metric])}" for metric in metrics)


def _label(metric: str) -> str:
    labels = {"bytes": "most bytes from a rank", "messages": "most messages from a rank", "time": "virtual time"}
    return labels.get(metric, "peak memory")


def _number(metric: str, value: float) -> str:
    if metric == "time":
        return f"{value:.6g} s" if value >= 1 else f"{value * 1e6:.6g} µs"
    return f"{value:.0f}" if metric == "messages" else f"{value:,.0f} B"


def _range(exercise: Exercise, cases: list[Case]) -> str:
    smallest, largest = min(c.size for c in cases), max(c.size for c in cases)
    sizes = f"{smallest} to {largest} {exercise.unit}s" if smallest < largest else f"{smallest} {exercise.unit}"
    if not exercise.communicates:
        return f"on {len(cases)} case{'s' * (len(cases) != 1)}"
    fewest, most = min(c.ranks for c in cases), max(c.ranks for c in cases)
    ranks = f"{fewest} to {most} ranks" if fewest < most else f"{most} rank{'s' * (most != 1)}"
    return f"on {2 * len(cases)} runs ({ranks}, {sizes}, synchronous and buffered sends)"


def main(descriptor: int) -> None:
    """Judge requests from the socket until the notebook closes it."""
    connection = Connection(descriptor)
    start_server()  # while it starts, this process loads the exercises
    exercises()
    OWNERS.append(connection)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(EOFError, OSError):
        while True:
            connection.send(judge(connection.recv()))
