"""The program `minidist`: all commands in one app, and what an error looks like to the person who typed one.

Only the command that a command line names is imported: --help needs none of them, and no NumPy.

Exit codes: 0 done, 1 a difference or a failed run, 2 wrong input.

Proved by: tests/commands/test_cli.py
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from minidist import __version__
from minidist.base.errors import MAX_QUOTED, MinidistError, UsageError, quoted, quoted_path, reason
from minidist.base.interrupts import EXIT_CODE, ignore_more, interrupted
from minidist.base.process import end_if_nobody_reads, leave_standard_output
from minidist.commands.command import Exit, arguments_of, check_words, parameters_of, say
from minidist.commands.listing import listing, width_without_colours

ABOUT = "Distributed training that you can read, run on a laptop, and check."
# In the order of --help; the module of a command is imported when it is called.
_COMMANDS = """
train compare demo check-collective order hang mpi torch run memory data
explain doctor report tiles generate museum puzzle grade staleness schedule plan
check-plan partition profile
"""
COMMANDS = tuple(_COMMANDS.split())
GROUPS = {
    "bench": "Measure ratios in one interleaved run.",
    "lesson": "Notebooks, slides and quizzes for a course.",
    "example": "Example programs: list them, or copy them.",
}
# The flags that `run` does not know belong to the script, and those after the script of `torch` and `mpi`.
OF_THE_SCRIPT = {
    "run": {"allow_extra_args": True, "ignore_unknown_options": True},
    "torch": {"allow_interspersed_args": False},
    "mpi": {"allow_interspersed_args": False},
}
FIRST_ENDS = ("torch", "mpi")


# Names of one thing: a command takes each of them in place of the one that it lists. train follows PyTorch and GPT-2,
# plan Megatron-LM.
SYNONYMS = (
    ("--width", "--hidden", "--hidden-size"),
    ("--context", "--seq", "--seq-length", "--sequence-length"),
    ("--chunks", "--vp"),
    ("--micro-batch", "--batch", "--micro-batch-size"),
    ("--global-batch", "--global-batch-size"),
    ("--ranks", "--gpus"),
    ("--tp", "--tensor-parallel-size", "--tensor-model-parallel-size"),
    ("--pp", "--stages", "--pipeline-parallel-size", "--pipeline-model-parallel-size"),
    ("--cp", "--context-parallel-size"),
    ("--ep", "--expert-parallel-size", "--expert-model-parallel-size"),
    ("--layers", "--num-layers"),
    ("--heads", "--num-heads", "--num-attention-heads"),
    ("--kv-heads", "--num-key-value-heads", "--num-query-groups"),
    ("--ffn", "--ffn-hidden-size", "--intermediate-size"),
    ("--vocab", "--vocab-size"),
    ("--experts", "--num-experts"),
    ("--lr", "--learning-rate"),
)


def in_own_words(words: Sequence[str], command: Callable[..., Any]) -> list[str]:
    """Return the words of a command line with synonyms in place of flags that the command does not have.

    The flags of a script stay as they are.
    """
    if words[0] in OF_THE_SCRIPT:
        return list(words)
    known, own = {name for parameter in parameters_of(command) for name in parameter.on}, []
    for word in words:
        name, equals, value = word.partition("=")
        for names in SYNONYMS:
            if name in names and name not in known:
                name = next((mine for mine in names if mine in known), name)
        own.append(f"{name}{equals}{value}")
    return own


def loaded(name: str) -> Any:
    """Return the function of a command, or the Group of several; its module has the same name, and is imported now."""
    word = name.replace("-", "_")
    return getattr(import_module(f"minidist.commands.{word}"), word)


def abouts() -> dict[str, str]:
    """Return the first line of each command's help, which is read from its file: nothing is imported."""
    found = {}
    for name in COMMANDS:
        word = name.replace("-", "_")
        text = Path(__file__).with_name(f"{word}.py").read_text(encoding="utf-8")
        found[name] = text.partition(f"\ndef {word}(")[2].partition('    """')[2].partition("\n")[0].removesuffix('"""')
    return found | GROUPS


def first_word(words: Sequence[str]) -> str:
    """Return the word of a command line that may name a command."""
    return next((word for word in words if word != "--"), "")


def command_of(words: Sequence[str]) -> tuple[Callable[..., Any] | None, int]:
    """Return the command that a command line names, or None, and the number of words of its name."""
    first = words[0] if words else ""
    if first in COMMANDS:
        return loaded(first), 1
    if first not in GROUPS:
        return None, 0
    group = loaded(first)
    return (group.commands.get(words[1]), 2) if len(words) > 1 else (group.alone, 1)


def run_words(words: Sequence[str]) -> int:
    """Run the command that a command line names, and return its exit code."""
    if list(words[:1]) == ["--version"]:
        print(__version__)
        return 0
    if list(words) in (["--help"], ["-h"]) and (width := width_without_colours()):
        print(listing(ABOUT, abouts(), width), end="")
        return 0

    command, names = command_of(words)
    arguments = None if command is None else arguments_of(command, words[names:], words[0] in FIRST_ENDS)
    if command is None or arguments is None:
        if command is not None and words[0] in COMMANDS and (own := in_own_words(words, command)) != list(words):
            sys.argv[1:] = own
            return run_words(own)
        if command is not None:
            check_words(command, words[names:], words[0] in FIRST_ENDS)
        from minidist.commands.typer_help import read

        first = first_word(words)
        known = first in COMMANDS or first in GROUPS
        found = read(words, {first: loaded(first)} if known else abouts(), ABOUT, OF_THE_SCRIPT)
        if isinstance(found, int):
            return found
        ((command, arguments),) = found

    # Before anything computes: bits depend on the number of BLAS threads.
    from minidist.comm.launching import tune

    tune()
    try:
        command(**arguments)
    except Exit as end:
        return end.exit_code
    return 0


def shortened(text: str, words: Sequence[str]) -> str:
    """Return a message with at most 80 characters of each of the words that were typed, and of what follows a `=`."""
    for word in words:
        for part in (word, word.partition("=")[0], word.partition("=")[2]):
            if len(part) > MAX_QUOTED:
                text = text.replace(part, quoted(part, marks=False))
    return text


def what_to_give(error: Exception, words: Sequence[str]) -> str:
    """Return what the value is that a command line lacks, as an exception of click's says; "" for another exception."""
    if type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
        return ""
    names = {getattr(error, "option_name", None), getattr(getattr(error, "param", None), "name", None)}
    command, _ = command_of(words)
    found = [] if command is None else [one.flag for one in parameters_of(command) if names & {one.name, *one.on}]
    return "".join(f" Give it: {flag.help}." for flag in found if flag is not None)


def stop(sentence: str, code: int) -> NoReturn:
    """Print why the program ends, once for all processes that say the same, and exit."""
    from minidist.comm.mpi.start import refuse

    refuse(sentence, code)


def stop_at_file(error: OSError) -> None:
    """Print which file cannot be opened, or that standard output cannot be written, and exit; return for a bug."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        leave_standard_output()
        stop(f"minidist: standard output cannot be written: {error.strerror}; make room where it goes", 2)
    # Without a file name it is not a wrong path, but a bug.
    if error.filename is not None:
        stop(
            f"minidist: cannot open {quoted_path(error.filename)} ({error.strerror}); give the path of a file, in a"
            " folder that exists",
            2,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program `minidist` with these arguments (default: those of the process)."""
    if arguments is not None:
        sys.argv[1:] = list(arguments)

    # Errors that a person can mend are one sentence without a traceback; all others are bugs and keep theirs. Under
    # mpiexec all processes find the same mistake, and one of them prints it.
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed; send it to a file, or to /dev/null")
        code = run_words(sys.argv[1:])
        # What is buffered is written now, where a full disk is still a sentence.
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        ignore_more()
        say(interrupted(error))
        sys.exit(EXIT_CODE)
    except MemoryError as error:
        stop(f"minidist: out of memory: {reason(error)}; make the model, the batch or the number of ranks smaller", 2)
    except BrokenPipeError:  # `minidist ... | head` has read enough
        leave_standard_output()
        sys.exit(128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1)
    except OSError as error:
        stop_at_file(error)
        raise
    except MinidistError as error:
        if isinstance(getattr(error, "error", None), BrokenPipeError):  # of a program of the user's
            end_if_nobody_reads()
        # Notes were attached where the error passed, by parts that know more than the part that raised it.
        if "--traceback" in sys.argv:  # of a script that `run` runs
            os.environ["MINIDIST_TRACEBACK"] = "1"
        from minidist.comm.program_lines import lines_of

        stop("minidist: " + "\n".join(lines_of(error)), error.exit_code)
    except Exception as error:
        # A wrong flag: an exception of click's, or of the click that typer brings with it.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        text = io.StringIO()
        error.show(file=text)
        sentence = shortened(text.getvalue().rstrip("\n"), sys.argv[1:])
        stop(sentence + what_to_give(error, sys.argv[1:]), error.exit_code)
    sys.exit(code)
