"""Which rank waits for which, and where the ranks differ first: the diagnosis of a job from the dumps of all ranks.

    rank 0   all_reduce 4   all_reduce 5 ── waits for rank 2
    rank 1   all_reduce 4   all_reduce 5 ── waits for rank 2
    rank 2   all_reduce 4   recv from 0  ── waits for rank 0      circle: 0 -> 2 -> 0

[1] A group's collectives meet by their number: the first one that not all ranks have called, or that ranks have called
unlike, is where the job went wrong. [2] Messages between two ranks meet in the order in which they were posted. [3] An
operation that has not ended waits for the ranks that have not posted their side. A rank for which others wait, and
which waits for nothing itself, is where to look first.

Proved by: tests/flight_recorder/test_diagnosis.py
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from minidist.comm.unlike_calls import ranks_text
from minidist.comm.waiting import Waiting, circle_text, find_cycle
from minidist.debug.flight_recorder.dump import Dump, Operation

UNKNOWN = "an operation that the log does not name"
MAX_EDGES = 100  # ranks for which one waits, that are searched for a circle
MAX_LINES = 16  # of a kind that are shown; a report must be read on a screen

Calls = Mapping[int, dict[int, Operation]]  # of a group: rank -> number -> operation
Missing = dict[tuple[int, int], tuple[int, ...]]  # (rank, number of its operation) -> the ranks that it waits for

# Which shapes all ranks of a collective must pass equal; of the others ranks may differ.
EQUAL_SHAPES = dict.fromkeys(
    (
        *("all_reduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "gather_single", "all_to_all_single"),
        *("_all_gather_base", "all_gather_single", "all_gather_into_tensor_coalesced"),
    ),
    "inputs",
) | dict.fromkeys(
    ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "scatter"), "outputs"
)
# What a text log calls them.
IN_LOGS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "allreduce_coalesced",
    "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLGATHER": "all_gather",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
}


@dataclass(frozen=True)
class Wait:
    """An operation that has not ended, and the ranks whose side of it is missing; none when all have posted theirs."""

    operation: Operation
    missing: tuple[int, ...]
    is_only: bool = False  # all other operations of the rank have ended


@dataclass(frozen=True)
class Difference:
    """The first collective of a group in which ranks differ. calls: what they called; absent: ranks without a call."""

    group: str
    sequence: int
    calls: tuple[Operation, ...]
    absent: tuple[int, ...]

    @property
    def created(self) -> int:
        """When the first rank made the call, in nanoseconds."""
        return min(operation.created for operation in self.calls)


@dataclass(frozen=True)
class Diagnosis:
    """What the dumps of a job say together."""

    versions: tuple[str, ...]
    ranks: tuple[int, ...]  # that have a dump
    without_dump: tuple[int, ...]
    groups: dict[str, tuple[str, tuple[int, ...]]]  # name -> (description, ranks)
    operations: int
    waits: tuple[Wait, ...]
    differences: tuple[Difference, ...]
    unlike_messages: tuple[tuple[Operation, Operation], ...]  # a send and the receive that it meets, of other sizes
    circle: tuple[int, ...]
    suspects: tuple[int, ...]  # ranks that others wait for, and that wait for nothing themselves
    last: dict[int, Operation] = field(default_factory=dict)  # the last operation of each rank
    unlisted: tuple[str, ...] = ()  # groups whose ranks no dump lists, so that others than those that used it may exist

    @property
    def hangs(self) -> bool:
        """Whether something has not ended, or ranks differ."""
        return bool(self.waits or self.differences or self.unlike_messages)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "versions": self.versions,
            "ranks": self.ranks,
            "without_dump": self.without_dump,
            "groups": {name: {"description": text, "ranks": ranks} for name, (text, ranks) in self.groups.items()},
            "operations": self.operations,
            "waits": [{**asdict(wait.operation), "missing": wait.missing} for wait in self.waits],
            "differences": [asdict(difference) for difference in self.differences],
            "unlike_messages": [[asdict(side) for side in pair] for pair in self.unlike_messages],
            "circle": self.circle,
            "suspects": self.suspects,
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        lines = self.head()
        if not self.hangs:
            return [*lines, "nothing hangs: every recorded operation has ended, and all ranks made the same calls"]

        # Who waits for whom.
        waiting = {wait.operation.rank for wait in self.waits}
        if waiting:
            lines.append(f"{len(waiting)} of {len(self.ranks)} ranks wait")
        lines += shortened(
            together([(wait.operation.rank, self.wait_text(wait)) for wait in self.waits], "  ", " wait")
        )
        if self.circle:
            lines.append(f"circle: {circle_text(self.circle)}")

        # Where to look: what differs first, and who is awaited and waits for nothing.
        lines += shortened([self.difference_line(difference) for difference in self.differences])
        for send, receive in self.unlike_messages[:MAX_LINES]:
            lines.append(
                f"mismatched message: rank {send.rank} sends {what_of(send, send.inputs)}{at(send)}, and rank"
                f" {receive.rank} receives {what_of(receive, receive.outputs)}{at(receive)}"
            )
        suspects = [(rank, text) for rank in self.suspects if (text := self.suspect_text(rank))]
        return lines + shortened(together(suspects, "look first at ", "")) + self.foot()

    def head(self) -> list[str]:
        """Return what was read, and of whom nothing was."""
        lines = [
            f"{len(self.ranks)} dump{'s' * (len(self.ranks) != 1)} of version {', '.join(self.versions)}:"
            f" {ranks_text(self.ranks)}, {self.operations:,} operations"
        ]
        if self.without_dump:
            lines.append(f"no dump: {ranks_text(self.without_dump)}; a rank without one may have crashed")
        return lines

    def foot(self) -> list[str]:
        """Return what the reader must know where no rank is behind: a dump of a job that runs looks the same."""
        if self.differences or self.unlike_messages or any(wait.missing or not wait.is_only for wait in self.waits):
            return []
        return [
            "all other operations have ended: a dump of a running job may show its last operation as open, as gloo"
            " notes late that one has ended"
        ]

    def group_text(self, name: str) -> str:
        """Return "group 1 (dp)"."""
        description = self.groups.get(name, ("", ()))[0]
        return f"group {name or '0'}" + (f" ({description})" if description not in ("", "undefined") else "")

    def wait_text(self, wait: Wait) -> str:
        """Return in what a rank waits, and for whom."""
        operation = wait.operation
        if operation.peer is not None:
            way, shapes = ("to", operation.inputs) if operation.kind == "send" else ("from", operation.outputs)
            text = f"{operation.kind} {way} rank {operation.peer} of {what_of(operation, shapes)}"
        else:
            text = f"{named(operation)} of {what_of(operation, operation.inputs)}"
        what = f" in {text}, {self.group_text(operation.group)}{at(operation)}"
        if wait.missing:
            return f"{what}, for {ranks_text(wait.missing)}{self.ended_text(operation)}"
        return f"{what}{self.ended_text(operation) or '; ' + self.met_text(operation)}"

    def ended_text(self, operation: Operation) -> str:
        """Return which ranks have ended a call that has not ended here: a log tells it, and dumps do not ask."""
        return ""

    def met_text(self, operation: Operation) -> str:
        """Return why an operation has not ended that waits for no rank which is known."""
        if operation.is_message and operation.peer is None:
            return "the other side of this message is not recorded"
        if operation.group in self.unlisted:
            return "all sides that are known are posted, and the dumps do not list the ranks of this group"
        return "all sides are posted, so an earlier operation or the network holds it up"

    def difference_line(self, difference: Difference) -> str:
        """Return what ranks have called as the first unlike collective of a group."""
        number = f"number {difference.sequence}" if difference.sequence >= 0 else "the operation without a number"
        where = f"first difference: {number} of {self.group_text(difference.group)} is"
        made: dict[str, list[Operation]] = defaultdict(list)
        named = [each for each in difference.calls if each.kind]  # a log may leave the kind out
        for operation in named or difference.calls:
            kind, shapes, site = operation.kind, compared(operation), at(operation)
            if operation.in_log:  # which has the line of some ranks only, and no other shapes
                kind, shapes, site = kind or UNKNOWN, shapes or operation.inputs, ""
            made[f"{kind} of {what_of(operation, shapes)}{site}"].append(operation)
        calls = [f"{text} on {ranks_text(o.rank for o in operations)}" for text, operations in made.items()]
        return f"{where} {', and '.join(calls)}{self.absent_text(difference)}"

    def absent_text(self, difference: Difference) -> str:
        """Return which ranks have not made a call."""
        return f"; {ranks_text(difference.absent)} made no such call" if difference.absent else ""

    def suspect_text(self, rank: int) -> str:
        """Return what a rank that others wait for has done last; "" where another rank is known to be the cause."""
        if rank in self.without_dump:
            return ": others wait, and there is no dump"
        operation = self.last.get(rank)
        if operation is None:
            return ": others wait, and no operation is recorded there"
        return (
            f": others wait, and nothing is pending there; the last that is recorded is {operation.kind} number"
            f" {operation.sequence} of {self.group_text(operation.group)}{at(operation)}"
        )


def together(texts: Sequence[tuple[int, str]], before: str, verb: str) -> list[str]:
    """Return one line for all ranks with the same text: "ranks 0, 1 wait in ..."; a single rank "waits"."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts:
        ranks[text].append(rank)
    return [
        f"{before}{ranks_text(each)}{verb}{'s' * (verb != '' and len(each) == 1)}{text}" for text, each in ranks.items()
    ]


def shortened(lines: Sequence[str]) -> list[str]:
    """Return at most MAX_LINES of the lines, and how many more there are."""
    more = [f"  ... and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return [*lines[:MAX_LINES], *more]


def named(operation: Operation) -> str:
    """Return "all_reduce number 4"."""
    kind = operation.kind or f"{UNKNOWN},"
    return f"{kind} number {operation.sequence}" if operation.sequence >= 0 else f"{kind} without a number"


def what_of(operation: Operation, shapes: str) -> str:
    """Return "Float [4]"."""
    return f"{operation.dtypes} {shapes}".strip() or ("unknown size" if operation.in_log else "nothing")


def at(operation: Operation) -> str:
    """Return ", at train.py:31 in step", or "" where the dump has no frames."""
    return f", at {operation.site}" if operation.site else ""


def compared(operation: Operation) -> str:
    """Return the shapes that all ranks must pass equal in this collective."""
    kind = IN_LOGS.get(operation.kind, operation.kind.lower())
    return str(getattr(operation, EQUAL_SHAPES[kind])) if kind in EQUAL_SHAPES else ""


def first_waits(dumps: Sequence[Dump], missing: Missing) -> tuple[Wait, ...]:
    """Return of each rank and group the first collective and the first message without end, which hold up the rest."""
    waits: dict[tuple[int, str, bool], Wait] = {}
    pending = [operation for dump in dumps for operation in dump.operations if not operation.is_done]
    number = Counter(operation.rank for operation in pending)
    for operation in pending:
        place = operation.rank, operation.group, operation.is_message
        absent = missing.get((operation.rank, operation.number), ())
        waits.setdefault(place, Wait(operation, absent, number[operation.rank] == 1))
    return tuple(waits.values())


def _edges(wait: Wait) -> list[Waiting]:
    of = wait.operation
    return [Waiting(of.rank, "main", (rank,), of.kind) for rank in wait.missing[:MAX_EDGES]]


def diagnose(dumps: Sequence[Dump], world: int = 0, kind: type[Diagnosis] = Diagnosis) -> Diagnosis:
    """Match the operations of all ranks and return what they say together.

    world: the number of ranks of the job, where it is known. kind: of the report.
    """
    groups, unlisted = all_groups(dumps, world)
    members = set(chain.from_iterable(each for _, each in groups.values()))

    # [1] Collectives meet by number, [2] messages by order.
    missing: Missing = {}
    calls, of_rank = all_collectives(dumps), {dump.rank: dump for dump in dumps}
    found = [match_collectives(calls[name], of_rank, name, ranks, missing) for name, (_, ranks) in groups.items()]
    behind(dumps, missing)
    differences = [difference for difference in found if difference is not None]
    unlike = match_messages(dumps, missing)

    # [3] What has not ended. Every missing rank is needed, so each is an edge; of thousands, the first are enough.
    waits = first_waits(dumps, missing)
    waiting = {wait.operation.rank for wait in waits}
    awaited = {rank for wait in waits for rank in wait.missing}
    ranks = tuple(dump.rank for dump in dumps)
    return kind(
        tuple(sorted({dump.version for dump in dumps})),
        ranks,
        tuple(sorted(members - set(ranks))),
        groups,
        sum(len(dump.operations) for dump in dumps),
        waits,
        tuple(sorted(differences, key=lambda difference: difference.created)),
        tuple(unlike),
        tuple(find_cycle([edge for wait in waits for edge in _edges(wait)])),
        tuple(sorted(awaited - waiting)),
        {dump.rank: dump.operations[-1] for dump in dumps if dump.operations},
        unlisted,
    )


def all_groups(dumps: Sequence[Dump], world: int) -> tuple[dict[str, tuple[str, tuple[int, ...]]], tuple[str, ...]]:
    """Return every process group with its ranks, and the names of those whose ranks are not known for sure.

    The ranks are those that a dump lists. The dumps of gloo list none: then all ranks are in the default group, and in
    another one are those that have used it, and maybe more.
    """
    described: dict[str, str] = {}
    listed: dict[str, set[int]] = defaultdict(set)
    used: dict[str, set[int]] = defaultdict(set)
    for dump in dumps:
        for name, (description, ranks) in dump.groups.items():
            described[name] = description or described.get(name, "")
            listed[name].update(ranks)
        for operation in dump.operations:
            used[operation.group].update((dump.rank,) if operation.peer is None else (dump.rank, operation.peer))
    everyone = {dump.rank for dump in dumps} | set(range(world))
    for name in used:
        if described.get(name) == "default_pg" and not listed[name]:
            listed[name] = everyone
    groups = {name: (described.get(name, ""), tuple(sorted(listed[name] or used[name]))) for name in used}
    return groups, tuple(name for name in groups if not listed[name])


def all_collectives(dumps: Sequence[Dump]) -> Mapping[str, Calls]:
    """Return every rank's collectives by group and number."""
    calls: dict[str, dict[int, dict[int, Operation]]] = defaultdict(lambda: defaultdict(dict))
    for operation in (operation for dump in dumps for operation in dump.operations if not operation.is_message):
        calls[operation.group][operation.rank][operation.sequence] = operation
    return calls


def differ(made: Sequence[Operation], absent: Sequence[int]) -> bool:
    """Return whether ranks have made unlike calls, or one that has not ended and that other ranks have not made."""
    kinds = {operation.kind for operation in made if operation.kind}
    # A line of a text log that has been cut does not give the size.
    sizes = {(o.dtypes, compared(o)) for o in made if not o.in_log or compared(o)}
    return len(kinds) > 1 or len(sizes) > 1 or (bool(absent) and not all(operation.is_done for operation in made))


def match_collectives(
    made_by: Calls, dumps: Mapping[int, Dump], name: str, ranks: Sequence[int], missing: Missing
) -> Difference | None:
    """Return the first collective of a group in which its ranks differ; note in `missing` for whom each call waits."""
    calls = {rank: made_by.get(rank, {}) for rank in ranks if rank in dumps}
    # A ring buffer that is full has lost the first calls: what a rank did before its oldest entry is unknown.
    oldest = {rank: first_known(dumps[rank], made) for rank, made in calls.items()}
    newest = {rank: (dumps[rank].reach or {}).get(name, -1) for rank in calls}

    first: Difference | None = None
    for sequence in sorted(set(chain.from_iterable(calls.values()))):
        made = [calls[rank][sequence] for rank in ranks if sequence in calls.get(rank, {})]
        absent = [
            rank
            for rank in ranks
            if sequence > newest.get(rank, -1) and not may_have_called(rank, sequence, calls, oldest)
        ]
        if first is None and differ(made, absent):
            first = Difference(name, sequence, tuple(made), tuple(absent))

        # A call waits for the ranks that have not made it, and for those that have made another one in its place.
        by_kind: dict[str, list[int]] = defaultdict(list)
        for operation in made:
            by_kind[operation.kind].append(operation.rank)
        for kind, ranks_of_kind in by_kind.items():
            others = chain.from_iterable(each for name, each in by_kind.items() if kind and name not in ("", kind))
            waits_for = tuple(sorted([*absent, *others]))
            for rank in ranks_of_kind:
                missing[rank, calls[rank][sequence].number] = waits_for
    return first


def first_known(dump: Dump, calls: Mapping[int, Operation]) -> int | None:
    """Return the number from which on it is known which calls a rank has made in a group; None when none is known."""
    if dump.is_whole or (dump.reach is not None and not calls):
        return 0
    return min(calls, default=None)


def behind(dumps: Sequence[Dump], missing: Missing) -> None:
    """Note in `missing` that an operation of a text log waits for the ranks that have not ended an earlier one.

    Of the operations between them the log says nothing, so they are not matched by number.
    """
    first: dict[str, dict[int, Operation]] = defaultdict(dict)
    for operation in (o for dump in dumps for o in dump.operations if o.in_log and not o.is_done and not o.is_message):
        first[operation.group].setdefault(operation.rank, operation)
    for operations in first.values():
        lowest = min(o.sequence for o in operations.values())
        late = [rank for rank, o in operations.items() if o.sequence == lowest]
        for rank, operation in operations.items():
            if operation.sequence > lowest:
                key = rank, operation.number
                missing[key] = tuple(sorted({*missing.get(key, ()), *late}))


def may_have_called(
    rank: int, sequence: int, calls: dict[int, dict[int, Operation]], oldest: dict[int, int | None]
) -> bool:
    """Return whether a rank has made a group's call of this number, or may have made it before its oldest entry."""
    if rank not in calls:
        return False
    start = oldest[rank]
    return sequence in calls[rank] or start is None or sequence < start


def match_messages(dumps: Sequence[Dump], missing: Missing) -> list[tuple[Operation, Operation]]:
    """Pair the messages that have not ended; note in `missing` for whom the others wait; return the unlike pairs."""
    open_messages: dict[tuple[str, int, int], tuple[list[Operation], list[Operation]]] = defaultdict(lambda: ([], []))
    for operation in (o for dump in dumps for o in dump.operations if o.peer is not None and not o.is_done):
        assert operation.peer is not None
        if operation.kind == "send":
            open_messages[operation.group, operation.rank, operation.peer][0].append(operation)
        else:
            open_messages[operation.group, operation.peer, operation.rank][1].append(operation)

    unlike = []
    for sends, receives in open_messages.values():
        for send, receive in zip(sends, receives, strict=False):
            missing[send.rank, send.number] = missing[receive.rank, receive.number] = ()
            if (send.inputs, send.dtypes) != (receive.outputs, receive.dtypes):
                unlike.append((send, receive))
        met = min(len(sends), len(receives))
        for alone in (*sends[met:], *receives[met:]):
            assert alone.peer is not None
            missing[alone.rank, alone.number] = (alone.peer,)
    return unlike
