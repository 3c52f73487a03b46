"""The start of MPI: every process learns that another one refuses to start, and none waits for ever for another.

MPI_Init is a barrier. A process that finds a wrong flag and leaves would let the others wait in it, so it starts MPI,
too, and all tell each other in one message what each has to say; the first rank that says it prints it:

    rank 0   --lr 1e-3    ── MPI_Init ──┐                 ┌──▶ ends
    rank 1   --lr x       ── MPI_Init ──┴── all-gather ───┴──▶ prints "--lr x ...", ends with exit code 2

A process that is killed, stopped, or fails before it comes here is noticed by a limit on the time that all this takes:
60 seconds, or MINIDIST_START_TIMEOUT (0: no limit).

Proved by: tests/comm/mpi/test_start.py
"""

import ctypes
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from minidist.comm.errors import LauncherError
from minidist.comm.launched import check_family, check_launcher, launched_rank, launched_size, load_mpi
from minidist.core.base.errors import UsageError

LIMIT = "MINIDIST_START_TIMEOUT"
DEFAULT_LIMIT = 60.0  # seconds
QUIET_EXIT = 0.3  # seconds by which a process that says nothing ends later: a launcher may end all with the first
REFUSAL_LIMIT = 10.0  # seconds that a process with something to say waits for the others before it says it
# What has happened to MPI in this process, where it starts only once: it has started; this process has told the others
# that it is there.
_started, _met = threading.Event(), threading.Event()


@dataclass(frozen=True)
class Greeting:
    """What each process tells the others first. refusal: the sentence and the exit code with which it ends the job."""

    host: str
    folder: str | None = None  # rank 0's: where the job keeps its files
    refusal: tuple[str, int] | None = None


class Starting:
    """A block in which MPI and its world are made, and which ends in time: with a sentence, if need be.

    limit: seconds, 0 for none. sentence, code: how the process ends then; by default it says where it waits.
    """

    def __init__(self, limit: float, sentence: str = "", code: int = 1) -> None:
        self.limit, self.sentence, self.code = limit, sentence, code
        self.stage = "MPI_Init"
        self.initialized = False  # has this block called MPI_Init?
        self.over = threading.Event()

    def __enter__(self) -> Self:
        if self.limit:
            threading.Thread(target=self._watch, daemon=True, name="minidist-start").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.over.set()

    def _watch(self) -> None:
        if self.over.wait(self.limit):
            return
        try:
            print(self.sentence or self._where(), file=sys.stderr, flush=True)
            time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the end
        finally:
            abort(self.code)

    def _where(self) -> str:
        return (
            f"minidist: rank {launched_rank()} of {launched_size() or 1}: not all ranks have started within"
            f" {self.limit:g} s, and this one waits in {self.stage}; another one has ended, is stopped, or computes"
            f" before it starts MPI: see its output, or set {LIMIT} to more seconds"
        )

    def start_mpi(self) -> Any:
        """Return mpi4py's MPI module, with MPI started."""
        # What can be wrong before MPI_Init, which would end the process without a sentence of ours.
        MPI = load_mpi()
        if not MPI.Is_initialized():
            check_family(MPI.Get_library_version())
            _initialize(MPI)
            self.initialized = True
        _started.set()
        self.stage = "the first message of all ranks"
        return MPI


def abort(code: int) -> NoReturn:
    """End this process at once, and with it the job where MPI has started. Called from any thread."""
    try:
        # Not while another thread is in MPI_Init, which has no job to end yet.
        if _started.is_set():
            load_mpi().COMM_WORLD.Abort(code)
    finally:
        os._exit(code)  # some libraries return from Abort


def _initialize(MPI: Any) -> None:
    """Call MPI_Init_thread. mpi4py's own holds Python's lock meanwhile, so that no thread could see the time pass."""
    try:
        initialize = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # a platform on which the library is not found behind the module
        MPI.Init_thread()
        return
    initialize(None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))

    # What mpi4py's does in addition: errors of MPI are exceptions.
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def start_limit() -> float:
    """Return the seconds that the start may take; 0 for no limit."""
    text = os.environ.get(LIMIT, "")
    try:
        seconds = float(text) if text else DEFAULT_LIMIT
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e9:
        raise UsageError(f"{LIMIT}={text[:80]!r}; it must be a number of seconds, at least 0")
    return seconds


def meet(MPI: Any, folder: str | None) -> tuple[list[str], str | None]:
    """Greet all ranks; return the host of each, and rank 0's folder. Exits when another rank has refused to start."""
    greetings = _greet(MPI, Greeting(MPI.Get_processor_name(), folder))
    refusals = [greeting.refusal for greeting in greetings if greeting.refusal is not None]
    if refusals:
        time.sleep(QUIET_EXIT)
        sys.exit(refusals[0][1])  # its rank has said why
    return [greeting.host for greeting in greetings], greetings[0].folder


def refuse(sentence: str, code: int) -> NoReturn:
    """Print why this process does not start, once for all ranks that say the same, and exit.

    Before the world is made; afterwards it prints what it is given.
    """
    first = 0
    if launched_size() is not None and not _met.is_set():
        try:
            with Starting(REFUSAL_LIMIT, sentence, code) as starting:
                MPI = starting.start_mpi()
                check_launcher(MPI.COMM_WORLD.size, MPI.Get_library_version().splitlines()[0])
                greetings = _greet(MPI, Greeting(MPI.Get_processor_name(), refusal=(sentence, code)))
            same = [rank for rank, greeting in enumerate(greetings) if greeting.refusal == (sentence, code)]
            first = same[0] - MPI.COMM_WORLD.rank
        except LauncherError:
            first = launched_rank()  # no MPI: all have this trouble
    if first == 0:
        print(f"{sentence}\n", end="", file=sys.stderr, flush=True)
    else:
        time.sleep(QUIET_EXIT)
    sys.exit(code)


def give_up(what: str, code: int) -> NoReturn:
    """End this process, and the job, when its world cannot be made. what: the reason, said once before MPI starts."""
    if not _started.is_set():
        refuse(f"minidist: {what}", code)  # the others are in MPI_Init
    try:
        print(f"minidist: rank {launched_rank()} of {launched_size()}: {what}", file=sys.stderr, flush=True)
        time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the abort
    finally:
        abort(code)


def _greet(MPI: Any, greeting: Greeting) -> list[Greeting]:
    greetings: list[Greeting] = MPI.COMM_WORLD.allgather(greeting)
    _met.set()
    return greetings
