"""`minidist staleness`: a parameter server with slow workers.

Proved by: tests/bench/test_staleness.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Argument, Option, Result, command_line, json_or_table, say
from minidist.commands.flags import above_zero, picture_file
from minidist.core.base.errors import UsageError


@json_or_table
def staleness(
    consistency: Annotated[
        list[str] | None, Argument(help="bsp, delay:T, ssp:S or asp; default bsp, ssp:2 and asp")
    ] = None,
    workers: Annotated[int, Option(help="workers, in addition to the one server")] = 3,
    slow: Annotated[float, Option(help="how many times as long a slow gradient takes", callback=above_zero)] = 3.0,
    who: Annotated[
        str, Option(help="which worker is slow: last (always), or anyone (each, in one of WORKERS gradients)")
    ] = "last",
    seconds: Annotated[
        float, Option(help="virtual seconds of a run; a gradient takes 0.001", callback=above_zero)
    ] = 0.3,
    output: Annotated[
        Path | None, Option("--output", "-o", help="a picture: an .svg, .pdf or .png file", callback=picture_file)
    ] = None,
) -> Result:
    """Run a parameter server with slow workers: gradients per second, staleness and loss of each consistency."""
    from importlib.util import find_spec

    if find_spec("minidist.techniques.parameter_server") is None:
        raise UsageError(
            "minidist staleness runs a parameter server, and the folder minidist/techniques/parameter_server is not"
            " there; put it back"
        )
    from minidist.report.bench.staleness import staleness_runs, table

    runs = staleness_runs(consistency or ("bsp", "ssp:2", "asp"), workers, slow, seconds, who=who)
    if output is not None:
        from minidist.report.frame import save
        from minidist.report.staleness import staleness as picture

        title = (
            f"{workers} workers; {'the last one takes' if who == 'last' else 'by chance a gradient takes'} {slow:g}"
            " times as long"
        )
        say(f"written: {save(picture(runs, title=title, command=command_line()), output)}")
    return Result([vars(run) for run in runs], lambda: print(table(runs)))
