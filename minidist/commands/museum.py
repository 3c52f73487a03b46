"""`minidist museum`: bugs from real code, and the tests that catch them.

Proved by: tests/museum/test_museum.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Argument, Option, Result, command_line, json_or_table, say
from minidist.commands.flags import picture_file
from minidist.core.base.errors import UsageError


@json_or_table
def museum(
    number: Annotated[
        str | None, Argument(help="an exhibit, such as 1 or 13a; a range, such as 101-146, or default: a table of all")
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="with an exhibit: its loss curves as .svg, .pdf or .png", callback=picture_file),
    ] = None,
    tests: Annotated[
        bool, Option(help="also run the tests that catch it, where minidist's tests are installed")
    ] = True,
) -> Result:
    """Show bugs that were found in public code: how each came about, how its loss looks, and which test catches it.

    A bug is injected in memory, for the time of the run; no file is changed. Exhibits from 101 on are of 2024 to 2026,
    each with the public thread that reports it.
    """
    from minidist.course.museum import exhibits, find, run_exhibit
    from minidist.course.museum.exhibit_run import table

    is_table = number is None or "-" in number
    if output is not None and is_table:
        raise UsageError("-o draws one exhibit; give its number, as in minidist museum 1a -o one.svg")
    chosen, runs = exhibits() if number is None else find(number), []
    for done, exhibit in enumerate(chosen):
        # A run of all exhibits takes minutes, so it says how far it is.
        if len(chosen) > 5 and done % 10 == 0:
            say(f"museum: {len(chosen) - done} exhibits to see{', each with its tests' if tests else ''}")
        runs.append(run_exhibit(exhibit, tests))
    if output is not None:
        from minidist.report.frame import save

        say(f"written: {save(runs[0].figure(command_line()), output)}")
    text = table(runs) if is_table else "\n\n\n".join(run.text() for run in runs)
    return Result([run.as_dict() for run in runs], lambda: print(text))
