"""Faults at random moments of jobs under mpiexec: each must end with a sentence, and its resumption must be exact.

    python -m tests.chaos.chaos --runs 200 --seed 0       `make chaos`; about 15 s of one core per run
    python -m tests.chaos.chaos --runs 200 --only 17      run 17 of these again

Each run draws a job (data parallel, ZeRO 3, tensor and pipeline parallel, a pipeline whose batch grows, a parameter
server), one or two faults, and a moment for each between the start of the processes and their end:

    kill        kill -9 of one rank                      interrupt   Ctrl-C: SIGINT to mpiexec and all ranks
    launcher    kill -9 of mpiexec itself                stop        SIGSTOP of one rank
    full        the disk of --save has no room left (a tmpfs, which only root can mount; left out otherwise)

Jobs save in every step, so that many faults meet a save; the second fault meets a resumed job. After the faults the job
is resumed without one. What must hold: the job ends within its --timeout and some seconds, with a sentence and without
a traceback, no process of it is left, and the losses and the digest of the resumed job are those of an undisturbed one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from minidist.comm.launcher import mpiexec_command

TIMEOUT = 5  # --timeout: seconds until a rank that is stopped is reported
GRACE = 20  # seconds in which a job must end after that, on a busy machine
MARK = "MINIDIST_CHAOS"  # an environment variable by which the processes of a job are found
ROOT = Path(__file__).parents[2]

MLP = ["--model", "mlp", "--width", "16", "--global-batch", "8"]
GPT = ["--width", "16", "--heads", "2", "--context", "8", "--data", "markov", "--global-batch", "8"]
GROWS = ["--microbatches", "1", "--global-batch", "2", "--adaptive-batch", "16", "--optimizer", "sgd", "--lr", "0.5"]
JOBS = {
    "dp 2": (2, [*MLP, "--dp", "2", "--every", "1", "--steps", "40"]),
    "zero 3": (2, [*GPT, "--dp", "2", "--zero", "3", "--every", "1", "--steps", "25"]),
    "tp 2, pp 2": (4, [*GPT, "--tp", "2", "--pp", "2", "--layers", "2", "--every", "1", "--steps", "12"]),
    "growing batch": (4, [*GPT, *GROWS, "--dp", "2", "--pp", "2", "--layers", "2", "--every", "1", "--steps", "12"]),
    "server": (3, [*MLP, "--strategy", "ps", "--dp", "2", "--compression", "bf16", "--every", "1", "--steps", "30"]),
}
Usual = dict[str, tuple[dict[str, object], float]]  # of each job its result and its seconds without faults
FAULTS = ("kill", "interrupt", "stop", "launcher", "full")


@dataclass
class Job:
    """One job of a run: its processes, and where it saves."""

    name: str
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, save: Path) -> subprocess.Popen[str]:
        """Start it, from its last checkpoint where it has one."""
        ranks, flags = JOBS[self.name]
        files = ["--save", str(save), "--trace", str(self.folder / "trace.jsonl"), "--json", "--timeout", str(TIMEOUT)]
        resume = ["--resume"] if (save / "latest").exists() else []
        words = ["-m", "minidist", "train", *flags, *files, *resume]
        command, environment = mpiexec_command(ranks, words)
        return subprocess.Popen(
            command,
            env={**environment, MARK: self.mark, "MINIDIST_START_TIMEOUT": str(2 * TIMEOUT)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "out").open("w"),
            stderr=(self.folder / "err").open("w"),
            text=True,
            start_new_session=True,
        )

    def processes(self) -> dict[int, int | None]:
        """Return the rank of each of its processes that runs, None of mpiexec and its helpers."""
        found: dict[int, int | None] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                variables = dict(v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if b"=" in v)
                if variables.get(MARK.encode()) == self.mark.encode() and " Z " not in (entry / "stat").read_text():
                    rank = variables.get(b"PMI_RANK", variables.get(b"OMPI_COMM_WORLD_RANK"))
                    found[int(entry.name)] = None if rank is None else int(rank)
        return found

    def result(self) -> dict[str, object] | None:
        """Return the losses and the digest that it printed; None when it did not come to its end."""
        with suppress(ValueError):
            printed = json.loads((self.folder / "out").read_text().partition("\n")[0])
            return {"losses": printed["losses"], "digest": printed["digest"]}
        return None

    def said(self) -> str:
        """Return what it printed; mpiexec reports a killed rank on standard output."""
        return "".join((self.folder / name).read_text(errors="replace") for name in ("err", "out"))


@dataclass
class Outcome:
    """What a fault did to a job. wrong: what should not have been, in words; empty when all was as it must be."""

    job: str
    fault: str
    wrong: list[str]
    seconds: float = 0.0  # from the fault to the end
    late: bool = False  # the job had ended before it


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Yield a folder for checkpoints: a separate file system, where mounting one is allowed."""
    place = folder / "disk"
    place.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(place)], capture_output=True
    ).returncode
    try:
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)


def can_fill(folder: Path) -> bool:
    """Return whether `disk` is a separate file system, which can be filled."""
    with tempfile.TemporaryDirectory(dir=folder) as name, disk(Path(name)) as place:
        return os.path.ismount(place)


def fill(place: Path) -> None:
    """Leave no room on the disk of checkpoints."""
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def strike(fault: str, draw: random.Random, job: Job, launcher: subprocess.Popen[str], place: Path) -> None:
    """Let a fault happen to a job now, or as soon as it has ranks."""
    ranks: list[int] = []
    while not ranks and launcher.poll() is None:
        ranks = sorted(pid for pid, rank in job.processes().items() if rank is not None)
    victim = draw.choice(ranks) if ranks else launcher.pid
    with suppress(ProcessLookupError):
        if fault == "interrupt":
            os.killpg(launcher.pid, signal.SIGINT)
        elif fault == "full":
            fill(place)
        elif fault == "launcher":
            os.kill(launcher.pid, signal.SIGKILL)
        else:
            os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def disturbed(job: Job, fault: str, draw: random.Random, usual: float, place: Path) -> Outcome:
    """Run a job, let a fault happen at a random moment, and look at how it ends. usual: seconds without a fault."""
    launcher = job.start(place / "c")
    outcome = Outcome(job.name, fault, [])
    moment = draw.uniform(0.1, usual)
    try:
        launcher.wait(moment)
        outcome.late = True
    except subprocess.TimeoutExpired:
        began = time.monotonic()
        strike(fault, draw, job, launcher, place)
        try:
            launcher.wait(TIMEOUT + GRACE)
        except subprocess.TimeoutExpired:
            outcome.wrong.append(f"runs on {TIMEOUT + GRACE} s after the fault")
        outcome.seconds = time.monotonic() - began

    # Nothing of it is left, a moment after the launcher has ended.
    ended = time.monotonic()
    while (left := job.processes()) and time.monotonic() < ended + 10:
        time.sleep(0.05)
    outcome.seconds += time.monotonic() - ended
    if left and not outcome.wrong:
        outcome.wrong.append(f"{len(left)} processes are left")
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()

    # A job that came to its end in spite of the fault is as right as one that says why it did not.
    said, code = job.said(), launcher.returncode
    if "Traceback" in said and str(ROOT / "minidist") in said:  # else of Python itself, which has just started
        outcome.wrong.append("a traceback")
    if code == 0 and job.result() is None:
        outcome.wrong.append("exit code 0 without a result")
    if code and fault != "launcher" and "minidist: " not in said and "BAD TERMINATION" not in said:
        outcome.wrong.append("no sentence")
    # A process that the signal meets before Python has a handler for it is ended by the system; mpiexec may return the
    # code of a rank that it has ended itself, with signal 9, when the first one had gone, or 11, the bits of both
    # signals. Of a job that had ended, only mpiexec was there to be interrupted; it returns the number of the signal.
    of_mpiexec = "Interrupt (signal 2)" in said or (code in (9, 11) and "interrupted" in said)
    of_mpiexec = of_mpiexec or (outcome.late and code == signal.SIGINT and job.result() is not None)
    if code and fault == "interrupt" and code != 130 and not of_mpiexec:
        outcome.wrong.append(f"exit code {code} after Ctrl-C")
    (place / "filler").unlink(missing_ok=True)
    return outcome


def undisturbed(name: str, folder: Path) -> tuple[dict[str, object], float]:
    """Return the losses and the digest of a job without faults, and the seconds that it takes."""
    own = folder / name.replace(" ", "-").replace(",", "")
    own.mkdir()
    job, began = Job(name, own), time.monotonic()
    job.start(own / "c").wait(600)
    result = job.result()
    if result is None:
        raise SystemExit(f"{name} does not run without faults:\n{job.said()}")
    return result, time.monotonic() - began


def rest(job: Job, place: Path) -> subprocess.Popen[str]:
    """Start the rest of a job, its last step at least: a fault may have come after the last save, before the result."""
    latest, steps = place / "c" / "latest", int(JOBS[job.name][1][-1])
    if latest.exists() and latest.read_text() == f"step-{steps:08d}":
        before = place / "c" / f"step-{steps - 1:08d}"
        if before.exists():
            latest.write_text(before.name)
        else:
            shutil.rmtree(place / "c")
    return job.start(place / "c")


def run(number: int, seed: int, faults: Sequence[str], usual: Usual, folder: Path) -> list[Outcome]:
    """Make run `number`; return the outcomes of its faults. What went wrong stays in `folder`."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choice(sorted(usual))
    expected, seconds = usual[name]
    own = folder / f"run-{number}"
    own.mkdir()
    job, outcomes = Job(name, own), []
    with disk(own) as place:
        # One fault, or another one while the job is resumed.
        for _ in range(draw.choice((1, 1, 2))):
            job = Job(name, own)
            outcomes.append(disturbed(job, draw.choice(faults), draw, seconds, place))
            (own / f"said-{len(outcomes)}").write_text(job.said())
            if job.result() is not None:
                break

        # The rest of the job, without a fault, unless it came to its end.
        if job.result() is None:
            try:
                rest(job, place).wait(120)
            except subprocess.TimeoutExpired:
                outcomes[-1].wrong.append("the resumed job does not end")
        result = job.result()
        if result != expected:
            outcomes[-1].wrong.append("the resumed job differs" if result else f"not resumed: {job.said()[:300]}")
    if not any(outcome.wrong for outcome in outcomes):
        shutil.rmtree(own)
    return outcomes


def campaign(
    numbers: Sequence[int], seed: int, faults: Sequence[str] = FAULTS, jobs: Sequence[str] = tuple(JOBS)
) -> list[Outcome]:
    """Make these runs; return the outcomes of all faults and print those that went wrong as they happen."""
    folder = Path(tempfile.mkdtemp(prefix="minidist-chaos-"))
    if "full" in faults and not can_fill(folder):
        print("full: left out, because only root can mount a separate file system", file=sys.stderr)
        faults = tuple(fault for fault in faults if fault != "full")
    usual = {name: undisturbed(name, folder) for name in jobs}
    outcomes: list[Outcome] = []
    for done, number in enumerate(numbers, 1):
        for outcome in run(number, seed, faults, usual, folder):
            outcomes.append(outcome)
            if outcome.wrong:
                print(f"run {number}: {outcome.job}, {outcome.fault}: {'; '.join(outcome.wrong)}", flush=True)
        if done % 10 == 0:
            print(f"\nafter {done} of {len(numbers)} runs\n{table(outcomes)}", file=sys.stderr, flush=True)
    if any(outcome.wrong for outcome in outcomes):
        print(f"what went wrong is in {folder}")
    else:
        shutil.rmtree(folder)
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Return how many faults of each kind met each job, how many went wrong, and the longest time until the end."""
    head = [f"{'fault':12}", *(f"{name:>14}" for name in JOBS), f"{'in time':>10}{'late':>6}{'wrong':>7}{'max s':>7}"]
    lines = ["".join(head)]
    for fault in FAULTS:
        mine = [outcome for outcome in outcomes if outcome.fault == fault]
        counts = Counter(outcome.job for outcome in mine)
        late, wrong = sum(outcome.late for outcome in mine), sum(bool(outcome.wrong) for outcome in mine)
        longest = max((outcome.seconds for outcome in mine), default=0.0)
        lines.append(
            f"{fault:12}"
            + "".join(f"{counts[name]:14}" for name in JOBS)
            + f"{len(mine) - late:10}{late:6}{wrong:7}{longest:7.1f}"
        )
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    return "\n".join([*lines, f"{len(outcomes)} faults, {wrong} went wrong"])


def main() -> None:
    """Read the flags, make the runs, print the table; exit code 1 when a fault went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--only", type=int, help="make this run alone")
    flags = parser.parse_args()
    numbers = [flags.only] if flags.only is not None else range(flags.first, flags.first + flags.runs)
    outcomes = campaign(numbers, flags.seed)
    print(table(outcomes))
    sys.exit(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
