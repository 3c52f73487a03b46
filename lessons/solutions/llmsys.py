"""Our solutions of the assignments of llmsys; they are not a part of the package."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.nn import MLP
from minidist.course.lesson.assignments.llmsys import use_average, use_clock_cycles, use_partition


def partition_dataset(
    rank: int, world_size: int, dataset: Sequence[int], batch_size: int
) -> Iterator[Sequence[int]]:
    """Give each rank every world_size-th sample, and its share of the batch."""
    own, share = dataset[rank::world_size], batch_size // world_size
    for first in range(0, len(own), share):
        yield own[first : first + share]


def average_gradients(model: MLP, comm: Comm) -> None:
    """All-reduce every gradient and divide."""
    for parameter in model.parameters():
        total = all_reduce(comm, np.array(parameter.grad))
        parameter.grad = total / comm.size


def _partition_solution(world_size: int, dataset: Sequence[int], batch_size: int) -> Any:
    """Deal samples out round robin."""
    return use_partition({"partition_dataset": partition_dataset})(world_size, dataset, batch_size)


def _average_solution(comm: Comm, model: MLP) -> Any:
    """Average with an all-reduce."""
    return use_average({"average_gradients": average_gradients})(comm, model)


def _clock_solution(num_batches: int, num_partitions: int) -> Any:
    """Go through the diagonals of the table of micro-batches and partitions."""
    return use_clock_cycles({"_clock_cycles": clock_cycles})(num_batches, num_partitions)


def clock_cycles(num_batches: int, num_partitions: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each clock, micro-batch i on partition j where i + j is the clock."""
    for clock in range(num_batches + num_partitions - 1):
        yield [(clock - j, j) for j in range(num_partitions) if 0 <= clock - j < num_batches]


SOLUTIONS = {
    "llmsys.partition_dataset": _partition_solution,
    "llmsys.average_gradients": _average_solution,
    "llmsys.clock_cycles": _clock_solution,
}
