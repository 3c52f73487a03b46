"""`minidist report`: pictures of a recorded run.

Proved by: tests/commands/test_cli.py, tests/report/test_pictures.py, tests/report/test_page.py
"""

from pathlib import Path
from typing import Annotated

import typer

from minidist.commands.output import say


def report(
    trace: Annotated[Path, typer.Argument(help="a trace file of train, compare or a program's --trace")],
    picture: Annotated[
        str | None,
        typer.Option(
            help=(
                "space-time (default), gantt, mesh, bytes-matrix, bytes-by-purpose, loss, memory, lanes, perfetto or"
                " page"
            )
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="an .html page of everything, or an .svg, .pdf or .png picture (.json for perfetto)"
        ),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="a:b, only steps a, ..., b - 1; they are numbered from 0")] = None,
) -> None:
    """Draw a recorded run: one picture, or with -o NAME.html a page that needs nothing else."""
    from minidist.report.from_file import draw_report

    say(f"written: {draw_report(trace, picture, output, steps, say)}")
