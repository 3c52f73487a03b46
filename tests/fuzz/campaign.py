"""`make fuzz`: wrong input of every kind, given to the program in process; each must be a success or one sentence.

    python -m tests.fuzz.campaign --inputs 20000 --processes 2 --seed 0

An input is made from (seed, number) alone, by one of the generators in `inputs.py`. A worker process has MEMORY bytes
more than it needs to start, and an input SECONDS of computing, or ten times as long by the clock, so that a machine
with other work gives no findings. An outcome is right when the command succeeds, or ends with exit code 2 (1 for a run
that failed) and one sentence of at most 600 characters. Everything else is printed with the command that repeats it,
and its files are kept under --keep.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz import inputs

SECONDS, MEMORY, MAX_SENTENCE = 10, 10**9, 600
TIMERS = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, 10 * SECONDS))


class TooSlow(BaseException):
    """Raised by the alarm; no `except Exception` of a command may take it for a defect of its input."""


def _alarm(number, frame):
    raise TooSlow


def outcome(arguments):
    """Run the program with these arguments; returns (kind, what is wrong or None)."""
    from minidist.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    for timer, number, seconds in TIMERS:
        signal.signal(number, _alarm)
        signal.setitimer(timer, seconds)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as end:
        code = end.code or 0
    except TooSlow:
        return "slow", f"no end after {SECONDS} s of computing, or {10 * SECONDS} s by the clock"
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        for timer, *_ in TIMERS:
            signal.setitimer(timer, 0)
    said = err.getvalue()
    if code == 0:
        return "done", None
    if code not in (1, 2) or "Traceback" in said:
        return "traceback", f"exit code {code}: {said[-2000:]}"
    last = next((line for line in said.splitlines() if line.startswith(("minidist: ", "Error: "))), "")
    if not last:
        return "silent", f"exit code {code} without a sentence: {said[:500]!r}"
    if len(last) > MAX_SENTENCE:
        return "long", f"a sentence of {len(last)} characters: {last[:300]}"
    return "refused", None


def limit_memory():
    """Limit this process to MEMORY more bytes than it has mapped now."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))


def one(seed, number, keep=None):
    """Make and run one input; returns (generator, kind, what is wrong or None). keep: where its files stay if wrong."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choice(sorted(inputs.GENERATORS))
    folder = Path(tempfile.mkdtemp(prefix="minidist-fuzz-"))
    here = os.getcwd()
    os.chdir(folder)
    os.environ["MINIDIST_CACHE"] = str(folder / "cache")
    try:
        arguments = inputs.GENERATORS[name](rng, folder)
        kind, wrong = outcome(arguments)
        if wrong is not None:
            wrong = f"{arguments!r:.1000}\n{wrong}"
            if keep is not None:
                shutil.copytree(folder, Path(keep) / f"{seed}-{number}", dirs_exist_ok=True)
        return name, kind, wrong
    finally:
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)


def _worker(task):
    seed, number, keep = task
    return number, *one(seed, number, keep)


def _start():
    import minidist.cli  # noqa: F401

    limit_memory()


def run(seed, numbers, processes, keep=None):
    """Run the inputs of these numbers; returns (counts by generator and kind, list of what is wrong)."""
    counts, wrong = Counter(), []
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start, maxtasksperchild=500) as pool:
        for number, name, kind, text in pool.imap_unordered(_worker, ((seed, n, keep) for n in numbers), chunksize=10):
            counts[name, kind] += 1
            if text is not None:
                wrong.append((number, name, kind, text))
    return counts, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", type=int, help="the number of one input, to repeat it")
    parser.add_argument("--keep", default="runs/fuzz", help="where the files of wrong outcomes stay")
    flags = parser.parse_args()
    if flags.only is not None:
        print(*one(flags.seed, flags.only, flags.keep), sep="\n")
        return 0
    began = time.perf_counter()
    counts, wrong = run(flags.seed, range(flags.inputs), flags.processes, flags.keep)
    for number, name, kind, text in wrong:
        print(f"\n{kind} of {name}: python -m tests.fuzz.campaign --seed {flags.seed} --only {number}\n{text}")
    for name in sorted({name for name, _ in counts}):
        print(f"{name:12}" + "".join(f"  {kind} {n}" for (who, kind), n in sorted(counts.items()) if who == name))
    seconds = time.perf_counter() - began
    print(
        f"{flags.inputs} inputs in {seconds:.0f} s, {3600 * flags.inputs / seconds:,.0f} per hour; {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
