"""Our solutions of lesson 22; they are not a part of the package."""

from collections.abc import Sequence

import numpy as np

from minidist.core.comm import Comm


def ring_attention(
    comm: Comm, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: Sequence[int]
) -> np.ndarray:
    """Keep the running maximum, sum and output; a new block rescales what was accumulated before."""
    n, rank = comm.size, comm.rank
    block = np.stack([k, v])
    largest, total, out = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros(q.shape)
    for step in range(n):
        keys, values = block
        if keys.size:
            scores = q @ keys.T / np.sqrt(q.shape[1])
            new = np.maximum(largest, scores.max(axis=1, initial=-np.inf))
            old, now = np.exp(largest - new), np.exp(scores - new[:, None])
            total = total * old + now.sum(axis=1)
            out = out * old[:, None] + now @ values
            largest = new
        if step < n - 1:
            incoming = np.empty((2, rows[(rank - step - 1) % n], q.shape[1]))
            comm.sendrecv(block, (rank + 1) % n, incoming, (rank - 1) % n)
            block = incoming
    return out / total[:, None]


SOLUTIONS = {"22.ring_attention": ring_attention}
