"""Why two sums of the same numbers differ: the order in which ranks add is found from outside and printed.

    python mpi_examples/1_messages/order_of_additions.py --ranks 4
    mpiexec -n 4 python mpi_examples/1_messages/order_of_additions.py

Floating-point addition does not associate, so two orders can give different bits. The ring adds each chunk in another
order, `ordered` adds every element in the order of the ranks, and the MPI library has another order. `minidist
order` does the same for any sum: numpy.sum, or a function(comm, array) in a file of yours.
"""

from functools import partial

import numpy as np

from minidist import all_reduce, launch
from minidist.collectives.reduction_order import mpi_all_reduce
from minidist.collectives.summation_order import find_orders_on_ranks
from minidist.comm.launched import launched_size


def by(algorithm, comm, terms):
    """Sum the ranks' terms, of shape (1, elements), by an algorithm of minidist."""
    return all_reduce(comm, terms[0], algorithm=algorithm)


def main(comm):
    sums = {name: partial(by, name) for name in ("ring", "ordered", "rabenseifner")}
    if launched_size() is not None:  # under mpiexec
        sums["MPI_Allreduce"] = mpi_all_reduce

    for name, add in sums.items():
        # Term r of the sum is what rank r contributes. The search calls the sum once for each pair of terms.
        def of_this_rank(terms, add=add):
            return add(comm, terms[comm.rank : comm.rank + 1].copy())

        orders = find_orders_on_ranks(of_this_rank, comm.size, elements=comm.size)

        # The same numbers have the same sum in every element only where all elements have one order.
        total = add(comm, np.full((1, comm.size), 0.1 * 3**comm.rank))
        if comm.rank == 0:
            for element, order in enumerate(orders):
                print(f"{name}, element {element}: {order}   {total[element]:.17g}", flush=True)


if __name__ == "__main__":
    launch(main)
