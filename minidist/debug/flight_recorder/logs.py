"""What the text logs of a job say of a hang: in which operation each rank is, and what else happened to it.

    [rank4]:[E419 ...] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, ...)
     4: the rank in the job    0: in the first group that wrote a line    7: number in a group that is not named
    [rank4]:[E419 ...] [PG ID 2 PG GUID 9(tp) Rank 0] ... at work: 7, last enqueued NCCL work: 9, last completed ...: 6
     2: number on this rank    9: name, the same on all ranks    0: the rank in this group

So the operation and its group are on two lines, which meet by rank and number. Older versions of PyTorch write neither
`[rank4]:` nor the group. The formats from PyTorch 1.9 to 2.13, of NCCL and the backends that took over its lines (RCCL,
HCCL, XCCL), of gloo and of torchrun are read; the order of the fields and what else is between them does not matter.

Proved by: tests/flight_recorder/test_logs.py
"""

import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from minidist.debug.flight_recorder.dump import MAX_RANKS
from minidist.debug.flight_recorder.log_lines import log_lines, records

MAX_EVENTS = 200_000  # different ones that are kept
MAX_SHOWN = 200  # characters of an exception

IN_JOB = re.compile(r"\[rank[= ]?(\d{1,7})\]")
IN_GROUP = re.compile(r"\[Rank\s{0,3}(\d{1,7})\]")
GROUPS = (
    re.compile(
        r"\[PG\s?ID\s?(\d{1,9})\s?PG\s?GUID\s?([^\s(\]]{0,200})\s?(?:\(([^)\]]{0,200})\))?\s?Rank\s?(\d{1,7})\]"
    ),
    re.compile(r"\[PG\s?()([^\s(\]]{1,200})\s?(?:\(([^)\]]{0,200})\))?\s?Rank\s?(\d{1,7})\]"),
)
LABEL = re.compile(  # of torchrun; of srun; of mpirun and horovodrun
    r"\s{0,9}(?:\[[A-Za-z_.-]{1,40}(\d{1,7})\]:|(\d{1,7}):\s|\[(?:\d{1,7},)?(\d{1,7})\]<std(?:out|err)>:)"
)
WORK = re.compile(r"Work[A-Z]\w{0,20}\(")
KIND = re.compile(r"OpType\s?=\s?([A-Za-z_]\w{0,60})")
NUMBER = re.compile(r"(?:SeqNum|SequenceNumber)\s?=\s?(\d{1,18})")
SIZES = (re.compile(r"NumelIn\s?=\s?(\d{1,20})"), re.compile(r"NumelOut\s?=\s?(\d{1,20})"))
SHAPE = re.compile(r"TensorShape\s?=\s?(\[[\d, ]{0,200}\])")
AT = re.compile(r"\sat\s{0,2}(?:[A-Z]{1,8}\s{0,2})?work(?:\s{0,2}sequence\s{0,2}id)?:\s{0,2}(\d{1,18})")
UNSET = 2**62  # numbers from here on are those of variables that PyTorch has not set
LAST = re.compile(r"last\s{0,2}(enqueued|completed)\s{0,2}(?:[A-Z]{1,8}\s{0,2})?work:\s{0,2}(-?\d{1,18})", re.I)
FRAME = re.compile(r"#\d{1,4} (\S{1,200}) from (\S{1,1000}):(\d{1,9})")
CALLS = re.compile(r"Rank (\d{1,7}) is running (?:inconsistent )?collective: \w{1,40}\(([^()]{0,2000})")
WORLD = re.compile(
    r"(?<![\w-])(?<!parallel )(?<!group )(?<!local )world[ _]size\W{1,4}(\d{1,7})\b|\d/(\d{1,7}) clients joined", re.I
)
OPTIONS = re.compile(r"initialization options: size: (\d{1,7}), global rank: (\d{1,7})")

# Other lines than those of a watchdog: a text that the line has, a pattern, and what has happened. In LATE, it has
# happened to the ranks of the pattern's first group, in SAID to the rank that has written the line.
RANKS = r"\[?(\d{1,7}(?:,\s?\d{1,7}){0,4096})\]?"
BARRIER = "did not reach a monitored barrier in time"
WAITED = "timed out while it waited for a peer"
LATE = (
    ("failed to pass", re.compile(rf"ranks?:?\s{{0,2}}{RANKS}\s{{0,2}}failed to pass", re.I), BARRIER),
    ("following ranks", re.compile(rf"following ranks failed to [^\[]{{0,80}}{RANKS}"), BARRIER),
    ("likely stuck", re.compile(rf"ranks?\s{{0,2}}{RANKS}\s(?:is|are) likely stuck", re.I), "is likely stuck"),
    (
        "didn't join",
        re.compile(rf"{RANKS}\s?finished collective #(\d{{1,18}}), but didn't join collective #(\d{{1,18}})"),
        "ended collective {} and did not call collective {}",
    ),
    ("lagging ranks", re.compile(rf"ranks {RANKS} are the lagging ranks"), "called no collective"),
)
SAID = (
    ("successfully reached", re.compile("reached monitoredBarrier"), "reached a monitored barrier that failed"),
    ("imed out waiting", re.compile(r"Timed out waiting \d{1,18}\s?ms for (?:recv|send) operation"), WAITED),
    ("pair closure", re.compile("timeout caused pair closure"), WAITED),
    ("closed by peer", re.compile("Connection closed by peer"), "lost a peer"),
    ("rror [", re.compile(r"(?:Read|Write) error \[.{1,200}(?:reset by peer|pipe)"), "lost a peer"),
    ("async exception", re.compile("raised the following async exception"), "lost a peer"),
    ("atchdog got stuck", re.compile("watchdog got stuck"), "has a watchdog that makes no progress"),
    ("Heartbeat monitor", re.compile("Heartbeat monitor timed out"), "has a watchdog that makes no progress"),
)
JOINED = re.compile(
    r"(\d{1,7})/(\d{1,7}) clients joined|world_size=(\d{1,7}), (?:worker_count|num_workers_\w{1,20})=(\d{1,7})"
)
RAISED = re.compile(
    r"(?:^|\]:?\s{1,2}|\d:\s|Z\s)((?:[A-Za-z_]\w{0,60}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception)\b(?:: .*)?)$"
)
# An exception that the hang of others has caused is not the cause of one.
AFTER = re.compile(
    r"atchdog|NCCL|mismatch between|[Gg]loo|onitored|Connection|imed? ?out|Timeout|SIGTERM|SignalException|ChildFailed"
    r"|Store"
)
ROOT = (re.compile(r"\brank\s{1,8}: (\d{1,7}) \(local_rank"), re.compile(r"\bexitcode\s{1,4}: (-?\d{1,5}) \("))


@dataclass(frozen=True)
class Identity:
    """Who wrote a record: its rank in the job and in the group, and the group (number there, name, description)."""

    rank: int | None
    in_group: int | None
    group: tuple[str, str, str] | None


@dataclass(frozen=True)
class Work:
    """An operation that has not ended: kind and sizes as the log writes them, "" where it does not."""

    kind: str
    sequence: int | None
    inputs: str
    outputs: str
    ranks: int = 0  # of the group, where the sizes tell it: all-gather and reduce-scatter


@dataclass(frozen=True)
class Event:
    """What a record says. at: the number at which a watchdog gave up. enqueued, completed: the last ones, or None."""

    who: Identity
    work: Work | None = None
    at: int | None = None
    enqueued: int | None = None
    completed: int | None = None


@dataclass
class Log:
    """All that the logs of a job say. findings: (what happened, the rank) in the order of the log.

    awaited: ranks that others say did not come. differing: number -> what -> ranks, of TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """

    files: int = 0
    events: dict[Event, None] = field(default_factory=dict)
    findings: dict[tuple[str, int | None], None] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    differing: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    sites: dict[tuple[Identity, Work], str] = field(default_factory=dict)  # file:line in function
    spoken: set[int] = field(default_factory=set)  # ranks that have written a line
    nameless: bool = False  # so has a rank whose number the log does not give
    raised: set[int] = field(default_factory=set)
    world: int = 0  # the number of ranks, 0 where no line gives it
    local: bool = False  # some ranks are those of torchrun's prefixes, which count from 0 on every node

    @property
    def in_job(self) -> bool:
        """Whether records give ranks of the job; those of older versions of PyTorch give the ranks in a group only."""
        return any(event.who.rank is not None for event in self.events)

    def __len__(self) -> int:
        return len(self.events) + len(self.findings) + len(self.differing)


class Reader:
    """Reads the records of one file into a log."""

    def __init__(self, log: Log, rank: int | None = None) -> None:
        self.log, self.of_file = log, rank
        self.stack: tuple[Identity, Work] | None = None  # the next lines are its stack
        self.works: dict[int | None, tuple[Identity, Work]] = {}  # rank -> its last operation
        self.failed: int | None = None  # the rank of torchrun's table whose exit code is on a line below

    def line(self, line: str) -> None:
        """Read one line."""
        if not line.isprintable():
            line = "".join(character if character.isprintable() else " " for character in line)
        label = LABEL.match(line)
        of_line = int(label[1] or label[2] or label[3]) if label else self.of_file
        for record in records(line):
            before = len(self.log)
            rank = self.record(record, of_line)
            if before == len(self.log):
                continue
            if rank is None:
                self.log.nameless = True
            else:
                self.log.spoken.add(rank)
            self.log.local |= label is not None and bool(label[1]) and not IN_JOB.search(line)

    def record(self, text: str, label: int | None) -> int | None:
        """Read one record; return the rank that has written it, None where that is not known."""
        if "#" in text and (frame := FRAME.search(text)):
            self.frame(frame)
            return label
        who = identity(text)
        rank = who.rank if who.rank is not None else label
        if ("orld" in text or "ORLD" in text or "clients" in text) and (found := WORLD.search(text)):
            self.log.world = max(self.log.world, min(int(found[1] or found[2]), MAX_RANKS))
        if who.group is None and who.in_group is None:
            who = Identity(rank, None, None)
        self.stack = self.works.get(who.rank) if "Stack trace of the failed" in text else None
        rank = who.in_group if rank is None else rank
        if "ork" in text or "initialization options" in text:
            self.watchdog(text, who, rank)
        self.differing(text)
        self.other(text, rank)
        return rank

    def watchdog(self, text: str, who: Identity, rank: int | None) -> None:
        """Read a watchdog's line: an operation, or the last numbers of a group."""
        if options := OPTIONS.search(text):
            who = Identity(int(options[2]), who.in_group, who.group)
            if who.group and is_default(who.group[1], who.group[2]):
                self.log.world = max(self.log.world, min(int(options[1]), MAX_RANKS))
            self.add(Event(who))
            return
        start, at = WORK.search(text), AT.search(text)
        last = {found[1].lower(): int(found[2]) for found in LAST.finditer(text)}
        work = work_of(text[start.start() :]) if start else None
        if work is not None and not work.kind and work.sequence is None:
            work = None  # the name of a C++ function
        if work is not None:
            self.works[who.rank] = who, work
            if rank is None:
                self.find(f"is in {work.kind or 'an operation'} number {work.sequence} of {work.inputs or '?'}", None)
        if work is not None or at or last:
            number = int(at[1]) if at else None
            enqueued, completed = last.get("enqueued"), last.get("completed")
            # Some versions have not set the last one that is completed.
            most = min((number or UNSET) - 1, UNSET if enqueued is None else enqueued)
            self.add(Event(who, work, number, enqueued, None if (completed or 0) > most else completed))

    def add(self, event: Event) -> None:
        """Keep an event, once."""
        if len(self.log.events) < MAX_EVENTS:
            self.log.events.setdefault(event)

    def find(self, what: str, rank: int | None) -> None:
        """Keep what has happened to a rank, once."""
        if len(self.log.findings) < MAX_EVENTS:
            self.log.findings.setdefault((what, rank))

    def frame(self, frame: re.Match[str]) -> None:
        """Note the innermost line outside PyTorch of the stack of the operation before it."""
        if self.stack is None or "/torch/" in frame[2]:
            return
        self.log.sites.setdefault(self.stack, f"{frame[2]}:{frame[3]} in {frame[1]}")
        self.stack = None

    def differing(self, text: str) -> None:
        """Read the two calls of "Detected mismatch between collectives"."""
        if "FingerPrint(" not in text:
            return
        calls: dict[str, set[int]] = {}
        for found in CALLS.finditer(text):
            work = work_of(found[2])
            number = work.sequence or 0
            if not calls:
                calls = self.log.differing.setdefault(number, {})
                first = number
            other = f" as its number {number}" if number != first else ""
            calls.setdefault(f"{work.kind} of {work.inputs or 'unknown size'}{other}", set()).add(int(found[1]))

    def other(self, text: str, rank: int | None) -> None:
        """Read what gloo, a monitored barrier, torchrun or Python says of a rank."""
        for word, pattern, what in LATE:
            if word in text and (found := pattern.search(text)):
                for late in re.findall(r"\d+", found[1]):
                    self.log.awaited.add(int(late))
                    self.find(what.format(*found.groups()[1:]), int(late))
        for word, pattern, what in SAID:
            if word in text and pattern.search(text):
                self.find(what, rank)
        if ("joined" in text or "orker" in text) and (found := JOINED.search(text)):
            here, all_ = (found[1], found[2]) if found[1] else (found[4], found[3])
            self.find(f"waited at the start: {here} of {all_} ranks joined", rank)
        if "rank  " in text and (found := ROOT[0].search(text)):
            self.failed = int(found[1])
        elif self.failed is not None and (found := ROOT[1].search(text)):
            self.find(f"ended with exit code {found[1]}, says torchrun", self.failed)
            self.failed = None
        elif (
            ("Error" in text or "Exception" in text) and rank is not None and rank not in self.log.raised
        ):  # what follows the first is often its consequence
            found = None if AFTER.search(text) else RAISED.search(text[: MAX_SHOWN * 10])
            if found:
                self.log.raised.add(rank)
                self.find(f"raised {found[1][:MAX_SHOWN]}", rank)


def identity(text: str) -> Identity:
    """Return who has written a record."""
    in_job = IN_JOB.search(text) if "[rank" in text else None
    found = next((found for pattern in GROUPS if (found := pattern.search(text))), None) if "[PG" in text else None
    inner = IN_GROUP.search(text) if "[Rank" in text else None
    in_group = int(found[4]) if found else int(inner[1]) if inner else None
    group = (found[1], found[2] or found[1], found[3] or "") if found else None
    return Identity(int(in_job[1]) if in_job else None, in_group, group)


def work_of(text: str) -> Work:
    """Return the operation whose fields a text begins with."""
    text = text[:2000]
    # What a second process has written into the same line is another operation.
    again = WORK.search(text, 4)
    text = text[: again.start()] if again else text
    kind, number, shape = KIND.search(text), NUMBER.search(text), SHAPE.search(text)
    counts = [int(found[1]) if (found := pattern.search(text)) else UNSET for pattern in SIZES]
    given, taken = (count if count < UNSET else None for count in counts)
    sizes = ["" if count is None else elements(count) for count in (given, taken)]
    if shape and given is None:
        sizes = [shape[1], shape[1]]
    name = kind[1] if kind else ""
    return Work(name, int(number[1]) if number else None, sizes[0], sizes[1], _group_size(name, given, taken))


def _group_size(name: str, given: int | None, taken: int | None) -> int:
    """Return the number of ranks by which the two sizes of an operation differ; 0 where they do not say it."""
    small, large = (given, taken) if "ALLGATHER" in name else (taken, given) if "REDUCE_SCATTER" in name else (0, 0)
    if not small or not large or large % small:
        return 0
    return large // small if large // small <= MAX_RANKS else 0


def elements(number: int) -> str:
    """Return "1 element" or "46,684,160 elements"."""
    return f"{number:,} element{'s' * (number != 1)}"


def is_default(name: str, description: str) -> bool:
    """Return whether a group is the one of all ranks."""
    return description == "default_pg" or (name == "0" and description in ("", "undefined"))


def read_log(path: Path, log: Log, rank: int | None = None) -> bool:
    """Read a file into `log`; return whether it tells of a hang. rank: whose it is, where its lines do not say so."""
    reader = Reader(log, rank)
    before = len(log)
    try:
        for line in log_lines(path):
            reader.line(line)
    except (OSError, EOFError, zlib.error):
        pass  # a file that has been cut, or cannot be read to its end: what was read counts
    told = before != len(log)
    log.files += told
    return told
