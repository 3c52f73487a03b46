"""Which samples a step trains on: a function of the seed and the step, never of the number of ranks.

Each epoch is a permutation of all samples, drawn for (seed, epoch). Laid end to end the permutations are one endless
list, and step s takes the global batch [s G, (s + 1) G) of it. So a run may be resumed at any step, or continued on
another number of ranks, and sees the same samples. A rank asks for its rows of the global batch and for nothing else:

    global batch    | 0 | 1 | 2 | 3 | 4 | 5 |     micro-batches of b samples
    replica, k = 2  |   0   |   1   |   2   |     replica r holds numbers r k to r k + k - 1

A permutation is an array of all samples, and reads all over the file. With `--data 'SOURCE | shuffle:B'` blocks of B
neighbouring samples are permuted, and then the samples inside each window of 16 blocks: no array is longer than a
window or the number of blocks, and a window reads 16 stretches of the file.

    stored, B = 2                | 0 1 | 2 3 | 4 5 | 6 7 |
    blocks permuted              | 4 5 | 0 1 | 6 7 | 2 3 |
    windows, of two blocks here  | 1 4   0 5 | 3 7   6 2 |

Proved by: tests/data/test_sampler.py
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import numpy as np

from minidist.base.coordinates import Key, uniform
from minidist.base.errors import UsageError, quoted
from minidist.base.limits import check_size
from minidist.data.datasets import Dataset, Rows
from minidist.data.stages import Visit

SIDES = ("inputs", "targets")  # of a batch
WINDOW = 16  # blocks in which `shuffle:B` shuffles at a time


class Batch(tuple[np.ndarray, np.ndarray]):
    """Inputs and targets, a pair. indices: the numbers of the samples, int64 of shape (rows,)."""

    indices: np.ndarray

    def __new__(cls, rows: Rows, indices: np.ndarray) -> Self:
        """Make the pair; it is pickled with its numbers, since worker processes send batches."""
        batch = super().__new__(cls, rows)
        batch.indices = indices
        return batch

    def __getnewargs__(self) -> tuple[Rows, np.ndarray]:
        """Return what `__new__` takes."""
        return (self[0], self[1]), self.indices


class GlobalBatchSampler:
    """Global batches of `global_batch` samples of `dataset`; `context` is the length of a sample of tokens.

    samples: their number; an epoch may end inside a batch. Raises UsageError when there are none.
    """

    def __init__(self, dataset: Dataset, global_batch: int, context: int, seed: int) -> None:
        if global_batch < 1 or context < 1:
            raise UsageError(f"global batch {global_batch} and context {context} must be at least 1")
        self.dataset, self.global_batch, self.context, self.seed = dataset, global_batch, context, seed
        self.samples = dataset.samples(context)

    def sample_indices(self, step: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """Return the sample numbers of rows [first, first + count) of the global batch of `step`, int64 (count,).

        count: None: all rows from `first` on.
        """
        # These rows alone: all ranks together look up each row once, however many they are.
        begin = step * self.global_batch + first
        return self._indices(np.arange(begin, begin + (self.global_batch - first if count is None else count)))

    def _indices(self, places: np.ndarray) -> np.ndarray:
        """Return the sample numbers at places of the endless list."""
        # Each lies in an epoch, at an offset of its permutation.
        epochs, offsets = places // self.samples, places % self.samples
        indices = np.empty(len(places), np.int64)
        block = self.dataset.block
        for epoch in sorted(set(epochs.tolist())):  # np.unique imports np.ma, which takes long
            here = epochs == epoch
            if block:
                indices[here] = block_order(self.seed, epoch, self.samples, block, offsets[here])
            else:
                indices[here] = permutation(self.seed, epoch, self.samples)[offsets[here]]
        return indices

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return inputs and targets of rows [first, first + count) of the global batch of `step`."""
        if not 0 <= first <= first + count <= self.global_batch:
            raise ValueError(f"rows {first} to {first + count} of a global batch of {self.global_batch}")
        return self._rows(self.sample_indices(step, first, count), step * self.global_batch + first)

    def at(self, place: int, count: int) -> Batch:
        """Return inputs and targets of `count` samples from a place of the endless list: where batches vary in size."""
        return self._rows(self._indices(np.arange(place, place + count)), place)

    def _rows(self, indices: np.ndarray, place: int) -> Batch:
        visit = Visit(self.seed, np.arange(place, place + len(indices)))
        return Batch(self.dataset.rows(indices, self.context, visit), indices)


def permutation(seed: int, epoch: int, samples: int, block: int = 0) -> np.ndarray:
    """Return the order of the samples in an epoch, int64 of shape (samples,), which must not be written into.

    block: of `shuffle:B`; 0: all samples are shuffled at once.
    """
    if block:
        return block_order(seed, epoch, samples, block, np.arange(samples))
    return _permutation(Key(seed, "data", epoch), samples)


# The ranks of a simulated world ask for the same one, and a batch may lie across the end of an epoch or of a window.
@lru_cache(maxsize=8)
def _permutation(key: Key, count: int) -> np.ndarray:
    # The ranks of uniform draws are a permutation; "stable" makes it the same on every machine.
    order = np.argsort(uniform(key, 0, count), kind="stable")
    order.flags.writeable = False
    return order


def block_order(seed: int, epoch: int, samples: int, block: int, offsets: np.ndarray) -> np.ndarray:
    """Return the samples at `offsets` of an epoch in which blocks are permuted, and then samples inside of windows."""
    # [1] Inside of its window each place is exchanged for another one.
    window = WINDOW * block
    places = np.empty(len(offsets), np.int64)
    for number in sorted(set((offsets // window).tolist())):
        here = offsets // window == number
        order = _permutation(Key(seed, "data", epoch, "window", number), min(window, samples - number * window))
        places[here] = number * window + order[offsets[here] - number * window]

    # [2] That place lies in a block. The last block of the file may be shorter; the ones behind it begin earlier.
    blocks = _permutation(Key(seed, "data", epoch, "blocks"), -(-samples // block))
    missing = len(blocks) * block - samples
    short = (int(np.flatnonzero(blocks == len(blocks) - 1)[0]) + 1) * block - missing
    places = places + missing * (places >= short)
    return blocks[places // block] * block + places % block


def microbatch_numbers(replica: int, accumulation: int) -> range:
    """Return the numbers of the micro-batches of a replica that takes `accumulation` of them per step."""
    return range(replica * accumulation, (replica + 1) * accumulation)


def microbatch_rows(number: int, micro_batch: int, global_batch: int) -> tuple[int, int]:
    """Return (first row, rows) of a micro-batch; the last one may be shorter, and later ones are empty."""
    first = min(number * micro_batch, global_batch)
    return first, min(micro_batch, global_batch - first)


def weighted_shards(rows: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Return (first row, rows) of each rank, in proportion to `weights`, such as the speeds of the ranks.

    Whole rows, by the largest remainders, the lower rank first among equals; together exactly `rows`. With a loss that
    is divided by the global count and gradients that are summed, the step is that of one device whatever the weights.
    """
    for rank, weight in enumerate(weights):
        check_size(weight, f"the weight of rank {rank}")
    if not sum(weights) > 0:
        raise UsageError(f"weights {quoted(list(weights))}: give one per rank, and at least one above 0")
    # Every rank gets the whole part of its share.
    exact = [rows * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in exact]

    # The rows that are left go to the largest remainders.
    order = sorted(range(len(sizes)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in order[: rows - sum(sizes)]:
        sizes[rank] += 1
    firsts = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    return list(zip(firsts, sizes, strict=True))
