"""Which samples a step trains on: a function of the seed and the step, never of the number of ranks.

Each epoch is a permutation of all samples, drawn for (seed, epoch). Laid end to end the permutations are one endless
list, and step s takes the global batch [s G, (s + 1) G) of it. So a run may be resumed at any step, or continued on
another number of ranks, and sees the same samples. A rank asks for its rows of the global batch and for nothing else:

    global batch    | 0 | 1 | 2 | 3 | 4 | 5 |     micro-batches of b samples
    replica, k = 2  |   0   |   1   |   2   |     replica r holds numbers r k to r k + k - 1
"""

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.random import Key, uniform
from minidist.data.datasets import Dataset, Rows


class GlobalBatchSampler:
    """Global batches of `global_batch` samples of `dataset`; `context` is the length of a sample of tokens.

    samples: how many there are; an epoch may end inside a batch. Raises UsageError when there is not one sample.
    """

    def __init__(self, dataset: Dataset, global_batch: int, context: int, seed: int) -> None:
        if global_batch < 1 or context < 1:
            raise UsageError(f"global batch {global_batch} and context {context} must be at least 1")
        self.dataset, self.global_batch, self.context, self.seed = dataset, global_batch, context, seed
        self.samples = dataset.samples(context)
        self._orders: dict[int, np.ndarray] = {}  # of the last few epochs

    def sample_indices(self, step: int) -> np.ndarray:
        """Sample numbers of the global batch of `step`, int64 of shape (global_batch,)."""
        places = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        epochs, offsets = places // self.samples, places % self.samples
        indices = np.empty(self.global_batch, np.int64)
        for epoch in np.unique(epochs).tolist():
            indices[epochs == epoch] = self._order(epoch)[offsets[epochs == epoch]]
        return indices

    def batch(self, step: int, first: int, count: int) -> Rows:
        """Inputs and targets of rows [first, first + count) of the global batch of `step`."""
        if not 0 <= first <= first + count <= self.global_batch:
            raise ValueError(f"rows {first} to {first + count} of a global batch of {self.global_batch}")
        return self.dataset.rows(self.sample_indices(step)[first : first + count], self.context)

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.argsort(uniform(Key(self.seed, "data", epoch), 0, self.samples), kind="stable")
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return order


def microbatch_numbers(replica: int, accumulation: int) -> range:
    """Numbers, in the global batch, of the micro-batches of a replica that takes `accumulation` of them a step."""
    return range(replica * accumulation, (replica + 1) * accumulation)


def microbatch_rows(number: int, micro_batch: int, global_batch: int) -> tuple[int, int]:
    """(first row, rows) of a micro-batch in the global batch; the last one may be shorter, and later ones are empty."""
    first = min(number * micro_batch, global_batch)
    return first, min(micro_batch, global_batch - first)
