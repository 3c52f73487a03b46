"""`minidist check-collective`: whether a collective of one's own is right.

Proved by: tests/collectives/test_collective_check.py
"""

from typing import Annotated

from minidist.commands.command import Argument, Option, Result, json_or_table


@json_or_table
def check_collective(
    source: Annotated[str, Argument(help="FILE.py:FUNCTION, or a registered name with --operation")],
    operation: Annotated[
        str | None, Option(help="the collective that the function computes, if its name or @algorithm does not say so")
    ] = None,
    ranks: Annotated[int, Option(help="run on 1 to this many simulated ranks")] = 9,
) -> Result:
    """Check a collective of your own against NumPy: every number of ranks, size, root, reduction and way to send."""
    from minidist.collectives.collective_check import check_collective as check

    report = check(source, operation, ranks)
    return Result(report.as_dict(), lambda: print("\n".join(report.sentences())), 0 if report.passed else 1)
