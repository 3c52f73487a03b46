"""The sentence about collective calls in which ranks differ: which call it is, who made which, and who skipped one.

Imported when two calls have differed.

Proved by: tests/comm/test_call_log.py, tests/comm/sim/test_look_ahead.py
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from minidist.base.errors import quoted
from minidist.comm.call_log import Call
from minidist.comm.differences import unlike_operations, without_shape

# Operations to which every rank passes an array of the same size. A gather takes other sizes from other ranks.
OF_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "reduce_scatter")
MOST_GROUPS = 8  # of ranks that made unlike calls, which a sentence lists


class Kind(NamedTuple):
    """What is compared of a call. size: dtype and number of elements, where they must be equal, else None."""

    key: str
    size: tuple[str, int] | None


def unlike_calls(
    name: str, calls: Mapping[int, Iterable[Call]], ended: Collection[int] = (), met: int | None = None
) -> str:
    """Return a sentence about the first call in which ranks differ; "" when the calls that are known agree.

    name: of the communicator. calls: the known calls of each world rank, oldest first. ended: ranks that make no more,
    so that a call that one of them has not made is a difference, too. met: the number of a call whose messages have
    not fitted, so that what the ranks have passed to it is compared, whatever the operation is.
    """
    # By number, then by what is compared: the ranks that made it.
    logs = {rank: list(of_rank) for rank, of_rank in sorted(calls.items())}
    table: dict[int, dict[Kind, list[tuple[int, Call]]]] = {}
    for rank, log in logs.items():
        for call in log:
            table.setdefault(call[0], {}).setdefault(_kind(call, call[0] == met), []).append((rank, call))

    for number, groups in sorted(table.items()):
        which = f"call {number} of {name}"
        made = [rank for group in groups.values() for rank, _ in group]
        absent = [rank for rank in logs if rank in ended and rank not in made]
        absent = [rank for rank in absent if all(number > call[0] for call in logs[rank])]
        if len(groups) > 1:
            what, remedy = _difference(*list(groups)[:2])
            missing = f"; {ranks_text(absent)} made no such call" if absent else ""
            later = _later_calls(number, groups, logs, ended)
            return f"{what}: {which} is {_of_each(groups)}{missing}{later}; {remedy}"
        if absent:
            return (
                f"calls differ: {which} is {_of_each(groups)}, and {ranks_text(absent)} made no such call; every rank"
                " of a communicator must call the same collectives in the same order"
            )
    return ""


def _kind(call: Call, met: bool = False) -> Kind:
    """Return what is compared of a call. met: also its sizes, of whatever operation it is."""
    _, key, _, passed = call
    if passed is None or not (met or key.startswith(OF_EQUAL_SIZES)):
        return Kind(key, None)
    return Kind(key, (str(passed[0]), math.prod(passed[1])))


def _difference(first: Kind, second: Kind) -> tuple[str, str]:
    """Return what differs between two calls of one number, and the remedy."""
    if first.key != second.key or first.size is None or second.size is None:
        return unlike_operations(first.key, second.key)
    if first.size[0] != second.size[0]:
        return "dtype mismatch", "convert one side: every rank must pass the same dtype"
    counts = "" if first.key.startswith(OF_EQUAL_SIZES) else ", or as many elements as the counts of all ranks say"
    return "shape mismatch", f"every rank must pass an array of the same shape{counts}"


def _of_each(groups: Mapping[Kind, Sequence[tuple[int, Call]]]) -> str:
    """Return "broadcast root 0 on rank 0 and broadcast root 1 on ranks 1, 2, at program.py:3".

    Where only the arrays differ: "all_reduce of float32[2] on rank 0 and of float32[3] on rank 1, at program.py:3".
    """
    sites = {str(call[2]) for made in groups.values() for _, call in made}
    # Where the arrays alone differ, the algorithm and its arguments explain nothing; nor do arrays where these differ.
    equal = len({without_shape(kind.key) for kind in groups}) == 1
    operations = len({kind.key.partition("/")[0] for kind in groups})
    parts: list[str] = []
    for kind, made in list(groups.items())[:MOST_GROUPS]:
        _, _, site, passed = made[0][1]
        where = f" at {site}" if len(sites) > 1 else ""
        key = kind.key
        if passed is not None and (equal or operations > 1):
            key = ("" if parts else key.partition("/")[0]) if equal else without_shape(key)
            key = f"{key} of {passed[0]}{list(passed[1])}".strip()
        parts.append(f"{quoted(key, marks=False)} on {_ranks_of(made)}{where}")
    if len(groups) > MOST_GROUPS:
        parts.append(f"other calls on {sum(map(len, list(groups.values())[MOST_GROUPS:]))} more ranks")
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return text if len(sites) > 1 else f"{text}, at {sites.pop()}"


def _permuted(some: Sequence[Kind], others: Sequence[Kind]) -> int:
    """Return the least number of calls, from 2, that both make, in whatever order; 0 where there is none."""
    return next((m for m in range(2, len(some) + 1) if Counter(some[:m]) == Counter(others[:m])), 0)


def _later_calls(
    number: int,
    groups: Mapping[Kind, Sequence[tuple[int, Call]]],
    logs: Mapping[int, Sequence[Call]],
    ended: Collection[int],
) -> str:
    """Return what the calls from the first difference on have in common: a rank skipped one, or has another order."""
    # The ranks of the largest group are taken for right; each other group's first rank stands for it.
    largest = max(groups.values(), key=len)
    right, others = largest[0][0], [made for made in groups.values() if made is not largest]
    rights = [_kind(call) for call in logs[right] if call[0] >= number]
    sentences = []
    for made in others[:MOST_GROUPS]:
        found = []
        theirs = [_kind(call) for call in logs[made[0][0]] if call[0] >= number]
        m = _permuted(rights, theirs)
        skips = [
            _skipped(number, without, whole)
            for without, whole, calls in ((made, largest, (theirs, rights)), (largest, made, (rights, theirs)))
            if _is_shifted(*calls, without[0][0] in ended, whole[0][0] in ended)
        ]
        # In a loop whoever has skipped a call makes the same ones in another order, too; of two calls either may be so.
        if m and (m == 2 or not skips):
            last = f" and {number + 1} in the other" if m == 2 else f" to {number + m - 1} in another"
            found.append(f"{_ranks_of(made)} make{'s' * (len(made) == 1)} calls {number}{last} order")
        found += skips[:1]
        sentences += [", or ".join(found)] * bool(found)
    return "".join(f"; {sentence}" for sentence in sentences)


def _ranks_of(made: Sequence[tuple[int, Call]]) -> str:
    return ranks_text([rank for rank, _ in made])


def _skipped(number: int, without: Sequence[tuple[int, Call]], whole: Sequence[tuple[int, Call]]) -> str:
    """Return the sentence of ranks that have skipped a call which others have made."""
    first = whole[0][0]
    return (
        f"{_ranks_of(without)} made no call like call {number} of rank {first}, and"
        f" {'its' if len(without) == 1 else 'their'} later calls are rank {first}'s, one earlier"
    )


def _is_shifted(skipping: Sequence[Kind], whole: Sequence[Kind], skipping_ended: bool, whole_ended: bool) -> bool:
    """Return whether the first calls are the second ones without their first: none known contradicts it."""
    rest = whole[1:]
    common = min(len(skipping), len(rest))
    if not common or list(skipping[:common]) != list(rest[:common]):
        return False
    # Of a rank that has ended all calls are known, so that the other one cannot have more.
    longer_skipping, longer_rest = len(skipping) > common, len(rest) > common
    return not (longer_skipping and whole_ended) and not (longer_rest and skipping_ended)


def on_several_communicators(waits: Iterable[tuple[str, str, Sequence[int], int]]) -> Iterator[str]:
    """Yield the operations that some ranks call on one communicator and some on another.

    waits: operation, communicator, its members, and the rank that waits in it.
    """
    calls: dict[str, dict[str, list[tuple[Sequence[int], int]]]] = defaultdict(lambda: defaultdict(list))
    for operation, name, members, rank in waits:
        calls[operation][name].append((members, rank))
    for operation, places in calls.items():
        if len(places) > 1:
            each = [
                f"{ranks_text(rank for _, rank in made)} on {name} ({ranks_text(made[0][0])})"
                for name, made in places.items()
            ]
            yield f"{operation} is called by {', and by '.join(each)}: all ranks of a communicator must call it there"


def ranks_text(ranks: Iterable[int], most: int = 8) -> str:
    """Return "rank 1", or "ranks 0, 1, 2 and 5 more"; at most `most` are listed."""
    listed = sorted(ranks)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed[:most]))}{more}"
