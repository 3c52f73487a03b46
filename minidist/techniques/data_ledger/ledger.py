"""`--check-data`: every sample is read exactly once in each epoch, by whichever ranks, also across a resume.

Each epoch is a permutation of the samples. The permutations, laid end to end, are one list, and every step takes the
next samples of this list (`data.sampler`). After a step each rank knows the numbers of its samples, and all
ranks together must have read the next ones of the list, each once:

    the list        | 3 0 2 4 1 | 2 1 4 0 3 | ...      epoch 0, epoch 1
    done = 4              step ──▶| 1 2 1 |             three samples, the last one of epoch 0 and two of epoch 1
    rank 0 reads 1, 2; rank 1 reads 1                   equal as multisets: the step is right
    rank 0 reads 1, 2; rank 1 reads 2                   sample 2 twice, sample 1 of epoch 1 by no rank

So that little is sent, ranks compare a digest of the multiset: the sum of a hash of each number, modulo 2^64. Only when
it is wrong are the numbers themselves sent, to name the samples and the ranks. `done` counts what was read, not steps.
A checkpoint keeps it, with the digest of what was read of the open epoch, and not with the ranks that read it: a job
that is resumed on other ranks, or that lays the epoch out in another order, is held to the same list.

Ranks that split a layer, a sequence or a model read the same samples. Each such copy of the data is checked by itself,
its inputs and its targets apart, since the last stage of a pipeline may read the latter. Which replica reads a sample,
and in which of its micro-batches, is not checked.

Source: Clarke, Devadas, van Dijk, Gassend, Suh: Incremental multiset hash functions and their application to memory
integrity checking, ASIACRYPT 2003, section 5 (MSet-Add-Hash), without its key. The hash of a number is the output
function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).

Proved by: tests/techniques/test_data_ledger.py
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from minidist.core.base.errors import MismatchError
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.data.sampler import SIDES, permutation

new_purpose("data_check")

ROW = 8 * (1 + 2 * len(SIDES))  # bytes that a rank tells every other one: its copy, and a count and a digest per side
SHOWN = 3  # samples that an error names

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class DataLedger:
    """What a rank has read since the last check, and how much of the endless list all ranks had read by then.

    samples: of an epoch. block: of `shuffle:B`; 0 without it. done: samples of the job that were checked. due: those of
    the steps since then.
    """

    def __init__(self, samples: int, seed: int, block: int = 0) -> None:
        self.samples, self.seed, self.block, self.done, self.due = samples, seed, block, 0, 0
        self._read: dict[str, list[Numbers]] = {side: [] for side in SIDES}
        self._checked_epoch = -1

    def expect(self, count: int) -> None:
        """Note that all ranks together read `count` more samples before the next check."""
        self.due += count

    def record(self, numbers: Numbers, sides: Iterable[str] = SIDES) -> None:
        """Note that this rank has read the samples with these numbers."""
        for side in sides:
            self._read[side].append(numbers)

    def check(self, comm: Comm, copy: int, place: str) -> None:
        """Raise MismatchError on every rank unless what was read since the last check is what was next.

        copy: the copy of the data that this rank belongs to; ranks with the same number share the samples among them.
        place: where the job is, for the message. Each rank sends 40 B to every other one (purpose data_check), and
        after a mismatch the numbers that it has read.
        """
        read = {side: _joined(numbers) for side, numbers in self._read.items()}
        self._read = {side: [] for side in SIDES}
        row = [copy, *(value for side in SIDES for value in (read[side].size, digest(read[side])))]
        with purpose("data_check"):
            rows = np.asarray(all_gather(comm, np.array(row, np.uint64))).reshape(comm.size, -1)

        # The ranks of a copy together: counts and digests add up.
        copies = rows[:, 0].tolist()
        totals: Counter[tuple[int, int]] = Counter()
        for rank, values in enumerate(rows[:, 1:].tolist()):
            for i, value in enumerate(values):
                totals[copies[rank], i] += value

        # They must be those of the next samples of the list.
        expected = self._next()
        wanted = [value for _ in SIDES for value in (expected.size, digest(expected))]
        wrong = [(key[0], key[1] // 2) for key, total in sorted(totals.items()) if total % 2**64 != wanted[key[1]]]
        if wrong:
            self._explain(comm, read, copies, wrong[0], expected, place)
        self.done, self.due = self.done + self.due, 0

    def _next(self) -> Numbers:
        """Return the numbers of the samples that are due; MismatchError when an epoch is not every sample once."""
        places = np.arange(self.done, self.done + self.due)
        epochs, offsets = places // self.samples, places % self.samples
        numbers = np.empty(self.due, np.int64)
        for epoch in np.unique(epochs).tolist():
            order = permutation(self.seed, epoch, self.samples, self.block)
            if epoch > self._checked_epoch:
                self._each_once(order, epoch)
            numbers[epochs == epoch] = order[offsets[epochs == epoch]]
        return numbers

    def _each_once(self, order: Numbers, epoch: int) -> None:
        """Raise MismatchError when the order of an epoch is not a permutation."""
        times = np.bincount(order, minlength=self.samples)
        if order.size != self.samples or (times != 1).any():
            wrong = int(np.flatnonzero(times != 1)[0])
            raise MismatchError(
                f"the order of epoch {epoch} has sample {wrong} {_times(int(times[wrong]))}, and"
                f" {order.size} places for {self.samples} samples; an epoch is every sample once"
            )
        self._checked_epoch = epoch

    def _explain(
        self,
        comm: Comm,
        read: dict[str, Numbers],
        copies: list[int],
        wrong: tuple[int, int],
        expected: Numbers,
        place: str,
    ) -> None:
        """Raise MismatchError that names the samples that a copy of the data has read too often, or never."""
        # Everyone learns what the ranks of the copy have read.
        copy, side = wrong[0], SIDES[wrong[1]]
        mine = read[side] if copies[comm.rank] == copy else np.empty(0, np.int64)
        with purpose("data_check"):
            counts = np.asarray(all_gather(comm, np.array([mine.size]))).tolist()
            numbers = np.asarray(all_gather(comm, mine, counts=counts))
        ranks = np.repeat(np.arange(comm.size), counts)

        # Which of them are too many, and which are missing.
        found, due = Counter(numbers.tolist()), Counter(expected.tolist())
        again, never = sorted(found - due), sorted(due - found)
        epochs = sorted({self.done // self.samples, max(self.done, self.done + expected.size - 1) // self.samples})
        where = f"{place}, {'epoch' if len(epochs) == 1 else 'epochs'} {' and '.join(map(str, epochs))}"
        parts = [self._again(n, ranks[numbers == n].tolist(), due[n]) for n in again[:SHOWN]]
        parts += [f"sample {n} was read by no rank" for n in never[:SHOWN]]
        more = f" (of {expected.size} samples, {len(again)} too often and {len(never)} never)"
        of = [rank for rank, number in enumerate(copies) if number == copy]
        among = f" on {_listed(of)}, of several copies of the data" if len(set(copies)) > 1 else ""
        raise MismatchError(
            f"{where}: of the {side}, {'; '.join(parts)}{more}{among}; the shares of the ranks overlap, or the data"
            " were not continued where they stopped"
        )

    def _again(self, number: int, ranks: list[int], due: int) -> str:
        """Return the sentence of a sample that was read too often."""
        if due or len(ranks) > 1:
            return f"sample {number} was read {_times(len(ranks))}, by {_listed(ranks)}"
        # Once, and not due: earlier in its epoch, or later.
        epoch, offset = divmod(self.done, self.samples)
        order = permutation(self.seed, epoch, self.samples, self.block).tolist()
        when = "for the second time in the epoch" if number in order[:offset] else "before its turn"
        if number not in order:
            when = f"and the samples are 0 to {self.samples - 1}"
        return f"sample {number} was read by rank {ranks[0]} {when}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the samples read so far, and the digest of those of the open epoch."""
        return {"done": self.done, "open_epoch": f"{self._open_epoch():016x}"}

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the `state` of a checkpoint; without a digest nothing is known but how many were read.

        Raises MismatchError when the order of this job's epoch does not begin with the samples that were read.
        """
        self.done = state["done"]
        if state.get("open_epoch") not in (None, f"{self._open_epoch():016x}"):
            epoch, offset = divmod(self.done, self.samples)
            raise MismatchError(
                f"the job that is resumed had read {offset} of the {self.samples} samples of epoch {epoch}, and they"
                " are not the first ones of that epoch in this job, so some would be read twice and others never;"
                " resume with the data, --context and --seed of that job"
            )

    def _open_epoch(self) -> int:
        epoch, offset = divmod(self.done, self.samples)
        return digest(permutation(self.seed, epoch, self.samples, self.block)[:offset])


def digest(numbers: Numbers) -> int:
    """Return the sum of a hash of each number, modulo 2^64: equal multisets of numbers have equal digests."""
    z = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


def _joined(numbers: list[Numbers]) -> Numbers:
    return np.concatenate(numbers) if numbers else np.empty(0, np.int64)


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _listed(ranks: Iterable[int]) -> str:
    """Return ranks as text, the first eight of many."""
    shown = sorted(set(ranks))
    numbers = ", ".join(map(str, shown[:8])) + (" and others" if len(shown) > 8 else "")
    return f"{'rank' if len(shown) == 1 else 'ranks'} {numbers}"
