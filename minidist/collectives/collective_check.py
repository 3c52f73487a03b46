"""Is a collective right? It runs on 1 to 9 simulated ranks, and NumPy says what each rank must get.

    for n in 1 ... 9:   sizes 0, 1, n - 1, n, n + 1, 3 n + 2 · every reduction · several roots · ragged counts ·
                        three dtypes · synchronous and buffered sends · blocking and on a stream · shapes

Every case is called twice in a row, because what one call leaves behind shows in the next. In addition to values: all
ranks must get the same bits of an all-reduce (replicas drift apart otherwise), an input that is not an output must
stay as it was, no message may be left over, and formulas that were registered must be those of the record and of the
clock.

Proved by: tests/collectives/test_collective_check.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from minidist import collectives
from minidist.base.errors import CommunicationError, UsageError, quoted, quoted_path, reason
from minidist.base.user_file import is_user_function
from minidist.collectives import load_algorithm
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.closed_forms import seconds, volume
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.comm.waiting import error_line
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives.calls import Algorithm
from minidist.core.comm import Comm

MAX_RANKS = 64
BUFFERED = 1 << 20  # bytes; all sends of a case are smaller
TIMEOUT_S = 10.0
LINKS = LinkModel(alpha=2.0**-10, beta=2.0**-20)  # binary fractions: sums of them are exact
UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
ROOTED = ("broadcast", "gather", "reduce", "scatter")
RAGGED = ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MINE = {"all_gather", "gather"}  # operations whose input is a rank's own chunk of the whole


class WrongResult(Exception):
    """What is wrong with a call, in a sentence."""


@dataclass(frozen=True)
class Case:
    """One way to call a collective on n ranks; shape: of each rank's array, or of the whole where that is cut."""

    operation: str
    algorithm: str
    ranks: int
    shape: tuple[int, ...]
    dtype: str = "float64"
    op: str = "sum"
    root: int = 0
    ragged: bool = False
    buffered: bool = False
    on_stream: bool = False

    def __str__(self) -> str:
        elements = int(np.prod(self.shape))
        what = f"{elements} elements" if len(self.shape) == 1 else f"an array of shape {self.shape}"
        words = [f"{self.ranks} rank{'s' * (self.ranks > 1)}", f"{what} of {self.dtype}"]
        words += [self.op] if self.operation in REDUCING else []
        words += [f"root {self.root}"] if self.operation in ROOTED else []
        words += ["ragged counts"] if self.ragged else []
        words += ["buffered sends" if self.buffered else "synchronous sends"]
        words += ["async_op=True"] if self.on_stream else []
        return ", ".join(words)

    @property
    def size(self) -> int:
        """Elements of the whole."""
        return int(np.prod(self.shape))

    @property
    def sizes(self) -> list[int]:
        """Elements of each rank's chunk."""
        even = chunk_sizes(self.size, self.ranks)
        return [*even[1:], even[0]] if self.ragged else even

    def row(self, rank: int) -> list[int]:
        """Elements that `rank` sends to each rank in an all-to-all."""
        even = [self.size // self.ranks] * self.ranks
        return [(rank + 2 * j) % 3 for j in range(self.ranks)] if self.ragged else even

    def input(self, rank: int, call: int) -> Any:
        """Whole numbers from 1 to 9; in float32 divided by 7, so that the order of additions shows in the bits."""
        shape: tuple[int, ...] = self.shape
        if self.operation in MINE:
            shape = (self.sizes[rank],)
        elif self.operation == "all_to_all":
            shape = (sum(self.row(rank)),)
        place = np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 1009 * rank + 10007 * call
        number = (place * 2654435761 >> 7) % 9 + 1
        return np.array(number / 7 if self.dtype == "float32" else number, self.dtype)

    def expected(self, rank: int, inputs: Sequence[Any]) -> Any:
        """What NumPy says that `rank` gets, from all ranks' inputs; None for nothing."""
        ranks = range(self.ranks)
        start = offsets(self.sizes)
        mine = slice(start[rank], start[rank + 1])

        # What is moved.
        if self.operation == "broadcast":
            return inputs[self.root]
        if self.operation in MINE:
            return np.concatenate(inputs) if self.operation == "all_gather" or rank == self.root else None
        if self.operation == "scatter":
            return inputs[self.root].reshape(-1)[mine]
        if self.operation == "all_to_all":
            cuts = [offsets(self.row(r)) for r in ranks]
            return np.concatenate([inputs[r][cuts[r][rank] : cuts[r][rank + 1]] for r in ranks])

        # What is reduced.
        total = UFUNCS[self.op].reduce(np.stack(inputs), axis=0)
        if self.op == "avg":
            total = (total / self.ranks).astype(self.dtype)
        if self.operation == "reduce_scatter":
            return total.reshape(-1)[mine]
        return total if self.operation == "all_reduce" or rank == self.root else None

    def call(self, comm: Comm, call: int) -> Any:
        """Make one rank's call; raise WrongResult when an input that is not an output has changed."""
        array = self.input(comm.rank, call)
        before = array.copy()
        options: dict[str, Any] = {"algorithm": self.algorithm, "async_op": self.on_stream}
        if self.operation in ROOTED:
            options["root"] = self.root
        if self.operation in REDUCING:
            options["op"] = self.op
        if self.ragged and self.operation == "all_to_all":
            options["send_counts"] = self.row(comm.rank)
            options["receive_counts"] = [self.row(r)[comm.rank] for r in range(comm.size)]
        elif self.ragged:
            options["counts"] = self.sizes
        arguments: list[Any] = [comm, array]
        if self.operation in MINE:
            options["counts"] = self.sizes
        if self.operation == "scatter":
            arguments = [comm, array if comm.rank == self.root else None, np.empty(self.sizes[comm.rank], self.dtype)]

        result = getattr(collectives, self.operation)(*arguments, **options)
        result = result.wait() if self.on_stream else result
        if self.operation not in ("all_reduce", "broadcast") and array.tobytes() != before.tobytes():
            raise WrongResult(f"rank {comm.rank}'s input was changed, although it is not an output")
        return result


def cases(operation: str, algorithm: str, ranks: int) -> Iterator[Case]:
    """Yield the cases for this number of ranks, the simplest first."""
    n = ranks
    sizes = sorted({0, 1, n - 1, n, n + 1, 3 * n + 2})
    if operation == "all_to_all":  # equal chunks, then ragged ones
        sizes = [0, n, 3 * n]
    ops = list(UFUNCS) if operation in REDUCING else ["sum"]
    roots = sorted({0, 1 % n, n // 2, n - 1}) if operation in ROOTED else [0]

    # One choice after the other, each with all sizes or with one that no number of ranks divides.
    odd = (sizes[-1],)
    for size in sizes[::-1]:
        yield Case(operation, algorithm, n, (size,))
    for op, size in product(ops[1:], (sizes[-1], n)):
        yield Case(operation, algorithm, n, (size,), op=op)
    for root, size in product(roots[1:], (sizes[-1], n)):
        yield Case(operation, algorithm, n, (size,), root=root)
    if operation in RAGGED:
        for size in sizes:
            yield Case(operation, algorithm, n, (size,), root=roots[-1], ragged=True)
    for size in sizes:
        yield Case(operation, algorithm, n, (size,), root=roots[-1], buffered=True)
    for dtype, op in product(("float32", "int64"), ops):
        if (dtype, op) != ("int64", "avg"):
            yield Case(operation, algorithm, n, odd, dtype, op)
    for buffered in (False, True):
        yield Case(operation, algorithm, n, odd, root=roots[-1], buffered=buffered, on_stream=True)
    if operation in ("all_reduce", "broadcast", "reduce"):
        yield Case(operation, algorithm, n, (2, n, 3))
        yield Case(operation, algorithm, n, ())


@dataclass
class CollectiveReport:
    """What was found: right and wrong by numbers of ranks, and the first thing that is wrong."""

    operation: str
    algorithm: str
    calls: int = 0
    right: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    first: str = ""  # the first thing that is wrong, as a sentence
    refused: dict[str, str] = field(default_factory=dict)  # reductions that it does not take, and what it raised
    cost: str = ""  # what it sends and how long it takes, next to the best of minidist

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**vars(self), "passed": self.passed}

    def sentences(self) -> list[str]:
        """Return the report for people."""
        name = f"{self.operation}/{self.algorithm}"
        lines = []
        if self.right:
            lines.append(f"{name} agrees with NumPy on {_ranks(self.right)}.")
        if self.wrong:
            lines += [f"{name} is wrong on {_ranks(self.wrong)}. The first case:", f"  {self.first}"]
        if self.refused:
            reasons = "; ".join(f"{op} ({text})" for op, text in self.refused.items())
            lines.append(f"It refuses {reasons}.")
        if self.cost and not self.wrong:
            lines.append(self.cost)
        return lines


def check_collective(source: str, operation: str | None = None, most_ranks: int = 9) -> CollectiveReport:
    """Run an algorithm, FILE.py:FUNCTION or a registered name, on 1 to `most_ranks` ranks; return what was found.

    operation: of a name, and of a function that is not decorated with `algorithm` and not called like its operation.
    """
    if not 1 <= most_ranks <= MAX_RANKS:
        raise UsageError(f"--ranks {most_ranks}; a check runs on 1 to at most {MAX_RANKS} ranks")
    if operation is not None and operation not in ALGORITHMS:
        raise UsageError(f"--operation {quoted(operation)}; it must be one of {', '.join(ALGORITHMS)}")
    if is_user_function(source):
        operation, entry = load_algorithm(source, operation)
    elif operation is None:
        raise UsageError(f"check-collective {quoted_path(source)}: write FILE.py:FUNCTION, or a name with --operation")
    else:
        entry = ALGORITHMS[operation][source]

    report = CollectiveReport(operation, entry.name)
    for ranks in range(1, most_ranks + 1):
        try:
            for case in cases(operation, entry.name, ranks):
                if case.op not in report.refused:
                    _run(case, entry, report)
            if entry.seconds is not None:
                _compare_seconds(operation, entry.name, ranks)
        except WrongResult as error:
            report.wrong.append(ranks)
            report.first = report.first or str(error)
        else:
            report.right.append(ranks)
    if report.passed:
        report.cost = _cost(operation, entry)
    return report


def _run(case: Case, entry: Algorithm, report: CollectiveReport) -> None:
    """Run one case twice in a row in one world; raise WrongResult with the case and what is wrong."""
    world = SimWorld(case.ranks, eager_bytes=BUFFERED if case.buffered else 0, links=LINKS, timeout=TIMEOUT_S)
    try:
        results = world.run(lambda comm: [case.call(comm, call) for call in range(2)])
    except (WrongResult, CommunicationError) as error:
        raise WrongResult(f"{case}: {error}") from None
    except (NotImplementedError, UsageError) as error:
        # An algorithm may take some reductions only, if it says so.
        if case.operation in REDUCING and case.op != "sum" and not isinstance(error, CommunicationError):
            report.refused[case.op] = f"{reason(error, named=True)}"
            return
        raise WrongResult(f"{case}: {reason(error)}") from None
    except Exception as error:
        raise WrongResult(f"{case}: it raised {error_line(error)}") from None

    report.calls += 2
    for call in range(2):
        _compare(case, [result[call] for result in results], call)
    if entry.sends is not None and case.dtype == "float64" and not case.on_stream and not case.ragged:
        _compare_sends(case, entry.name, world)


def _compare(case: Case, results: Sequence[Any], call: int) -> None:
    """Raise WrongResult unless every rank has what NumPy says, and all of them the same bits."""
    again = " in the second call in a row" if call else ""
    inputs = [case.input(rank, call) for rank in range(case.ranks)]
    for rank, result in enumerate(results):
        expected = case.expected(rank, inputs)
        if (result is None) != (expected is None):
            wanted = "nothing" if expected is None else "an array"
            got = "nothing" if result is None else f"a value of type {type(result).__name__}"
            raise WrongResult(f"{case}: rank {rank} gets {got}{again}; it must get {wanted}")
        if expected is None:
            continue
        values, right = np.reshape(result, -1), np.reshape(expected, -1)
        if values.shape != right.shape:
            raise WrongResult(f"{case}: rank {rank} gets {values.size} elements{again}, and NumPy {right.size}")

        # Sums may be added in any order: a few units of rounding for each rank.
        exact = case.op in ("max", "min") or case.dtype == "int64" or case.operation not in REDUCING
        bound = 0.0 if exact else 8 * case.ranks * float(np.finfo(case.dtype).eps)
        different = ~(np.abs(values - right) <= bound * np.abs(right))
        if different.any():
            place = int(np.argmax(different))
            raise WrongResult(
                f"{case}: rank {rank} gets {values[place]} at element {place}{again}, and NumPy {right[place]}; "
                f"{int(different.sum())} of {values.size} elements differ"
            )
        if case.operation in ("all_reduce", "all_gather") and values.tobytes() != np.reshape(results[0], -1).tobytes():
            raise WrongResult(
                f"{case}: ranks 0 and {rank} get different bits{again}; every rank must add in the same order, or"
                " replicas drift apart"
            )


def _compare_sends(case: Case, name: str, world: SimWorld) -> None:
    """Raise WrongResult when the formula of what is sent says something else than the record of two calls."""
    elements = case.row(0) if case.operation == "all_to_all" else case.size
    for rank, trace in enumerate(world.traces):
        sent = trace.sent()
        said = volume(case.operation, name, elements, case.ranks, rank, case.root)
        found = len(sent) / 2, sum(message.nbytes for message in sent) / 16
        if found != said:
            raise WrongResult(
                f"{case}: its `sends` says that {said.messages} messages of {said.elements} elements in all leave rank"
                f" {rank}, but {found[0]:g} messages of {found[1]:g} elements do"
            )


def _compare_seconds(operation: str, name: str, ranks: int) -> None:
    """Raise WrongResult when the formula of the time says something else than the clock."""
    # An array that the ranks divide, and any power of two below them.
    case = Case(operation, name, ranks, (64 * ranks,))
    world = SimWorld(ranks, links=LINKS, timeout=TIMEOUT_S)
    world.run(case.call, 0)
    said = seconds(operation, name, 8 * case.size, ranks, LINKS.alpha, LINKS.beta)
    if not abs(world.end_time - said) <= 1e-9 * said:
        raise WrongResult(
            f"{case}: its `seconds` says {said:g} s with alpha {LINKS.alpha:g} s and beta {LINKS.beta:g} s per byte,"
            f" but it takes {world.end_time:g} s"
        )


def _cost(operation: str, entry: Algorithm, ranks: int = 8, elements: int = 8192) -> str:
    """Return in a sentence what a rank sends and how long a call takes, next to the best algorithm of minidist."""
    found = {}
    for name, other in ALGORITHMS[operation].items():
        if other is not entry and other.is_users:
            continue
        world = SimWorld(ranks, timeout=TIMEOUT_S)
        case = Case(operation, name, ranks, (elements,))
        world.run(case.call, 0)
        sent = [trace.sent() for trace in world.traces]
        most = max(len(messages) for messages in sent), max(sum(m.nbytes for m in messages) for messages in sent)
        found[name] = (world.end_time, *most)
    best = min((name for name in found if not ALGORITHMS[operation][name].is_users), key=found.__getitem__)
    time, messages, nbytes = found[entry.name]
    return (
        f"On {ranks} ranks and {elements * 8 // 1024} KiB a rank sends at most {messages} messages and {nbytes:,} B,"
        f" in {1e6 * time:.1f} virtual microseconds; minidist's fastest, {best}, takes {1e6 * found[best][0]:.1f}."
    )


def _ranks(numbers: Sequence[int]) -> str:
    """Return "1 to 9 ranks", or "1, 2, 4 and 8 ranks"."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]} ranks"
    text = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
    return f"{text} rank{'s' * (numbers != [1])}"
