"""Our solutions of the assignments of cse234; they are not a part of the package."""

from typing import Any

import numpy as np

from minidist.core.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from minidist.core.comm import Comm


def our_info(comm: Comm, mp: int, dp: int, layer: str, in_dim: int, out_dim: int) -> Any:
    """Split the world into model-parallel groups of neighbours, and data-parallel groups across them."""
    mp_comm, dp_comm = comm.split(comm.rank // mp, comm.rank), comm.split(comm.rank % mp, comm.rank)
    parts = (in_dim // mp, out_dim) if layer == "fc_o" else (in_dim, out_dim // mp)
    numbers = np.array([comm.rank % mp, comm.rank // mp, *parts])
    return numbers, np.array(mp_comm.members), np.array(dp_comm.members)


def gather_last(comm: Comm, x: np.ndarray) -> np.ndarray:
    """All-gather, then put the ranks' parts beside each other in the last dimension."""
    gathered = all_gather(comm, np.ascontiguousarray(x)).reshape(comm.size, *x.shape)
    return np.concatenate(list(gathered), axis=-1)


def scatter_last(comm: Comm, x: np.ndarray) -> np.ndarray:
    """Reduce-scatter with the rank's part of the last dimension in front."""
    split = np.stack(np.split(x, comm.size, axis=-1))
    mine = reduce_scatter(comm, split.reshape(-1))
    result: np.ndarray = mine.reshape(split.shape[1:])
    return result


def _parts(comm: Comm, gradient: np.ndarray) -> np.ndarray:
    """Keep this rank's part: the gradient of the whole output is on every rank."""
    return np.ascontiguousarray(np.split(gradient, comm.size, axis=-1)[comm.rank])


def _all_reduced(comm: Comm, source: np.ndarray, op: str) -> np.ndarray:
    """Run a ring all-reduce."""
    result: np.ndarray = all_reduce(comm, source.copy(), op)
    return result


def _all_to_all(comm: Comm, source: np.ndarray) -> np.ndarray:
    """Send each rank its piece."""
    result: np.ndarray = all_to_all(comm, source)
    return result


SOLUTIONS = {
    "cse234.myAllreduce": _all_reduced,
    "cse234.myAlltoall": _all_to_all,
    "cse234.get_info": our_info,
    "cse234.naive_collect_forward_input": gather_last,
    "cse234.naive_collect_forward_output": gather_last,
    "cse234.naive_collect_backward_output": _parts,
    "cse234.naive_collect_backward_x": scatter_last,
}
