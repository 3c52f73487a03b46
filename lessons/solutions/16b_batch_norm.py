"""Our solutions of lesson 16b; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_gather
from minidist.core.comm import Comm


def sync_batch_norm(comm: Comm, x: np.ndarray, eps: float) -> np.ndarray:
    """Gather (rows, mean, variance) of every rank, merge them, and normalise this rank's rows by the result."""
    count, channels = len(x), x.shape[1]
    mean = x.sum(axis=0) / max(1, count)
    variance = ((x - mean) ** 2).sum(axis=0) / max(1, count)
    table = np.asarray(all_gather(comm, np.concatenate([[count], mean, variance]))).reshape(
        comm.size, -1
    )

    # A rank counts by its rows; the variance of the union has the spread between the ranks' means, too.
    rows, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = max(1.0, rows.sum())
    mean = (rows * means).sum(axis=0) / total
    variance = (rows * (variances + (means - mean) ** 2)).sum(axis=0) / total
    result: np.ndarray = (x - mean) / np.sqrt(variance + eps)
    return result


SOLUTIONS = {"16b.sync_batch_norm": sync_batch_norm}
