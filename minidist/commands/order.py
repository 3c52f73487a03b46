"""`minidist order`: in which order a sum adds its terms.

Proved by: tests/commands/test_order.py
"""

from typing import Annotated

from minidist.commands.command import Argument, Option, Result, json_or_table
from minidist.commands.flags import whole_numbers


@json_or_table
def order(
    source: Annotated[
        str,
        Argument(
            help="an algorithm of --operation; FILE.py:FUNCTION, a function(array) or function(comm, array); numpy.sum,"
            " numpy.dot, sum, math.fsum, torch.sum; or under mpiexec MPI_Allreduce"
        ),
    ],
    terms: Annotated[int | None, Option(help="numbers that are added (default: 8, or one per rank)")] = None,
    ranks: Annotated[
        str | None, Option(help="simulated ranks, such as 4, or several to compare: 1,2,4 (default 4)")
    ] = None,
    dtype: Annotated[str, Option(help="float16, float32 or float64")] = "float64",
    operation: Annotated[str, Option(help="all_reduce, reduce or reduce_scatter")] = "all_reduce",
    elements: Annotated[
        int | None, Option(min=1, help="elements of the arrays that ranks reduce (default: one per rank)")
    ] = None,
) -> Result | None:
    """Find in which order a sum adds its terms, by calling it; with several numbers of ranks, whether it is the same.

    Two results that differ in their last bits are added in different orders, or not from the same numbers.
    """
    from minidist.collectives.reduction_order import find_reduction_orders

    numbers = whole_numbers(ranks, "--ranks") if ranks is not None else None
    report = find_reduction_orders(source, terms, numbers, dtype, operation, elements)
    if report is None:
        return None
    return Result(report.as_dict(), lambda: print("\n".join(report.lines())), 0 if report.same else 1)
