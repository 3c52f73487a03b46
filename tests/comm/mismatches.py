"""The table: arguments of collectives that differ between two ranks, one function of a communicator each.

A row has what the sentence must say in both worlds. Where `both` is set, each rank meets the other's message and
raises, so that all such rows run in one launch under mpiexec; elsewhere one rank raises and the other waits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.collectives import reduce, scatter
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from minidist.core.comm import init_device_mesh
from minidist.core.nn import MLP
from minidist.parallel.data_parallel import DistributedDataParallel


@dataclass
class Row:
    name: str
    function: Callable[..., Any]
    words: str
    both: bool


TABLE: list[Row] = []


def differ(words, both=True):
    def add(function):
        TABLE.append(Row(function.__name__, function, words, both))
        return function

    return add


def per_rank(comm, first, second):
    return (first, second)[comm.rank]


# --- arguments ---


@differ(r"^dtype mismatch: .*float(32|64).*float(64|32).*convert one side")
def dtypes(comm):
    all_reduce(comm, np.ones(4, per_rank(comm, np.float32, np.float64)))


@differ(r"^reduction mismatch: .*all_reduce/ring max .*every rank must pass the same reduction")
def reductions(comm):
    all_reduce(comm, np.ones(4), per_rank(comm, "sum", "max"))


@differ(r"^reduction mismatch: .*all_reduce/recursive_doubling avg .*every rank must pass the same reduction")
def reductions_of_which_one_is_a_mean(comm):
    all_reduce(comm, np.ones(4), per_rank(comm, "avg", "sum"), algorithm="recursive_doubling")


@differ(r"^algorithms differ: .*all_reduce/(ring|recursive_doubling).*every rank must pass the same algorithm")
def algorithms(comm):
    all_reduce(comm, np.ones(4), algorithm=per_rank(comm, "ring", "recursive_doubling"))


@differ(
    r"hint: operation mismatch: call 0 of world is reduce/naive root 0 of float64\[4\] on rank 0 and broadcast/naive"
    r" root 0 of float64\[4\] on",
    False,
)
def operations_of_which_no_two_messages_meet(comm):
    per_rank(comm, reduce, broadcast)(comm, np.ones(4))


@differ(
    r"^shape mismatch: call 0 of world is all_reduce of float64\[2, 3\] on rank 0 and of float64\[3, 2\] on rank 1, at"
    r".*an array of the same shape$"
)
def shapes(comm):
    all_reduce(comm, np.ones(per_rank(comm, (2, 3), (3, 2))))


@differ(r"^shape mismatch: call 0 of world is all_reduce of float64\[6\] on rank 0 and of float64\[8\] on rank 1, at")
def sizes(comm):
    all_reduce(comm, np.ones(per_rank(comm, 6, 8)))


@differ(r"^counts differ: .*reduce_scatter/ordered counts \[(4, 2|2, 4)\].*every rank must pass the same counts")
def counts_of_a_reduce_scatter(comm):
    reduce_scatter(comm, np.ones(6), counts=per_rank(comm, [4, 2], [2, 4]), algorithm="ordered")


@differ(
    r"^shape mismatch: call 0 of world is all_gather of float64\[3\] on rank 0 and of float64\[1\] on rank 1, at.*or as"
    r" many elements as the counts of all ranks say$"
)
def counts_of_an_all_gather(comm):
    all_gather(comm, np.ones(per_rank(comm, 3, 1)), counts=per_rank(comm, [3, 2], [2, 1]))


@differ(r"^shape mismatch: call 0 of world is all_to_all of float64\[4\] on rank 0 and of float64\[5\] on rank 1, at")
def counts_of_an_all_to_all(comm):
    counts = per_rank(comm, [2, 2], [3, 2])
    all_to_all(comm, np.ones(sum(counts)), send_counts=counts, receive_counts=counts)


# --- calls ---


@differ(
    r"^operation mismatch: call 0 of world is barrier on rank 0 at \S*mismatches.py:\d+ and all_reduce/ring of"
    r" float64\[4\] on rank 1 at \S*mismatches.py:\d+; .*every rank of a communicator must call the same collectives"
)
def operations(comm):
    if comm.rank:
        all_reduce(comm, np.ones(4))
    else:
        comm.barrier()


@differ(r"^operation mismatch: .*(split|barrier).*the same collectives in the same order")
def a_split_that_one_rank_leaves_out(comm):
    if comm.rank:
        comm.split(0)
    comm.barrier()


@differ(r"^roots differ: call 0 of .* is broadcast/naive root 0 on rank 0 and broadcast/naive root 1 on rank 1, at")
def roots_of_a_broadcast(comm):
    broadcast(comm, np.ones(4), root=comm.rank)
    comm.barrier()


@differ(r"^roots differ: call 1 of .* is scatter/binomial root 0 on rank 0 and scatter/binomial root 1 on rank 1, at")
def roots_of_a_scatter(comm):
    comm.barrier()
    scatter(comm, np.ones(4), np.ones(2), root=comm.rank, algorithm="binomial")
    all_reduce(comm, np.ones(4))


@differ(r"roots differ: call 0 of world is reduce/naive root 0 on rank 0 and reduce/naive root 1 on rank 1, at", False)
def roots_of_a_reduce(comm):
    reduce(comm, np.ones(4), root=comm.rank)


@differ(r"hint: rank . waits for call 0( on world.1dup)?, all_reduce/ring, but queued from rank . is call 0", False)
def collectives_on_two_communicators_in_another_order(comm):
    other = comm.dup()
    for part in per_rank(comm, (comm, other), (other, comm)):
        all_reduce(part, np.ones(4))


# --- communicators ---


@differ(
    r"^labels differ: call 1 of group, dup or split on world is a group labelled 'red' of \[0, 1\] on rank 0, but a"
    r" group labelled 'blue' of \[0, 1\] on rank 1, at .*every member must make the same communicators in the same"
    r" order, with the same labels"
)
def labels(comm):
    comm.group([0, 1], per_rank(comm, "red", "blue"))


@differ(r"^members differ: rank 0 makes .* ranks \[0, 1\], but rank 1 makes it of \[1, 0\], at")
def members(comm):
    comm.group(per_rank(comm, [0, 1], [1, 0]), "part")


@differ(r"^labels differ: .* is dup\(\) on rank 0, but a group labelled 'all' of \[0, 1\] on rank 1")
def a_duplicate_and_a_group(comm):
    if comm.rank:
        comm.group([0, 1], "all")
    else:
        comm.dup()


@differ(r"^labels differ: .*labelled 'dp' .* on rank 0, but a group labelled 'tp' .* on rank 1")
def names_of_a_mesh(comm):
    init_device_mesh(comm, (2,), per_rank(comm, ("dp",), ("tp",)))


@differ(r"^(labels|members) differ: .* rank 0.* rank 1", False)
def shapes_of_a_mesh(comm):
    init_device_mesh(comm, per_rank(comm, (2, 1), (1, 2)), ("dp", "tp"))


# --- gradients: the last row, because of a stream with an error nothing more comes under mpiexec ---


@differ(
    r"^ranks differ in all_reduce/ring: the loss of rank \d is the mean over [24] rows, and that of rank \d the mean"
    r" over [24] rows, at \S*mismatches.py:\d+.*by the rows \(tokens\) of all ranks"
)
def means_over_unlike_rows(comm):
    count = per_rank(comm, 4, 2)
    model = DistributedDataParallel(MLP([3, 2]), comm)
    cross_entropy(model(Tensor(np.ones((count, 3), np.float32))), np.zeros(count, int)).backward()
