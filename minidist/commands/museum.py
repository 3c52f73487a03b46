"""`minidist museum`: bugs from real code, and the tests that catch them.

Proved by: tests/museum/test_museum.py
"""

from pathlib import Path
from typing import Annotated

import typer

from minidist.base.errors import UsageError
from minidist.commands.options import command_line
from minidist.commands.output import Result, json_or_table, say


@json_or_table
def museum(
    number: Annotated[str | None, typer.Argument(help="an exhibit, such as 1 or 4b; default: a table of all")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="with an exhibit: its loss curves as .svg, .pdf or .png")
    ] = None,
    tests: Annotated[
        bool, typer.Option(help="also run the tests that catch it, where minidist's tests are installed")
    ] = True,
) -> Result:
    """Bugs found in public code, planted in memory: the story, the innocent loss, the difference, the test that catches
    it.
    """
    from minidist.museum import exhibits, find, visit
    from minidist.museum.visiting import table

    if output is not None and number is None:
        raise UsageError("-o draws one exhibit; give its number, as in minidist museum 1 -o one.svg")
    chosen, visits = exhibits() if number is None else find(number), []
    for seen, exhibit in enumerate(chosen):
        if len(chosen) > 5 and seen % 10 == 0:
            say(f"museum: {len(chosen) - seen} exhibits to see{', each with its tests' if tests else ''}")
        visits.append(visit(exhibit, tests))
    if output is not None:
        from minidist.report.frame import save

        say(f"written: {save(visits[0].figure(command_line()), output)}")
    text = table(visits) if number is None else "\n\n\n".join(seen.text() for seen in visits)
    return Result([seen.as_dict() for seen in visits], lambda: print(text))
