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
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from minidist import __version__
from minidist.base.interrupts import EXIT_CODE, ignore_more, interrupted
from minidist.commands.output import App, Commands, say, with_flags_of
from minidist.core.base.errors import MAX_QUOTED, MinidistError, quoted, quoted_path, reason


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


# Each command with the first line of its help, in the order of --help. Its module is imported when it is called.
COMMANDS = {
    "train": "Train a model on virtual ranks, or, under mpiexec, as one of its ranks.",
    "compare": "Run the job in parallel and on one device, and compare every tensor of every step.",
    "demo": "Train a byte-level GPT on four ranks, simulated and under mpiexec, and compare both with one device.",
    "check-collective": (
        "Check a collective of your own against NumPy: every number of ranks, size, root, reduction and way to send."
    ),
    "order": (
        "Find in which order a sum adds its terms, by calling it; with several numbers of ranks, whether it is the"
        " same."
    ),
    "hang": (
        "Read dumps of PyTorch's Flight Recorder, and logs: which rank waits for which, and where the ranks differ"
        " first."
    ),
    "mpi": ("Run a program of mpi4py, unchanged, on simulated ranks of this process, without an MPI library."),
    "torch": "Run a program of torch.distributed, unchanged, on simulated ranks of this process, on the CPU.",
    "run": "Run SCRIPT; `--ranks N` and the other flags after it are the script's (its `launch` reads them).",
    "memory": (
        "Calculate how many bytes a rank holds at each ZeRO stage, for some parameters or for a whole step of a model."
    ),
    "data": "Print which samples each replica trains on: the size of the data, the sharding rule, one step's samples.",
    "explain": ("Print what a DeepSpeed configuration asks for, in bytes, on a model that flags describe."),
    "doctor": "Print what this machine has (Python, BLAS, MPI, its launcher, GPU), and what is missing for what.",
    "report": "Draw a recorded run: one picture, or with -o NAME.html a page that needs nothing else.",
    "tiles": "Print which tile of each matrix of a layer is on which rank, under tensor and expert parallelism.",
    "generate": (
        "Write text from the latest checkpoint of a language model, on one device; the same seed gives the same text."
    ),
    "museum": (
        "Show bugs that were found in public code: how each came about, how its loss looks, and which test catches it."
    ),
    "puzzle": (
        "Fill a few lines: puzzles about messages, memory and schedules, each with a target and a picture of your run."
    ),
    "grade": "Grade submissions: right answers, bytes and virtual time within par.",
    "staleness": (
        "Run a parameter server with slow workers: gradients per second, staleness and loss of each consistency."
    ),
    "schedule": (
        "Validate, time and draw pipeline schedules: their order, their picture, and their cost in time and memory."
    ),
    "plan": "Find the layouts of a training job that fit on a cluster of GPUs, and what they cost.",
    "check-plan": (
        "Compare the planner with runs that you have measured: the error of its seconds and bytes, for each source."
    ),
    "partition": "Decide which layers make a stage; by PipeDream's optimizer also how many machines share it.",
    "profile": (
        "Time each block of the model on this machine: a table, and with -o a PROFILE.json for minidist partition."
    ),
}
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


def in_own_words(words: Sequence[str], parse: Any, first: str) -> list[str]:
    """Return the words of a command line in which flags that the command does not have are replaced by their synonyms.

    parse: what parses the command line. The flags of scripts are theirs, and stay.
    """
    command = getattr(parse, "commands", {}).get(first)
    if first not in COMMANDS or first in OF_THE_SCRIPT or command is None:
        return list(words)
    known, own = {name for parameter in command.params for name in parameter.opts}, []
    for word in words:
        name, equals, value = word.partition("=")
        for names in SYNONYMS:
            if name in names and name not in known:
                name = next((mine for mine in names if mine in known), name)
        own.append(f"{name}{equals}{value}")
    return own


def loaded(name: str) -> Any:
    """Return the function of a command, or the App of a group; its module has the same name, and is imported now."""
    word = name.replace("-", "_")
    return getattr(import_module(f"minidist.commands.{word}"), word)


def first_word(words: Sequence[str]) -> str:
    """Return the word of a command line that may name a command."""
    return next((word for word in words if word != "--"), "")


def listed(text: str) -> Callable[[], None]:
    """Return what stands for a command whose help alone is printed, in the list of all."""

    def command() -> None:
        pass

    command.__doc__ = text
    return command


def program(first: str, words: Sequence[str] | None = None) -> typer.Typer:
    """Return the program with the command that `first` names, or, for other words, with what --help lists of all.

    words: of the command line, where the command needs no flags of a job but those among them.

    Typer makes the flags of a command from its function's signature. The flags of all take longer to make than a small
    job takes to run.
    """
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
    if first in GROUPS:
        app.add_typer(loaded(first), name=first)
    elif first in COMMANDS:
        app.command(first, context_settings=OF_THE_SCRIPT.get(first))(
            loaded(first) if words is None else with_flags_of(words, loaded(first))
        )
    else:
        for name, text in {**COMMANDS, **GROUPS}.items():
            app.command(name)(listed(text))
    return app


@cache
def command_line(first: str, words: tuple[str, ...] | None = None) -> Any:
    """Return what parses a command line that begins with this word, and that has these words, where they are given."""
    return typer.main.get_command(program(first, words))


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
        first = first_word(sys.argv[1:])
        parse = command_line(first, tuple(sys.argv[1:]))
        sys.argv[1:] = in_own_words(sys.argv[1:], parse, first)
        # Before anything computes: bits depend on the number of BLAS threads.
        if first in COMMANDS or first in GROUPS:
            from minidist.comm.launching import tune

            tune()
        code = parse(prog_name="minidist", standalone_mode=False)
        # What is buffered is written now, where a full disk is still a sentence.
        sys.stdout.flush()
    except KeyboardInterrupt as error:  # while the command line is parsed
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
        stop(shortened(text.getvalue().rstrip("\n"), sys.argv[1:]), error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
