"""`minidist run`: a Python program of one's own, on virtual ranks.

Proved by: tests/commands/test_cli.py
"""

import re
import runpy
import sys
from pathlib import Path
from typing import Annotated, NoReturn

from minidist.base.errors import MinidistError, UsageError, quoted_path
from minidist.base.user_file import ProgramError
from minidist.comm import has_run
from minidist.comm.launched import launched_size
from minidist.commands.command import Argument, Exit, say


def run(
    script: Annotated[Path, Argument(help="a Python program that calls minidist's launch")], rest: list[str]
) -> None:
    """Run SCRIPT; `--ranks N` and the other flags after it are the script's (its `launch` reads them)."""
    if not script.is_file():
        if str(script).startswith("-"):
            raise UsageError(f"{quoted_path(script)} stands before the script; write `minidist run FILE.py --ranks 4`")
        what = "is a folder" if script.is_dir() else "does not exist"
        raise UsageError(f"script {quoted_path(script)} {what}; give the path of a Python file")

    if launched_size() is None and is_of_mpi4py(script):
        on_simulated_ranks(script, rest)

    # As under `python SCRIPT`: the script's own arguments, and imports from its folder.
    has_run.any_program = False
    sys.argv = [str(script), *rest]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except MinidistError:
        raise
    except Exception as error:  # the script's own; the frames above it say nothing about it
        raise ProgramError(error, runpy.run_path.__code__.co_filename) from error
    if not has_run.any_program:
        raise UsageError(
            f"script {quoted_path(script)} has ended, and no rank has run: call launch(main) in it, where main(comm) is"
            " what each rank does"
        )


def is_of_mpi4py(script: Path) -> bool:
    """Return whether a program imports mpi4py, and nothing of minidist, which it may mention."""
    text = script.read_text(encoding="utf-8", errors="replace")
    return {"mpi4py"} == set(re.findall(r"^\s*(?:import|from) (mpi4py|minidist)\b", text, re.M))


def on_simulated_ranks(script: Path, arguments: list[str]) -> NoReturn:
    """Run a program of mpi4py as `minidist mpi --ranks N SCRIPT ARGUMENTS` does."""
    from minidist.commands.app import run_words

    rest = list(arguments)
    ranks = [] if "--ranks" not in rest else rest[(place := rest.index("--ranks")) : place + 2]
    if ranks:
        del rest[place : place + 2]
    say(f"{script} is a program of mpi4py: minidist {' '.join(['mpi', *ranks, str(script), *rest])}")
    raise Exit(run_words(["mpi", *ranks, str(script), *rest]))
