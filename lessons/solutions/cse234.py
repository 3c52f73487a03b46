"""Our answers to the assignment cse234, as a student hands them in: `minidist grade cse234.py --assignment cse234`."""

from itertools import pairwise
from typing import Any

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives import all_gather, all_to_all, reduce_scatter
from minidist.core.comm import Comm

COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def myAllreduce(comm: Comm, src_array: np.ndarray, dest_array: np.ndarray, op: str) -> None:
    """Combine round a ring, so that each rank completes one chunk, and pass the complete chunks round."""
    dest_array[...] = src_array
    chunks = np.array_split(dest_array, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for step in range(comm.size - 1):
        own = chunks[comm.rank - 2 - step]
        arrived = np.empty_like(own)
        comm.sendrecv(chunks[comm.rank - 1 - step], right, arrived, left)
        COMBINE[op](own, arrived, out=own)
    for step in range(comm.size - 1):
        comm.sendrecv(chunks[comm.rank - step], right, chunks[comm.rank - 1 - step], left)


def myAlltoall(comm: Comm, src_array: np.ndarray, dest_array: np.ndarray) -> None:
    """Exchange with the rank at each distance."""
    outgoing, incoming = np.split(src_array, comm.size), np.split(dest_array, comm.size)
    incoming[comm.rank][...] = outgoing[comm.rank]
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.sendrecv(outgoing[to], to, incoming[source], source)


def get_info(
    comm: Comm, rank: int, mp_size: int, dp_size: int, fc_layer: str, in_dim: int, out_dim: int
) -> Any:
    """Split the world into model-parallel groups of neighbours, and data-parallel groups across them."""
    mp_idx, dp_idx = rank % mp_size, rank // mp_size
    mp_comm, dp_comm = comm.split(dp_idx, rank), comm.split(mp_idx, rank)
    if fc_layer == "fc_o":
        return mp_idx, dp_idx, mp_comm, dp_comm, in_dim // mp_size, out_dim
    return mp_idx, dp_idx, mp_comm, dp_comm, in_dim, out_dim // mp_size


def split_data(
    x_train: np.ndarray, y_train: np.ndarray, mp_size: int, dp_size: int, rank: int
) -> Any:
    """Give the ranks of a model-parallel group the rows of their replica."""
    rows = len(x_train) // dp_size
    first = rank // mp_size * rows
    return x_train[first : first + rows], y_train[first : first + rows]


def naive_collect_forward_input(x: np.ndarray, mp_comm: Comm, mp_size: int) -> np.ndarray:
    """All-gather, then put the ranks' parts next to each other in the last dimension."""
    gathered = all_gather(mp_comm, np.ascontiguousarray(x)).reshape(mp_size, *x.shape)
    return np.concatenate(list(gathered), axis=-1)


naive_collect_forward_output = naive_collect_forward_input


def naive_collect_backward_output(
    output_grad: np.ndarray, mp_group_idx: int, mp_size: int
) -> np.ndarray:
    """Keep this rank's part: the gradient of the whole output is on every rank."""
    return np.ascontiguousarray(np.split(output_grad, mp_size, axis=-1)[mp_group_idx])


def naive_collect_backward_x(grad_x: np.ndarray, mp_comm: Comm, mp_size: int) -> np.ndarray:
    """Reduce-scatter with the rank's part of the last dimension in front."""
    split = np.stack(np.split(grad_x, mp_size, axis=-1))
    mine = reduce_scatter(mp_comm, split.reshape(-1))
    result: np.ndarray = mine.reshape(split.shape[1:])
    return result


def mixture_of_experts(
    comm: Comm, router: Any, x: np.ndarray, topk: int, expert: Any
) -> np.ndarray:
    """Send the chosen rows of this rank's share to their experts and back, then gather all shares.

    A rank sends at most topk rows out of x for each row of its share, as many results, and the finished rows around.
    """
    counts = chunk_sizes(len(x), comm.size)
    own = slice(offsets(counts)[comm.rank], offsets(counts)[comm.rank] + counts[comm.rank])
    indices, gates = router(x, topk)
    bounds = np.cumsum([0, *counts])
    # Row r of the table: how many of the choices of share r name each expert. All ranks know the router.
    table = np.array(
        [np.bincount(indices[a:b].reshape(-1), minlength=comm.size) for a, b in pairwise(bounds)]
    )
    sent, received = table[comm.rank], table[:, comm.rank]
    order = np.argsort(indices[own].reshape(-1), kind="stable")
    rows = np.ascontiguousarray(x[own][order // topk])
    width = x.shape[1]
    arrived = all_to_all(
        comm, rows.reshape(-1), send_counts=sent * width, receive_counts=received * width
    )
    results = expert(arrived.reshape(-1, width))
    width = results.shape[1]
    back = all_to_all(
        comm, results.reshape(-1), send_counts=received * width, receive_counts=sent * width
    )
    mixture = np.zeros((counts[comm.rank], width))
    np.add.at(
        mixture, order // topk, back.reshape(-1, width) * gates[own].reshape(-1)[order][:, None]
    )
    gathered = all_gather(comm, mixture.reshape(-1), counts=[count * width for count in counts])
    result: np.ndarray = gathered.reshape(len(x), width)
    return result


class MoE_EP:
    """A mixture of experts; this rank has one of them."""

    def __init__(self, router: Any, expert: Any, topk: int, comm: Comm) -> None:
        self.router, self.expert, self.topk, self.comm = router, expert, topk, comm

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return each row's mixture."""
        return mixture_of_experts(self.comm, self.router, x, self.topk, self.expert)
