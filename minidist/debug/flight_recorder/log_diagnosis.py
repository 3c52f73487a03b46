"""The diagnosis of a job from its text logs, alone or together with the dumps of some ranks.

    log     rank 0: ALLREDUCE number 7 of group 9, last completed 6      log     rank 1: last enqueued 6 in group 9
    as if   a dump with number 6, done, and number 7, not done           as if   a dump with number 6, done

So `diagnose` matches the ranks of a log as those of dumps. What it cannot know it does not say: which calls a rank has
made between two numbers of a log, who is in a group whose ranks the log does not list, and what a rank does that
has written no line.

Proved by: tests/flight_recorder/test_log_diagnosis.py
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted_path
from minidist.comm.unlike_calls import ranks_text
from minidist.debug.flight_recorder.diagnosis import MAX_LINES, Diagnosis, Difference, diagnose, shortened, together
from minidist.debug.flight_recorder.dump import Operation
from minidist.debug.flight_recorder.files import read_files
from minidist.debug.flight_recorder.log_ranks import UNNAMED, Members, Progress, log_dumps
from minidist.debug.flight_recorder.logs import Log, is_default


@dataclass(frozen=True)
class LogDiagnosis(Diagnosis):
    """What logs say, and dumps."""

    log: Log = field(default_factory=Log)
    dumps: tuple[int, ...] = ()  # ranks that have a dump
    progress: Progress = field(default_factory=dict)
    holes: Members = field(default_factory=dict)  # group -> ranks in it that have no line, and are not known in the job

    @property
    def hangs(self) -> bool:
        """Whether the log tells of anything: a job that goes well writes none of these lines."""
        return bool(self.log) or super().hangs

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: that of dumps, and under `log` what only a log has."""
        return super().as_dict() | {
            "log": {
                "files": self.log.files,
                "world": self.log.world or None,
                "progress": {
                    name: {rank: {"enqueued": e, "completed": c} for rank, (e, c) in ranks.items()}
                    for name, ranks in self.progress.items()
                },
                "findings": [{"rank": rank, "finding": text} for text, rank in self.log.findings],
                "mismatches": {
                    number: {what: sorted(ranks) for what, ranks in calls.items()}
                    for number, calls in self.log.differing.items()
                },
                "awaited": sorted(self.log.awaited),
                "ranks_in_group_without_line": self.holes,
            }
        }

    def head(self) -> list[str]:
        """Return what was read, of whom nothing was, and what the ranks have written apart from operations."""
        spoken = self.log.spoken
        lines = [f"{len(self.dumps)} dumps: {ranks_text(self.dumps)}"] if self.dumps else []
        what = ranks_text(spoken) if spoken else "no line names a rank"
        of = f" of {self.log.world:,}" if self.log.world else ""
        lines.append(f"{self.log.files:,} log{'s' * (self.log.files != 1)} with lines about a hang: {what}{of}")
        silent = {*self.without_dump, *range(self.log.world)} - spoken - set(self.dumps)
        if silent and not self.log.nameless:
            lines.append(f"no line: {ranks_text(silent)}; such a rank crashed, reached no timeout, or writes elsewhere")
        for number, calls in sorted(self.log.differing.items())[:MAX_LINES]:
            texts = [f"{what} on {ranks_text(ranks)}" for what, ranks in calls.items()]
            lines.append(f"first difference: number {number} is {', and '.join(texts)}")
        ranks = together([(rank, f" {text}") for text, rank in self.log.findings if rank is not None], "", "")
        return lines + shortened([*ranks, *(f"a rank {text}" for text, rank in self.log.findings if rank is None)])

    def group_text(self, name: str) -> str:
        """Return "group 2 (GUID 9)"."""
        return super().group_text(name) if name != UNNAMED else "a group that the log does not name"

    def met_text(self, operation: Operation) -> str:
        """Return why an operation has not ended that waits for no rank which is known."""
        if not operation.in_log:
            return super().met_text(operation)
        if operation.is_message:
            return "the log does not name the other side of this message"
        return "every rank with a line about this group is in it"

    def ended_text(self, operation: Operation) -> str:
        """Return which ranks have ended a call that has not ended here."""
        if not operation.in_log or operation.is_message:
            return ""
        first = self.first_open[operation.group]
        done = [
            rank
            for rank, (_, completed) in self.progress[operation.group].items()
            if max(completed or -1, first.get(rank, 0) - 1) >= operation.sequence > -1
        ]
        return f"; {ranks_text(done)} {'have' if len(done) > 1 else 'has'} ended this number" if done else ""

    @cached_property
    def first_open(self) -> dict[str, dict[int, int]]:
        """Group -> rank -> number of its first collective that has not ended."""
        first: dict[str, dict[int, int]] = defaultdict(dict)
        for operation in (wait.operation for wait in self.waits if not wait.operation.is_message):
            first[operation.group][operation.rank] = operation.sequence
        return first

    def absent_text(self, difference: Difference) -> str:
        """Return what is known of the ranks without a call."""
        known = self.progress.get(difference.group, {})
        late = [rank for rank in difference.absent if rank in known or rank in self.dumps]
        silent = [rank for rank in difference.absent if rank not in late]
        text = f"; {ranks_text(late)} {'have' if len(late) > 1 else 'has'} not enqueued it" if late else ""
        return text + (f"; no line of {ranks_text(silent)} is about this group" if silent else "")

    def suspect_text(self, rank: int) -> str:
        """Return what is known of a rank for which others wait."""
        if rank in self.dumps:
            return super().suspect_text(rank)
        last = [
            f"number {enqueued} of {self.group_text(name)}"
            for name, ranks in self.progress.items()
            if (enqueued := ranks.get(rank, (None, None))[0]) is not None
        ]
        if last:
            return (
                f": others wait, and the last that it has enqueued is {' and '.join(last)}; it computes, is inside"
                " the next call, or has crashed"
            )
        if self.log.raised or self.log.awaited:
            return ""  # which end the job before ranks like this one have reached a timeout
        return ": others wait, and the log has no watchdog's line from there"

    def foot(self) -> list[str]:
        """Return where to look first, the last numbers of every rank, and what the log cannot tell."""
        lines = []
        if self.log.awaited:
            lines.append(f"look first at {ranks_text(self.log.awaited)}, for which others have waited")
        if self.log.raised and self.log.spoken - self.log.raised:
            lines.append(f"look first at {ranks_text(self.log.raised)}, whose exception is not a timeout")
        return [*lines, *shortened(list(self.last_numbers())), *self.left_open()]

    def last_numbers(self) -> Iterator[str]:
        """Yield for each group the numbers of the calls that its ranks have made, and have ended, last."""
        for name, ranks in self.progress.items():
            for at, word in enumerate(("enqueued", "completed")):
                by: dict[int, list[int]] = defaultdict(list)
                for rank, numbers in ranks.items():
                    if (number := numbers[at]) is not None:
                        by[number].append(rank)
                if by:
                    texts = [f"{number} on {ranks_text(each)}" for number, each in sorted(by.items())[:MAX_LINES]]
                    yield f"last {word} in {self.group_text(name)}: {', '.join(texts)}"

    def _unnamed(self) -> Iterator[str]:
        if UNNAMED in self.groups:
            different = {wait.operation.sequence for wait in self.waits if wait.operation.group == UNNAMED}
            more = "; numbers that differ may be of different groups" if len(different) > 1 else ""
            yield f"these lines do not name their group, which is taken to be one of all ranks{more}"

    def left_open(self) -> Iterator[str]:
        """Yield what the log cannot tell."""
        for name, ranks in self.holes.items():
            yield f"no line: {ranks_text(ranks)} of {self.group_text(name)}, counted in the group"
        yield from self._unnamed()
        smaller = any(name and not is_default(name, text) for name, (text, _) in self.groups.items())
        if self.waits and not self.log.in_job and smaller:
            yield "these lines give ranks in their groups, which are taken to be those of the job"
        if self.log.local:
            yield "ranks are those of torchrun's prefixes, which count from 0 on every node"
        if self.waits and not (self.differences or self.log.awaited or any(wait.missing for wait in self.waits)):
            yield (
                "the lines show no rank that differs: dumps of the Flight Recorder tell more, and the network, a GPU or"
                " an earlier operation may hold it up"
            )
        if not self.log.world:
            yield "the log does not give the number of ranks: add --ranks N to see who has written nothing"


def diagnose_files(path: str | Path, world: int = 0) -> Diagnosis:
    """Read the dumps and the logs of a folder, or one file; return what they say together.

    world: the number of ranks, 0 where it is not known. Raises UsageError where there is neither a dump nor a line of a
    log that tells of a hang, and for a file that has the name of a dump and is none.
    """
    dumps, log = read_files(path)
    log.world = world or log.world
    spoken = {rank for _, rank in log.findings if rank is not None} | log.awaited | {dump.rank for dump in dumps}
    highest = max((*spoken, *(event.who.rank or 0 for event in log.events)), default=0)
    if world and world <= highest:
        raise UsageError(f"--ranks {world}, and {quoted_path(path)} has rank {highest}; give at least {highest + 1}")
    if log.world <= highest:
        log.world = 0  # it is the size of a part of the job
    if not log:
        return diagnose(dumps, world)
    logged, progress, holes = log_dumps(log, dumps)
    found = diagnose([*dumps, *logged], log.world, LogDiagnosis)
    assert isinstance(found, LogDiagnosis)
    versions = tuple(sorted({dump.version for dump in dumps}))
    return replace(
        found, log=log, dumps=tuple(d.rank for d in dumps), progress=progress, holes=holes, versions=versions
    )
