"""From the records of a log to the operations of every rank, in the form of a dump.

A record names its rank in the job, in a group, or both; its operation, its group, or both. What one record leaves out
another one of the same rank and number tells:

    [rank4]: [Rank 0] ... WorkNCCL(SeqNum=7, OpType=ALLREDUCE)           rank 4, number 7
    [rank4]: [PG ID 2 PG GUID 9 Rank 0] ... at work: 7                   rank 4, rank 0 of group 9, number 7
                                                                         so ALLREDUCE is number 7 of group 9

Proved by: tests/flight_recorder/test_log_diagnosis.py
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import ClassVar

from minidist.debug.flight_recorder.diagnosis import IN_LOGS
from minidist.debug.flight_recorder.dump import Dump, Operation
from minidist.debug.flight_recorder.logs import Event, Log, Work, is_default

UNNAMED = ""  # the group of lines that name none
Progress = dict[str, dict[int, tuple[int | None, int | None]]]  # group -> rank -> (last enqueued, last completed)
Members = dict[str, tuple[int, ...]]  # group -> ranks
Works = dict[str, dict[int, tuple[Work, str]]]  # group -> number -> (operation, file:line in function)


class LoggedOperation(Operation):
    """An operation that a log names: kind "", sequence -1 and sizes "" where the log leaves them out."""

    in_log: ClassVar[bool] = True


def log_dumps(log: Log, dumps: Sequence[Dump]) -> tuple[list[Dump], Progress, Members]:
    """Return the ranks of a log that have no dump as dumps, how far each rank has come in each group, and what is left.

    That are the ranks of a group, counted in it, that have no line, and whose rank in the job no line gives.
    """
    of_rank = by_rank(log)
    whole = {rank: works_of(events, log) for rank, events in of_rank.items()}
    name_the_rest(whole)
    progress: Progress = defaultdict(dict)
    for rank, events in of_rank.items():
        for name in whole[rank]:
            progress[name][rank] = last_numbers(event for event in events if group_of(event) == name)

    # With dumps, groups have the names and the operations the kinds of dumps.
    shown = {} if dumps else shown_names(of_rank)
    title = {name: shown.get(name, (name, ""))[0] for name in progress}
    members, holes = members_of(log, of_rank, whole, progress)
    listed = {} if dumps else {title[name]: (shown[name][1], ranks) for name, ranks in members.items()}
    result: list[Dump] = []
    for rank in sorted(of_rank.keys() - {dump.rank for dump in dumps}):
        operations: list[Operation] = []
        reach: dict[str, float] = {}
        for name, works in whole[rank].items():
            last = progress[name][rank]
            for operation in operations_of(rank, works, last, bool(dumps)):
                operations.append(replace(operation, number=len(operations), group=title[name]))
            reach[title[name]] = math.inf if last[0] is None else last[0]
        result.append(Dump(rank, "log", {} if result else listed, tuple(operations), False, reach))
    titled_progress = {title[name]: ranks for name, ranks in progress.items()}
    return result, titled_progress, {title[name]: ranks for name, ranks in holes.items()}


def group_of(event: Event) -> str:
    """Return the name of the group of an event."""
    return event.who.group[1] if event.who.group else UNNAMED


def by_rank(log: Log) -> dict[int, list[Event]]:
    """Return the events of each rank of the job, in their order.

    A record that names only the rank in a group is of that rank of the job where another record says which it is, or
    where the group is the one of all ranks; else, where other records have ranks of the job, it is left out.
    """
    known = [event.who for event in log.events if event.who.rank is not None]
    ranks = {(who.group[1], who.in_group): who.rank for who in known if who.group and who.in_group is not None}
    result: dict[int, list[Event]] = defaultdict(list)
    for event in log.events:
        who = event.who
        rank = who.rank
        if rank is None and who.group and who.in_group is not None:
            rank = ranks.get((who.group[1], who.in_group))
        if rank is None and (not known or who.group is None or is_default(*who.group[1:])):
            rank = who.in_group
        if rank is not None:
            result[rank].append(event)
    return result


def works_of(events: Sequence[Event], log: Log) -> Works:
    """Return the operations of a rank by group; those whose group no record names are of UNNAMED."""
    works: Works = defaultdict(dict)
    alone: dict[int, tuple[Work, str]] = {}
    for event in events:
        name = group_of(event)
        if event.work is not None:
            site = log.sites.get((event.who, event.work), "")
            number = -1 if event.work.sequence is None else event.work.sequence
            (alone if name == UNNAMED else works[name]).setdefault(number, (event.work, site))
        else:
            works[name]  # the group is known to the rank, though no operation of it may be
    for event in events:
        if event.work is None and event.at is not None:
            known = alone.pop(event.at, None)
            works[group_of(event)].setdefault(event.at, known or (Work("", event.at, "", ""), ""))
    for numbers in works.values():
        for number in numbers:
            alone.pop(number, None)  # the same record, once more
    if alone:
        works[UNNAMED].update(alone)
    return dict(works)


def name_the_rest(whole: dict[int, Works]) -> None:
    """Move operations without a group to the only group in which another rank has one of this number."""
    groups: dict[int, set[str]] = defaultdict(set)
    for works in whole.values():
        for name, numbers in works.items():
            for number in numbers if name != UNNAMED else ():
                groups[number].add(name)
    for works in whole.values():
        for number in list(works.get(UNNAMED, ())):
            if len(groups[number]) == 1 and not works.keys() & groups[number]:
                works.setdefault(next(iter(groups[number])), {})[number] = works[UNNAMED].pop(number)
                if not works[UNNAMED]:
                    del works[UNNAMED]


def last_numbers(events: Iterable[Event]) -> tuple[int | None, int | None]:
    """Return the last number that is enqueued, and the last that is completed; None where no event says it."""
    numbers = [(event.enqueued, event.completed) for event in events]
    enqueued, completed = ([n[at] for n in numbers if n[at] is not None] for at in (0, 1))
    return max(enqueued, default=None), max(completed, default=None)  # type: ignore[type-var]


def operations_of(
    rank: int, works: dict[int, tuple[Work, str]], last: tuple[int | None, int | None], beside_dumps: bool
) -> list[Operation]:
    """Return the operations of a rank in a group: the last that is completed, and those that have not ended."""
    enqueued, completed = last
    found = dict(works)
    after = max(completed or 0, 0) + 1
    if enqueued is not None and completed is not None and enqueued >= after and not found:
        found[after] = (Work("", after, "", ""), "")
    numbers = sorted(found)
    done = [completed] if completed is not None and completed > 0 and completed not in found else []
    result: list[Operation] = []
    for number in (*done, *numbers):
        work, site = found.get(number, (Work("", number, "", ""), ""))
        kind, sizes = work.kind, (work.inputs, work.outputs)
        if beside_dumps:
            # A dump has shapes where a log has numbers of elements, and leaves coalesced operations out.
            kind, sizes = "" if kind == "COALESCED" else IN_LOGS.get(kind, kind.lower()), ("", "")
        is_done = completed is not None and -1 < number <= completed
        result.append(LoggedOperation(rank, 0, "", kind, number, None, *sizes, "", is_done, 0, site))
    return result


def shown_names(of_rank: dict[int, list[Event]]) -> dict[str, tuple[str, str]]:
    """Return group -> (what a report calls it, its description): the number that a group has on all of its ranks."""
    numbers: dict[str, set[str]] = defaultdict(set)
    described: dict[str, str] = {UNNAMED: ""}
    for number, name, description in (e.who.group for events in of_rank.values() for e in events if e.who.group):
        numbers[name].add(number)
        described[name] = description or described.get(name, "")
    used = Counter(chain(described, *numbers.values()))
    result = {}
    for name, description in described.items():
        number, *others = numbers[name] or [name]
        taken = used[number] > 1
        if others or number in ("", name):
            result[name] = name, description
        elif taken:
            result[name] = name, ", ".join(filter(None, (f"PG ID {number}", description)))
        else:
            result[name] = number, ", ".join(filter(None, (f"GUID {name}", description)))
    return result


def members_of(
    log: Log, of_rank: dict[int, list[Event]], whole: dict[int, Works], progress: Progress
) -> tuple[Members, Members]:
    """Return the ranks of every group, as far as the log tells them, and the others that have no line, as ranks in it.

    All ranks are in the default group, and in the one that is not named; without their number those up to the last one
    with a line. Of another group the ranks are those with a line, and those that must be between two of them.
    """
    sizes, (whose, default) = group_sizes(whole), places_of(of_rank)
    seen = {*of_rank, *log.spoken, *log.awaited}
    size = log.world or max((sizes[name] for name in default & sizes.keys() - {UNNAMED}), default=0)
    # Where most ranks have no line, and their number is not known, the log is one of several.
    is_part = not size and max(seen, default=0) >= 3 * len(seen)
    everyone = seen if is_part else seen | set(range(size or max(seen, default=-1) + 1))
    result, holes = {}, {}
    for name, ranks in progress.items():
        if name in default:
            result[name] = tuple(sorted(everyone))
            continue
        between, unknown = between_known(whose[name], sizes[name])
        result[name] = tuple(sorted({*ranks, *between}))
        if unknown:
            holes[name] = tuple(unknown)
    return result, holes


def group_sizes(whole: dict[int, Works]) -> dict[str, int]:
    """Return the number of ranks of every group, 0 where no operation tells it."""
    sizes: dict[str, int] = defaultdict(int)
    for name, works in chain.from_iterable(each.items() for each in whole.values()):
        sizes[name] = max(sizes[name], *(work.ranks for work, _ in works.values()), 0)
    return sizes


def places_of(of_rank: dict[int, list[Event]]) -> tuple[dict[str, dict[int, int]], set[str]]:
    """Return group -> rank in it -> rank of the job, as far as lines say it, and the names of the default group."""
    whose: dict[str, dict[int, int]] = defaultdict(dict)
    default = {UNNAMED}
    for rank, events in of_rank.items():
        for who in (event.who for event in events if event.who.group):
            assert who.group is not None
            if is_default(*who.group[1:]):
                default.add(who.group[1])
            if who.in_group is not None and who.rank is not None:
                whose[who.group[1]][who.in_group] = rank
    return whose, default


def between_known(whose: dict[int, int], size: int) -> tuple[list[int], list[int]]:
    """Return ranks of the job that must be in a group, and the ranks in it that may be any rank of the job.

    whose: rank in the group -> rank of the job, where a line says it. Ranks of a group are in order, so those in a hole
    that is as wide in the job as in the group are known.
    """
    known: list[int] = []
    unknown: list[int] = []
    places = sorted(whose.items())
    for (place, rank), (next_place, next_rank) in zip([(-1, -1), *places], places, strict=False):
        if next_place - place == next_rank - rank:
            known += range(rank + 1, next_rank)
        else:
            unknown += range(place + 1, next_place)
    if places:
        unknown += range(places[-1][0] + 1, size)
    return known, unknown
