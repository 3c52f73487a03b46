"""An exercise is data: what each rank is given, what it must return, and hints for typical mistakes.

Its solution is not here: see solutions.py. Par, what the solution needs on a case, is in par.json: see par.py.

Proved by: tests/lesson/test_checker.py, tests/lesson/test_exercises.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minidist.base.errors import quoted
from minidist.base.traces import Trace
from minidist.comm.sim.links import LinkModel
from minidist.course.lesson.one_rank import Task
from minidist.course.lesson.plain import form

METRICS = ("bytes", "messages", "time")


@dataclass(frozen=True, order=True)
class Case:
    """One run: a number of ranks, a size (the exercise defines what it counts), and a seed for the data."""

    ranks: int
    size: int
    seed: int = 0

    def generator(self, *more: int) -> np.random.Generator:
        """Return a generator that depends on the case and on `more` (such as a rank) only."""
        return np.random.default_rng([self.seed, self.ranks, self.size, *more])


class Least(NamedTuple):
    """Messages and their bytes, of all ranks together."""

    messages: int
    nbytes: int


def reduced_to_all(numbers: Callable[[Case], int]) -> Callable[[Case], Least]:
    """Return the least of an all-reduce of numbers(case) float64 numbers: 2 (n-1) messages with each of them.

    n - 1 messages until the first rank can know a sum, and one more for every other rank.
    """
    return lambda case: summed(case.ranks, case.ranks, numbers(case))


def summed(givers: int, takers: int, numbers: int) -> Least:
    """Return the least with which `takers` ranks know the sums of the float64 numbers of `givers` ranks among them."""
    messages = max(0, givers - 1 + takers - 1) if numbers else 0
    return Least(messages, 8 * messages * numbers)


@dataclass
class Failure:
    """What went wrong, for the text, the picture and the choice of a hint.

    kind: "raised", "wrong", "limit" (correct but above par), "mpi" (correct in the simulated world only), "shared"
    (correct only where ranks share memory) or "few" (correct, with less sent than an answer needs).
    """

    kind: str
    message: str
    case: Case
    buffered: bool = False
    error: BaseException | None = None
    answers: Sequence[Any] = ()
    expected: Sequence[Any] = ()
    metric: str = ""
    traces: Sequence[Trace] = ()

    def raised(self, *classes: type[BaseException]) -> bool:
        """Return whether the function raised one of these."""
        return isinstance(self.error, classes)

    def answers_are(self, others: Sequence[Any]) -> bool:
        """Return whether the wrong answers are these. A hint recognises a typical mistake by making it."""
        if self.kind != "wrong" or any(answer is None for answer in self.answers):
            return False
        return all(not difference(got, other, 1e-9) for got, other in zip(self.answers, others, strict=True))


@dataclass(frozen=True)
class Hint:
    """A hint with `text` for the failures for which `when` holds."""

    when: Callable[[Failure], bool]
    text: str

    def fits(self, failure: Failure) -> bool:
        """Return whether `when` holds; it does not where the answer has a form that `when` cannot read."""
        try:
            return bool(self.when(failure))
        except Exception:
            return False


def is_wrong(failure: Failure) -> bool:
    """Return whether the answer is wrong. A hint with this condition is taken when no other one and no pattern fits."""
    return failure.kind == "wrong"


SHOWN = 8  # numbers of an array in a text; of a longer one the first and the last three
DRAWN = 6  # cases that the seed of a check draws
POOL = 60  # cases from which they are drawn: par of each is known


def drawing(
    ranks: tuple[int, int], sizes: tuple[int, int], seeds: tuple[int, int] = (100, 1 << 30)
) -> Callable[[np.random.Generator], Case]:
    """Return a function that draws a case within these bounds, which belong to them."""

    def draw(generator: np.random.Generator) -> Case:
        return Case(*(int(generator.integers(low, high, endpoint=True)) for low, high in (ranks, sizes, seeds)))

    return draw


draw_standard = drawing((1, 9), (0, 40))


def standard_cases() -> list[Case]:
    """Return small cases and twelve random ones, the same in every run: ragged, empty, fewer elements than ranks."""
    draw = np.random.default_rng(0)
    cases = [Case(ranks, size) for ranks in (1, 2, 3, 4, 5, 8) for size in (0, 1, 3, 4, 7)]
    cases += [Case(int(draw.integers(1, 10)), int(draw.integers(0, 40)), seed + 1) for seed in range(12)]
    return sorted(cases)


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lesson.

    - arguments(case, rank): what one rank's function gets after `comm`; fresh arrays each time.
    - setup(comm, *arguments): what it gets in their place: objects that send or count memory, which are made where the
      function runs.
    - expected(case): the answers of all ranks.
    - answer(arguments, returned): one rank's answer, taken where the function runs; by default what was returned.
    - check_answers(case, answers): a sentence when they are wrong, else ""; by default a comparison with `expected`.
    - cases: the fixed ones, the smallest first. draw: one more case, from a generator; it makes the pool from which
      the seed of a check draws several. None: there are the fixed ones only.
    - least(case): the messages and the bytes, of all ranks together, without which ranks cannot know what they return.
    - limits: metrics that must not exceed par, each the most by one rank (time: of the whole run); "memory" is the peak
      in trace.memory, which `answer` or the function must have filled (see `base.memory`).
    - links: of the simulated world, where they are not the usual ones.
    - forbidden: methods of comm that the exercise does without.
    - written_by_hand: functions of minidist, or modules of them, that the answer must not call.
    - par: the case on which par is printed.
    - functions: their names in a submission, where it does not pass them to `check`. adapter: makes of a
      submission's names the function that is judged.
    - hints: by default those that hints.toml has for its name. for_hints: the functions that only these hints use, by
      their names in hints.toml.
    - communicates: False for one rank alone.
    - generator: the answer, or one of its `functions`, may be a generator function; that of other exercises may not.
    """

    name: str
    arguments: Callable[[Case, int], tuple[Any, ...]]
    par: Case
    expected: Callable[[Case], Sequence[Any]] = lambda case: ()
    hints: tuple[Hint, ...] = ()
    for_hints: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    setup: Callable[..., tuple[Any, ...]] | None = None
    answer: Callable[[tuple[Any, ...], Any], Any] = lambda arguments, returned: returned
    check_answers: Callable[[Case, Sequence[Any]], str] | None = None
    cases: Callable[[], list[Case]] = standard_cases
    draw: Callable[[np.random.Generator], Case] | None = draw_standard
    limits: tuple[str, ...] = ()
    least: Callable[[Case], Least] | None = None
    links: LinkModel | None = None
    forbidden: tuple[str, ...] = ()
    written_by_hand: tuple[str, ...] = ()
    communicates: bool = True
    generator: bool = False
    unit: str = "element"
    label: Callable[[Case], str] | None = None  # a case in words, where its size is not a number of units
    tolerance: float = 1e-9
    functions: tuple[str, ...] = ()
    adapter: Callable[[dict[str, Any]], Callable[..., Any]] | None = None

    @property
    def task(self) -> Task:
        """What the process of an answer gets of the exercise."""
        return Task(
            self.setup, self.answer, self.communicates, self.forbidden, self.written_by_hand, self.generator, self.links
        )

    def drawn(self, seed: int) -> list[Case]:
        """Return the cases that a seed draws, the smallest first."""
        draw = np.random.default_rng([seed, *self.name.encode()])
        pool = self.pool()
        return sorted(pool[i] for i in draw.choice(len(pool), min(DRAWN, len(pool)), replace=False))

    def pool(self) -> list[Case]:
        """Return the cases that seeds draw from, the same in every run."""
        draw = np.random.default_rng([*self.name.encode()])
        return [] if self.draw is None else sorted({self.draw(draw) for _ in range(POOL)})

    def problem(self, case: Case, answers: Sequence[Any], forms: Sequence[str]) -> str:
        """Return a sentence that names the first rank whose answer is wrong, or "" when all are right.

        forms: of right answers, in words; named where an answer has another one. May be empty.
        """
        if self.check_answers is not None:
            try:
                return self.check_answers(case, answers)
            except Exception:  # whatever a check raises that meets another form of answer than its own
                return next(
                    (
                        f"{f'rank {rank}: ' * self.communicates}the answer is {form(got)}; expected {own}"
                        for rank, (got, own) in enumerate(zip(answers, forms, strict=False))
                        if form(got) != own
                    ),
                    f"the answer cannot be read: {quoted(answers[0])}",
                )
        for rank, (got, wanted) in enumerate(zip(answers, self.expected(case), strict=True)):
            problem = difference(got, wanted, self.tolerance)
            if problem:
                return f"rank {rank}: {problem}" if self.communicates else problem
        return ""

    def describe(self, case: Case) -> str:
        """Return a case in words."""
        if self.label is not None:
            return self.label(case)
        ranks = f"{case.ranks} rank{'s' * (case.ranks != 1)}, " if self.communicates else ""
        return f"{ranks}{case.size} {self.unit}{'s' * (case.size != 1)}"


def difference(got: Any, wanted: Any, tolerance: float) -> str:
    """Return a sentence when an answer is not what it should be, else ""."""
    if got is None:
        return "the function returned None"
    if isinstance(wanted, tuple):
        if isinstance(got, np.ndarray) and got.ndim == 1 + np.ndim(wanted[0]):
            got = tuple(got)  # rows of one array are as good as a list of arrays
        if not isinstance(got, tuple | list) or len(got) != len(wanted):
            return f"got {form(got)}, expected {len(wanted)} arrays"
        problems = [difference(*both, tolerance) for both in zip(got, wanted, strict=True)]
        return next((f"result {i}: {problem}" for i, problem in enumerate(problems) if problem), "")

    # Lists of numbers are as good as arrays; other values are not.
    array, wanted = _numbers(got), np.asarray(wanted)
    if array is None:
        return f"got {quoted(got)}, expected {short(wanted)}"
    if array.shape != wanted.shape:
        return f"got shape {array.shape}, expected {wanted.shape}"
    with np.errstate(all="ignore"):
        close = np.isclose(array, wanted, rtol=tolerance, atol=tolerance)
    if close.all():
        return ""
    text = f"got {short(array)}, expected {short(wanted)}"
    if array.size <= SHOWN:
        return text

    # What differs may be in the part that is left out.
    first = tuple(map(int, np.argwhere(~close)[0]))
    count = np.count_nonzero(~close)
    return f"{text}; {count} of {close.size} differ, first {list(first)}: {array[first]:.6g} for {wanted[first]:.6g}"


def _numbers(value: Any) -> np.ndarray | None:
    """Return a value as an array of numbers, or None where it is not one."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of unequal lengths
        return None
    return array if array.dtype.kind in "biufc" else None


def short(array: np.ndarray) -> str:
    """Return an array as at most one line of text."""
    return np.array2string(array.reshape(-1), precision=4, threshold=SHOWN, edgeitems=3, separator=", ").replace(
        "\n", ""
    )
