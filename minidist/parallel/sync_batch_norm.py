"""Batch normalisation over all data-parallel ranks: the statistics of a micro-batch are those of the rows of all ranks.

    forward    rank r: (rows, mean, variance) of its rows ── all-gather ──▶ the statistics of all rows, on every rank
    backward   rank r: sum dy w, sum dy w x̂ of its rows   ── all-reduce ──▶ the two sums in the input gradient

Then n ranks with b rows each compute what one device computes with n b rows, where batch norms by themselves would
normalise each rank's b rows apart. Micro-batches that a rank runs one after the other (accumulation, pipelines) stay
apart: statistics over all of them would need all their activations at one time, which is what micro-batches avoid
(GPipe). The weight and the bias are local sums, and data parallelism adds them up.

Bytes for C channels, with n ranks together: n (n-1) 8 (1 + 2 C) forward, 2 (n-1) 8 2 C backward (purpose `batch_norm`).

Source: PyTorch's `torch.nn.SyncBatchNorm` and `convert_sync_batchnorm`; the merge is that of Chan et al., 1979.
Proved by: tests/parallel/test_sync_batch_norm.py, tests/train/test_cnn.py
"""

from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather, all_reduce
from minidist.core.comm import Comm
from minidist.nn.batch_norm import merge_statistics
from minidist.nn.ops.batch_norm import Statistics
from minidist.parallel.running_statistics import batch_norms

new_purpose("batch_norm")


class SyncStatistics:
    """What batch norms send over `comm`: all ranks run the same norms on micro-batches of the same number."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def merge(self, statistics: Statistics) -> Statistics:
        """Return the statistics of the rows of all ranks, the same bits on each. 8 (1 + 2 C) bytes to every rank."""
        mean, variance, rows = statistics
        with purpose("batch_norm"):
            own = xp.concatenate([xp.full(1, float(rows), mean.dtype, mean), mean, variance])
            table = all_gather(self.comm, own).reshape(self.comm.size, -1)
        channels = len(mean)
        return merge_statistics((row[1 : 1 + channels], row[1 + channels :], int(row[0])) for row in table if row[0])

    def sum(self, values: xp.Array) -> xp.Array:
        """Return the sum over all ranks: an all-reduce in float64."""
        total = xp.array(values, xp.float64)
        with purpose("batch_norm"):
            all_reduce(self.comm, total.reshape(-1), algorithm="ring")
        return xp.as_array(total, values.dtype)


def convert_sync_batchnorm(module: Any, comm: Comm) -> Any:
    """Let every batch norm in `module` normalise over the ranks of `comm`; every rank calls it. Returns the module."""
    # A separate communicator, because gradients are on their way while backward goes on.
    layers = batch_norms(module)
    if layers and comm.size > 1:
        group = SyncStatistics(comm.dup())
        for layer in layers:
            layer.synchronize(group)
    return module


def sync_batch_norm_bytes(channels: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that all `ranks` together send for one batch norm: in a forward pass, in a backward pass."""
    return 8 * (1 + 2 * channels) * ranks * (ranks - 1), 8 * 2 * channels * 2 * (ranks - 1)
