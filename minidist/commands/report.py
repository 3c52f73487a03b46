"""`minidist report`: pictures of a recorded run.

Proved by: tests/commands/test_cli.py, tests/report/test_pictures.py, tests/report/test_page.py
"""

from pathlib import Path
from typing import Annotated

from minidist.base.errors import UsageError, quoted_path
from minidist.base.file_format import format_of
from minidist.commands.command import Argument, Option, say

PictureName = Annotated[
    str | None,
    Option(
        help="space-time (default), gantt, mesh, bytes-matrix, bytes-by-purpose, loss, memory, lanes, perfetto,"
        " page or steps"
    ),
]
Output = Annotated[
    Path | None,
    Option(
        "--output",
        "-o",
        help="the ending decides: an .html page of everything (with --picture steps: to step through, or a .gif), an"
        " .svg, .pdf or .png picture, or .json for perfetto; with --format a folder",
    ),
]
Form = Annotated[
    str | None,
    Option(
        "--format",
        help="gif: the steps as a moving picture; or files for another tool, one per rank: chakra (MLCommons, for"
        " ASTRA-sim) or hta (HolisticTraceAnalysis)",
    ),
]


def report(
    trace: Annotated[Path, Argument(help="a trace file of train, compare or a program's --trace")],
    picture: PictureName = None,
    output: Output = None,
    form: Form = None,
    messages: Annotated[
        bool, Option("--messages", help="with --format chakra: messages instead of collective calls")
    ] = False,
    steps: Annotated[str | None, Option(help="a:b, only steps a, ..., b - 1; they are numbered from 0")] = None,
) -> None:
    """Draw a recorded run: one picture, or with -o NAME.html a page that needs nothing else.

    With --format, write it for another tool. Of an execution trace (NAME.RANK.et) print what it has.
    """
    if trace.suffix == ".et":
        if output is not None or picture is not None or form is not None:
            raise UsageError(
                f"{quoted_path(trace)} is an execution trace, which is printed and not drawn; leave out --output,"
                " --picture and --format, or give the trace of the run"
            )
        from minidist.report.chakra import summary

        print(summary(trace))
        return

    from minidist.report.from_file import draw_report, export_trace

    if form == "gif" and picture in (None, "steps"):
        picture, output, form = "steps", _moving_picture(trace, output), None
    if form is not None:
        if picture is not None:
            raise UsageError(f"--format {form} with --picture {picture}; give one of them")
        say(f"written: {export_trace(trace, form, output, steps, messages)}")
        return
    if messages:
        raise UsageError("--messages without --format chakra; add it")
    say(f"written: {draw_report(trace, picture, output, steps, say)}")


def _moving_picture(trace: Path, output: Path | None) -> Path:
    """Return the file of the moving picture: the one that is given, or one in the folder of the trace."""
    output = output or trace.with_name(f"{trace.stem}-steps.gif")
    format_of(output, "gif", {"gif": (".gif",)})
    return output
