"""Runs an exercise in processes under mpiexec, where ranks share nothing; it is the last part of a check.

judge    writes exercise name, function (see transport.py) and cases to a file, starts mpiexec
rank     runs the cases one after the other; rank 0 writes the answers of all to a file
judge    checks the answers

Nothing here is decided by how busy the machine is. A rank that computes without end is stopped by its processor time;
ranks that make no progress for TIMEOUT get a second run with more time; and a job that has not ended after GIVE_UP is
not judged.

Proved by: tests/lesson/test_checker.py
"""

import importlib.util
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from minidist.base.errors import reason
from minidist.base.plain_pickle import BadPickleError
from minidist.comm.errors import RankTimeoutError
from minidist.core.comm import Comm
from minidist.course.lesson.answer_process import Answer, Job, refuse_exercises
from minidist.course.lesson.exercise import Case, Exercise
from minidist.course.lesson.one_rank import one_rank
from minidist.course.lesson.plain import plain
from minidist.course.lesson.runner import environment
from minidist.course.lesson.transport import dumps_of_exercise
from minidist.course.lesson.wire import pack, unpack

RANKS = 3
TIMEOUT = 5.0  # seconds until the watchdog reports ranks that wait
AGAIN = 6  # times TIMEOUT in the second run of ranks that made no progress
COMPUTE = 30  # seconds of processor time for each rank
GIVE_UP = 120.0  # seconds for everything


def mpiexec() -> str | None:
    """Return the launcher in this Python's directory, else the first one on PATH; None without one, or mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def run_under_mpi(
    exercise: Exercise, answer: Answer, cases: list[Case], launcher: str, places: Sequence[str]
) -> tuple[str, str]:
    """Return (problem, note), one of them empty.

    answer: loads the function. places: where modules are found (sys.path).
    """
    inputs = [[dumps_of_exercise(exercise.arguments(case, rank)) for rank in range(case.ranks)] for case in cases]

    # A rank that got no processor looks like one that sends nothing: only the longer wait of a second run tells.
    for timeout in (TIMEOUT, AGAIN * TIMEOUT):
        job = Job(exercise.task, answer, tuple(places), (), timeout, None)
        try:
            output, packed = _run(dumps_of_exercise((job, inputs)), launcher)
        except subprocess.TimeoutExpired:
            return "", f"not judged, because {RANKS} ranks had not ended after {GIVE_UP:g} s; check again"
        if packed is not None or "no progress on rank" not in output:
            break
    if packed is None:
        return _shortened(output), ""

    try:
        by_rank = unpack(packed)
        by_case = [[by_rank[rank][index] for rank in range(RANKS)] for index in range(len(cases))]
    except (BadPickleError, TypeError, LookupError) as error:
        return f"the ranks did not write one answer for each case: {reason(error)}", ""
    for case, answers in zip(cases, by_case, strict=True):
        problem = exercise.problem(case, answers, [])
        if problem:
            return f"{exercise.describe(case)}: {problem}", ""
    return "", f"also correct on {RANKS} ranks"


def _run(job: bytes, launcher: str) -> tuple[str, bytes | None]:
    """Run a job under mpiexec; return what it printed, and the answers of all ranks, None if it failed.

    Raises subprocess.TimeoutExpired after GIVE_UP seconds.
    """
    # Job and answers are files, so that the parent needs no MPI itself.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "job").write_bytes(job)
        variables = {
            **environment(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        program = f"from minidist.course.lesson.mpi_leg import main; main({name!r})"
        command = [launcher, "-n", str(RANKS), sys.executable, "-c", program]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )
        try:
            output, _ = process.communicate(timeout=GIVE_UP)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        answers = directory / "answers"
        return output, answers.read_bytes() if process.returncode == 0 and answers.exists() else None


def _shortened(output: str) -> str:
    """Return the lines that say what happened, without those of the launcher."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith((" ", "=", "Abort"))]
    return "\n".join(lines[:8]) or "the job ended with an error"


def _stop(number: int, frame: FrameType | None) -> None:
    """End a rank that has used its processor time; the system calls this once a second from then on."""
    raise RankTimeoutError(f"still running after {COMPUTE} s of computing")


def main(directory: str) -> None:
    """Run all cases of the job in `directory` as one rank."""
    from minidist.comm.launching import execute

    signal.signal(signal.SIGXCPU, _stop)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPUTE, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    refuse_exercises()
    job, inputs = pickle.loads((Path(directory) / "job").read_bytes())
    sys.path[:] = [*job.path, *(place for place in sys.path if place not in job.path)]
    function = job.answer.load()

    def program(comm: Comm) -> list[Any]:
        answers = []
        for of_ranks in inputs:
            answers.append(plain(one_rank(job.task, function, of_ranks[comm.rank], comm)))
            comm.barrier()
        return answers

    outcome = execute(program, timeout=job.compute_s)
    if outcome.is_root:
        (Path(directory) / "answers").write_bytes(pack(outcome.results))
