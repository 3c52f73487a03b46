"""Types over the tensor axis: a block with a split sequence is right, and three bugs in it are found at their line.

mpiexec -n 2 python mpi_examples/4_tensor_parallel/layouts.py
mpiexec -n 2 python mpi_examples/4_tensor_parallel/layouts.py --bug norm

Each rank has 1/n of the rows of a sequence, and 1/n of the columns and rows of two matrices. `norm` forgets that the
gradient of the norm's weight is a summand on each rank; `sum` adds summands to the residual stream; `twice` reduces
what has been reduced. All three train without an error. Sent are an all-gather and a reduce-scatter in each direction,
and an all-reduce of the norm's gradient. `minidist train --check-layouts` is this for a job.
"""

import argparse

import numpy as np

from minidist import (
    Layout,
    Parameter,
    Tensor,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gelu,
    launch,
    layer_norm,
    matmul,
    reduce_scatter_to_sequence_parallel_region,
)
from minidist.base.watchers import watching
from minidist.parallel.layout_check import VARYING, LayoutChecker

BATCH, LENGTH, WIDTH, INNER = 2, 4, 8, 16


def cut(comm, name, shape, dim):
    """Return this rank's part of a matrix along `dim`."""
    whole = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    parameter = Parameter(np.ascontiguousarray(np.array_split(whole, comm.size, axis=dim)[comm.rank]), True, name)
    parameter.layout = Layout(shape, ("tp",), (dim,))
    return parameter


def block(comm, rows, weights, bug):
    """Return rows + MLP(norm(rows)), of this rank's rows (batch, T / n, width)."""
    norm, bias, first, second = weights
    if bug == "norm":
        x = layer_norm(rows, norm, bias)
    else:
        x = layer_norm(rows, *(copy_to_tensor_parallel_region(p, comm) for p in (norm, bias)))
    x = gather_from_sequence_parallel_region(x, comm)
    x = matmul(gelu(matmul(x, first)), second)
    # [:, : T / n] in place of the reduce-scatter: the right shape, and a summand.
    x = x[:, : rows.shape[1]] if bug == "sum" else reduce_scatter_to_sequence_parallel_region(x, comm)
    if bug == "twice":
        x = reduce_scatter_to_sequence_parallel_region(gather_from_sequence_parallel_region(x, comm), comm)
    return rows + x


def main(comm, bug):
    """Run one forward and backward pass with the checker."""
    norm, bias = (
        Parameter(np.ones(WIDTH, np.float32), True, "norm.weight"),
        Parameter(np.zeros(WIDTH, np.float32), True),
    )
    weights = norm, bias, cut(comm, "up.weight", (WIDTH, INNER), 1), cut(comm, "down.weight", (INNER, WIDTH), 0)
    rows = Tensor(np.ones((BATCH, LENGTH // comm.size, WIDTH), np.float32) * (1 + comm.rank), True)
    with watching(LayoutChecker(comm, "tp", boundary=VARYING)) as checker:
        block(comm, rows, weights, bug).sum().backward()
    if comm.rank == 0:
        print(f"types of {checker.checked} results are right", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bug", default="none", choices=["none", "norm", "sum", "twice"])
    own, _ = parser.parse_known_args()
    launch(main, own.bug)
