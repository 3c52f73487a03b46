"""Running statistics of batch normalisation that are those of the rows of all ranks.

Each rank's batch norm sees its own micro-batches, so without this every rank would evaluate another model. At the end
of a backward pass that reduces gradients, the ranks exchange count, mean and variance of what they saw in the step:

    rank 0   (rows, mean, variance) ──┐
    rank 1   (rows, mean, variance) ──┼─ all-gather ──▶  the statistics of all rows, by the same sums on every rank
    rank 2   (rows, mean, variance) ──┘

and take one step of the moving average with the result, as one device does that has all these micro-batches. (PyTorch's
`broadcast_buffers` sends rank 0's instead, and forgets those of the other ranks.) Gradients are not concerned: they use
the statistics of each micro-batch alone. Bytes: (n-1) 8 (1 + 2 C) from each rank for C channels, purpose `metrics`.

Proved by: tests/parallel/test_running_statistics.py
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.pipeline.plan import Plan

if TYPE_CHECKING:
    from minidist.nn.batch_norm import BatchNorm
    from minidist.nn.ops.batch_norm import Statistics

Exchange = Callable[[np.ndarray], np.ndarray]  # this rank's words -> one row of words per rank, the same on all


class RunningStatistics:
    """The batch norms inside `module`, and the ranks that see other rows of the same batch.

    comms: they are combined over each of them, one after the other; an `Exchange` stands for ranks that have no
    communicator. layers: empty without batch norm or other ranks.
    """

    def __init__(self, module: Any, *comms: "Comm | Exchange | None") -> None:
        self.comms = [comm for comm in comms if comm is not None and not (isinstance(comm, Comm) and comm.size == 1)]
        self.layers = batch_norms(module) if self.comms else []

    def combine(self) -> None:
        """Let the current mini-batch of every layer be that of all ranks."""
        seen = [layer.mini_batch() for layer in self.layers]
        for comm in self.comms:
            # A synchronised layer has the rows of the whole data axis from its forward passes.
            alone = [n for n, layer in enumerate(self.layers) if layer.group is None or not isinstance(comm, Comm)]
            if alone:
                merged = self._over(comm, [self.layers[n] for n in alone], [seen[n] for n in alone])
                for n, statistics in zip(alone, merged, strict=True):
                    seen[n] = statistics
        for layer, statistics in zip(self.layers, seen, strict=True):
            if statistics is not None:
                layer.take_mini_batch(statistics)

    def _over(
        self, comm: "Comm | Exchange", layers: "list[BatchNorm]", seen: "list[Statistics | None]"
    ) -> "list[Statistics | None]":
        """Return each layer's statistics of the rows of all these ranks; None where no rank has seen any."""
        # Only a model with such layers loads them.
        from minidist.nn.batch_norm import merge_statistics

        # One row per rank: of each layer the number of rows, the means and the variances; zeros where it saw none.
        words = []
        for layer, statistics in zip(layers, seen, strict=True):
            zeros = xp.zeros(layer.weight.size, xp.float64, layer.running[0])
            mean, variance, rows = statistics or (zeros, zeros, 0)
            words += [xp.full(1, float(rows), mean.dtype, mean), mean, variance]
        with purpose("metrics"):
            if isinstance(comm, Comm):
                table = all_gather(comm, xp.concatenate(words)).reshape(comm.size, -1)
            else:
                table = comm(xp.concatenate(words))

        # Every rank merges the same numbers in the same order, so the results are equal bit for bit.
        merged: list[Statistics | None] = []
        start = 0
        for layer in layers:
            channels = layer.weight.size
            rows_of = table[:, start : start + 1 + 2 * channels]
            parts = [(row[1 : 1 + channels], row[1 + channels :], int(row[0])) for row in rows_of if row[0]]
            merged.append(merge_statistics(parts) if parts else None)
            start += 1 + 2 * channels
        return merged


def exchange_among(comm: Comm, ranks: Sequence[int]) -> Exchange | None:
    """Return how some ranks of a communicator gather their words: each sends its own to all others. None: one rank."""
    if len(ranks) == 1:
        return None

    def exchange(words: np.ndarray) -> np.ndarray:
        table = xp.stack([words] * len(ranks))
        others = [(at, rank) for at, rank in enumerate(ranks) if rank != comm.rank]
        requests = [comm.irecv(table[at], rank) for at, rank in others]
        requests += [comm.isend(words, rank) for _, rank in others]
        comm.waitall(requests)
        return table

    return exchange


def combine_statistics(
    stages: Mapping[int, Any], comm: Comm, plan: Plan, data: Comm | None
) -> list[Callable[[], None]]:
    """Return what combines the batch norms of this rank's stages over their ranks of `comm`, then over `data`."""
    found, ranks = [], plan.holders()
    for n, stage in sorted(stages.items()):
        if len(ranks[n]) > 1 or data is not None:
            statistics = RunningStatistics(stage.module, exchange_among(comm, ranks[n]), data)
            found += [statistics.combine] if statistics.layers else []
    return found


def batch_norms(module: Any) -> "list[BatchNorm]":
    """Return the batch norms inside `module`."""
    return [layer for layer in module.modules() if hasattr(layer, "mini_batch")] if hasattr(module, "modules") else []


def statistics_bytes(channels: Sequence[int], ranks: int, copies: int = 1) -> int:
    """Return the bytes that all `ranks` together send when they combine batch norms of `channels` channels once.

    copies: of each shard (hybrid sharding): ranks / copies ranks combine theirs, and then the copies do.
    """
    words = sum(1 + 2 * count for count in channels)
    return 8 * words * ranks * (ranks // copies - 1 + copies - 1)
