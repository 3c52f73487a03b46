"""`minidist check-plan`: how far the planner is off on runs that were measured.

Proved by: tests/planning/test_measured.py
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from minidist.commands.command import Argument, Result, json_or_table, say


@json_or_table
def check_plan(
    rows: Annotated[Path, Argument(help="a JSON list of runs: flags of plan, and step_seconds, peak_bytes, ...")],
) -> Result:
    """Compare the planner with runs that you have measured: the error of its seconds and bytes, for each source."""
    from minidist.planning.cluster.measured import compare, read_rows, summaries, table, worst

    found, left_out = compare(read_rows(rows), rows)
    for sentence in left_out:
        say(sentence)
    of = summaries(found)
    furthest = worst(found)

    def show() -> None:
        print(table(of))
        print("furthest off:")
        for one in furthest:
            print(
                f"  row {one.row}, {one.what}: measured {one.measured:.4g}, predicted {one.predicted:.4g}"
                f" ({one.low:.4g} to {one.high:.4g}), ratio {one.ratio:.2f}"
            )

    values = [{**one._asdict(), "ratio": one.ratio if one.what != "fits" else None} for one in found]
    return Result({"sources": [asdict(one) for one in of], "rows": values, "left_out": left_out}, show)
