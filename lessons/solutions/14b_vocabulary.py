"""Our solutions of lesson 14b; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_gather, all_reduce, reduce_scatter
from minidist.core.comm import Comm


def split_mlp(
    comm: Comm, x: np.ndarray, a: np.ndarray, b: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gather rows before the columns, and scatter the sums after the rows; backward the same with the gradient."""
    rows = all_gather(comm, x).reshape(-1, x.shape[1])
    hidden = np.maximum(rows @ a, 0)
    y = reduce_scatter(comm, hidden @ b).reshape(x.shape)
    slope = all_gather(comm, gradient).reshape(-1, x.shape[1])
    part = ((slope @ b.T) * (hidden > 0)) @ a.T
    return y, reduce_scatter(comm, part).reshape(x.shape)


def split_cross_entropy(
    comm: Comm, logits: np.ndarray, targets: np.ndarray, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce three numbers per row: the largest logit, the target's, and the sum of the exponentials."""
    rows = np.arange(len(targets))
    largest = all_reduce(comm, logits.max(axis=1), "max")
    shifted = logits - largest[:, None]
    mine = (targets >= first) & (targets < first + logits.shape[1])
    target = np.zeros(len(targets))
    target[mine] = shifted[rows[mine], targets[mine] - first]
    all_reduce(comm, target)
    exponentials = np.exp(shifted)
    total = all_reduce(comm, exponentials.sum(axis=1))
    gradient = exponentials / total[:, None]
    gradient[rows[mine], targets[mine] - first] -= 1
    return np.log(total) - target, gradient


SOLUTIONS = {"14b.split_mlp": split_mlp, "14b.split_cross_entropy": split_cross_entropy}
