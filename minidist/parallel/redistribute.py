"""Tensors move to the ranks that hold them in another layout: each range travels once, one message per pair of ranks.

    before   rank 0 | a a a b b b |   rank 1 | c c c |         a, b, c: tensors
    after    rank 0 | a a a |         rank 1 | b b b c c c |   rank 0 sends b to rank 1

Every rank knows what it has and what it needs, as ranges of elements of named tensors. All ranks tell each other these
ranges (24 B each), and every rank derives the same list of transfers from them. A rank copies what it has already;
otherwise the source is a holder in the same place of another stage, or else the first holder. So the bytes received
are those of the ranges that a rank needs and does not have.

Source: the resharding of a checkpoint (PyTorch's `torch.distributed.checkpoint`), with messages in place of files.

Proved by: tests/parallel/test_redistribute.py, tests/techniques/test_repartition.py
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.errors import MismatchError
from minidist.core.base.random import fingerprint_number
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm

ROW = 3  # numbers that say which range: tensor, start, stop
NUMBER = 8  # bytes of each of them


class Piece(NamedTuple):
    """Elements [start, stop) of the flattened tensor `name`, which are `values`, a contiguous 1-D array."""

    name: str
    start: int
    stop: int
    values: Array


class Range(NamedTuple):
    """Elements [start, stop) of the tensor that is called `word` in messages."""

    word: int
    start: int
    stop: int


def _holder(pieces: Sequence[Piece], wanted: Range) -> Piece:
    return next(p for p in pieces if p.start <= wanted.start and wanted.stop <= p.stop)


def redistribute(comm: Comm, have: Sequence[Piece], need: Sequence[Piece], stride: int = 1) -> int:
    """Fill the values of `need` from the pieces that all ranks `have`. Every rank of `comm` calls it.

    stride: ranks whose numbers differ by a multiple of it are in the same place of different stages, and are the
    preferred sources. The pieces of `have` and `need` must not overlap in memory. Sends the ranges to every other rank
    (`table_bytes`) and one message to each rank that needs something from this one. Returns how many ranges all ranks
    have and need. Raises MismatchError for a range that no rank has.
    """
    # [1] Who has what, and who needs what: the same table on every rank.
    there, wanted = _exchange_ranges(comm, have), _exchange_ranges(comm, need)
    moves = transfers(there, wanted, stride)

    # [2] Receives are posted first, so that no send waits for one.
    received = {}
    for (source, target), ranges in moves.items():
        if target == comm.rank != source:
            received[source] = _bytes(_part(need[number], r) for number, r in ranges)  # to be overwritten
    requests = [comm.irecv(buffer, source) for source, buffer in received.items()]

    # [3] All ranges for one rank are one message; what stays is copied.
    held: dict[int, list[Piece]] = {}
    for piece in have:
        held.setdefault(_word(piece.name), []).append(piece)
    for (source, target), ranges in moves.items():
        if source != comm.rank:
            continue
        parts = [_part(_holder(held[r.word], r), r) for _, r in ranges]
        if target == comm.rank:
            for (number, r), part in zip(ranges, parts, strict=True):
                _part(need[number], r)[...] = part
        else:
            requests.append(comm.isend(_bytes(parts), target))
    comm.waitall(requests)

    # [4] Take the messages apart, in the order in which they were put together.
    for source, buffer in received.items():
        at = 0
        for number, r in moves[source, comm.rank]:
            view = _part(need[number], r)
            view.view(np.uint8)[...] = buffer[at : at + view.nbytes]
            at += view.nbytes
    return sum(map(len, there)) + sum(map(len, wanted))


def transfers(
    there: Sequence[Sequence[Range]], wanted: Sequence[Sequence[Range]], stride: int = 1
) -> dict[tuple[int, int], list[tuple[int, Range]]]:
    """Return (source, target) -> what moves: (number among the target's wanted ranges, part of it).

    source == target: it is copied.

    there, wanted: the ranges that each rank has, and needs. stride: as for `redistribute`.
    """
    holders: dict[int, list[tuple[int, Range]]] = {}
    for rank, ranges in enumerate(there):
        for held in ranges:
            holders.setdefault(held.word, []).append((rank, held))

    moves: dict[tuple[int, int], list[tuple[int, Range]]] = {}
    for target, ranges in enumerate(wanted):
        for number, needed in enumerate(ranges):
            # The rank itself first, then its like in another stage, then any.
            near = sorted(
                holders.get(needed.word, ()),
                key=lambda pair: (pair[0] != target, (pair[0] - target) % stride != 0, pair[0]),
            )
            gaps = [needed] if needed.start < needed.stop else []
            for source, held in near:
                found = [common for gap in gaps if (common := _overlap(gap, held)) is not None]
                if found:
                    moves.setdefault((source, target), []).extend((number, part) for part in found)
                    gaps = [rest for gap in gaps for rest in _without(gap, held)]
            if gaps:
                raise MismatchError(
                    f"rank {target} needs elements {gaps[0].start} to {gaps[0].stop} of a tensor, and no rank has them;"
                    " every rank must pass all that it has"
                )
    return moves


def lacking_bytes(have: Sequence[Piece], need: Sequence[Piece]) -> int:
    """Return the bytes that a rank receives: those of the ranges that it needs and does not have."""
    held: dict[str, list[Piece]] = {}
    for piece in have:
        held.setdefault(piece.name, []).append(piece)
    total = 0
    for piece in need:
        lacking = np.ones(piece.stop - piece.start, bool)
        for own in held.get(piece.name, ()):
            lacking[max(own.start - piece.start, 0) : max(own.stop - piece.start, 0)] = False
        total += int(np.count_nonzero(lacking)) * piece.values.itemsize
    return total


def table_bytes(ranges: int, ranks: int) -> int:
    """Return the bytes that all ranks send to tell each other `ranges` ranges in all, of `have` and of `need`."""
    return (ranks - 1) * NUMBER * (2 * ranks + ROW * ranges)


def _part(piece: Piece, part: Range) -> Array:
    """Return the elements of `part`, which lies inside the piece."""
    return piece.values[part.start - piece.start : part.stop - piece.start]


def _bytes(parts: Iterable[Array]) -> Array:
    """Return the bytes of arrays of any dtypes, one after the other."""
    return xp.concatenate([part.view(np.uint8) for part in parts])


def _exchange_ranges(comm: Comm, pieces: Sequence[Piece]) -> list[list[Range]]:
    """Return the ranges of all ranks. Two all-gathers: of the counts, and of the ranges."""
    rows = np.array([(_word(piece.name), piece.start, piece.stop) for piece in pieces], np.int64).reshape(-1)
    counts = np.asarray(all_gather(comm, np.array([len(pieces)]))).tolist()
    flat = np.asarray(all_gather(comm, rows, counts=[ROW * count for count in counts])).reshape(-1, ROW).tolist()
    found = iter(flat)
    return [[Range(*next(found)) for _ in range(count)] for count in counts]


def _word(name: str) -> int:
    return fingerprint_number(name, np.int64)


def _overlap(a: Range, b: Range) -> Range | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Range(a.word, start, stop) if start < stop else None


def _without(a: Range, b: Range) -> Iterator[Range]:
    """Yield what `b` leaves of `a`."""
    if a.start < min(a.stop, b.start):
        yield Range(a.word, a.start, min(a.stop, b.start))
    if max(a.start, b.stop) < a.stop:
        yield Range(a.word, max(a.start, b.stop), a.stop)
