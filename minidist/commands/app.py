"""The program `minidist`: all commands in one app, and what an error looks like to the person who typed one.

Exit codes: 0 done, 1 a difference or a failed run, 2 wrong input.

Proved by: tests/commands/test_cli.py
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from minidist import __version__
from minidist.base.errors import MAX_QUOTED, MinidistError, quoted, quoted_path, reason
from minidist.base.interrupts import EXIT_CODE, ignore_more
from minidist.comm.call_site import lines_of
from minidist.comm.launch import interrupted, tune
from minidist.comm.mpi.start import refuse
from minidist.commands.bench import bench
from minidist.commands.check_collective import check_collective
from minidist.commands.compare import compare
from minidist.commands.data import data
from minidist.commands.demo import demo
from minidist.commands.doctor import doctor
from minidist.commands.example import example
from minidist.commands.explain import explain
from minidist.commands.generate import generate
from minidist.commands.grade import grade
from minidist.commands.hang import hang
from minidist.commands.lesson import lesson
from minidist.commands.memory import memory
from minidist.commands.museum import museum
from minidist.commands.order import order
from minidist.commands.output import App, Commands, say
from minidist.commands.partition import partition
from minidist.commands.plan import plan
from minidist.commands.profile import profile
from minidist.commands.report import report
from minidist.commands.run import run
from minidist.commands.schedule import schedule
from minidist.commands.staleness import staleness
from minidist.commands.tiles import tiles
from minidist.commands.torch import torch
from minidist.commands.train import train


class Program(Commands):
    """All commands; Ctrl-C in any of them is one line, which says where it was."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the command line names."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            ignore_more()
            say(interrupted(error))
            raise typer.Exit(EXIT_CODE) from None


def root(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    """Distributed training that you can read, run on a laptop, and check."""
    if version:
        print(__version__)
        raise typer.Exit(0)


# In the order of --help.
COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train,
    "compare": compare,
    "demo": demo,
    "check-collective": check_collective,
    "order": order,
    "hang": hang,
    "torch": torch,
    "run": run,
    "memory": memory,
    "data": data,
    "explain": explain,
    "doctor": doctor,
    "report": report,
    "tiles": tiles,
    "generate": generate,
    "museum": museum,
    "grade": grade,
    "staleness": staleness,
    "schedule": schedule,
    "plan": plan,
    "partition": partition,
    "profile": profile,
}
GROUPS = {"bench": bench, "lesson": lesson, "example": example}
# The flags that `run` does not know belong to the script, and those after the script of `torch`.
OF_THE_SCRIPT = {
    "run": {"allow_extra_args": True, "ignore_unknown_options": True},
    "torch": {"allow_interspersed_args": False},
}


def program(names: Iterable[str]) -> typer.Typer:
    """Return the program with these commands. Typer makes the flags of a command from its function's signature."""
    app = App(
        cls=Program,
        context_settings={"help_option_names": ["--help", "-h"]},
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help=root.__doc__,
    )
    app.callback(invoke_without_command=True)(root)
    for name in names:
        if name in GROUPS:
            app.add_typer(GROUPS[name], name=name)
        else:
            app.command(name, context_settings=OF_THE_SCRIPT.get(name))(COMMANDS[name])
    return app


@cache
def command_line(first: str) -> Any:
    """Return what parses a command line that begins with this word: of all commands only the one that it names.

    The flags of all take longer to make than a small job takes to run.
    """
    every = [*COMMANDS, *GROUPS]
    return typer.main.get_command(program([first] if first in every else every))


def leave_standard_output() -> None:
    """Let go of what standard output has not taken, so that Python does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def shortened(text: str, words: Sequence[str]) -> str:
    """Return a message with at most 80 characters of each of the words that were typed, and of what follows a `=`."""
    for word in words:
        for part in (word, word.partition("=")[0], word.partition("=")[2]):
            if len(part) > MAX_QUOTED:
                text = text.replace(part, quoted(part, marks=False))
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program `minidist` with these arguments (default: those of the process)."""
    if arguments is not None:
        sys.argv[1:] = list(arguments)

    # Before anything computes: bits depend on the number of BLAS threads.
    tune()

    # Errors that a person can mend are one sentence without a traceback; all others are bugs and keep theirs. Under
    # mpiexec all processes find the same mistake, and one of them prints it.
    try:
        parse = command_line(sys.argv[1] if len(sys.argv) > 1 else "")
        code = parse(prog_name="minidist", standalone_mode=False)
        # What is buffered is written now, where a full disk is still a sentence.
        sys.stdout.flush()
    except KeyboardInterrupt as error:  # while the command line is parsed
        ignore_more()
        say(interrupted(error))
        sys.exit(EXIT_CODE)
    except MemoryError as error:
        refuse(f"minidist: out of memory: {reason(error)}; make the model, the batch or the number of ranks smaller", 2)
    except BrokenPipeError:  # `minidist ... | head` has read enough
        leave_standard_output()
        sys.exit(128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1)
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            leave_standard_output()
            refuse(f"minidist: standard output cannot be written: {error.strerror}; make room where it goes", 2)
        # Without a file name it is not a wrong path, but a bug.
        if error.filename is None:
            raise
        refuse(
            f"minidist: cannot open {quoted_path(error.filename)} ({error.strerror}); give the path of a file, in a"
            " folder that exists",
            2,
        )
    except MinidistError as error:
        # Notes were attached where the error passed, by parts that know more than the part that raised it.
        if "--traceback" in sys.argv:  # of a script that `run` runs
            os.environ["MINIDIST_TRACEBACK"] = "1"
        refuse("minidist: " + "\n".join(lines_of(error)), error.exit_code)
    except Exception as error:
        # A wrong flag: an exception of click's, or of the click that typer brings with it.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        text = io.StringIO()
        error.show(file=text)
        refuse(shortened(text.getvalue().rstrip("\n"), sys.argv[1:]), error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
