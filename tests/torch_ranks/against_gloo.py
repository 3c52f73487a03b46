"""The programs of peers/ on simulated ranks and on real processes with gloo: one table of their numbers.

    python -m tests.torch_ranks.against_gloo [PROGRAM ...]

The simulated ranks run a program as it is, which names CUDA devices where its kind does; the processes run it with
--cpu. Both print one line for each result, in any order.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).with_name("peers")
# Ranks, and who starts them: "torchrun", or the program itself.
PROGRAMS = {
    "ddp.py": (2, "torchrun"),
    "fsdp1.py": (2, "torchrun"),
    "two_axes.py": (4, "torchrun"),
    "pipeline.py": (3, "torchrun"),
    "zero_join.py": (2, "program"),
    "ring_attention.py": (3, "program"),
    "fork_queue.py": (3, "program"),
    "grid": (4, "torchrun"),
    "checkpoint.py": (2, "torchrun"),
    "hooks_and_stores.py": (2, "torchrun"),
    "cs336.py": (2, "torchrun"),
}
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
TOLERANCE = 1e-5  # sums of float32 in another order


def results(text):
    """The lines of results, sorted: (text without numbers, numbers)."""
    lines = [line for line in text.splitlines() if re.match(r"rank|done|exit", line)]
    return sorted((NUMBER.sub("#", line), [float(number) for number in NUMBER.findall(line)]) for line in lines)


def run(command, logs):
    """(output, seconds, exit code) of a command in the folder of the programs. logs: where torchrun's are."""
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    texts = [done.stdout, *(path.read_text() for path in sorted(Path(logs).rglob("stdout.log")))]
    return "".join(texts), time.monotonic() - start, done.returncode


def command_of(name, simulated, logs):
    """The command that runs a program."""
    ranks, starter = PROGRAMS[name]
    words = [name] if name.endswith(".py") else ["-m", name]
    if simulated:
        return [sys.executable, "-m", "minidist", "torch", "--ranks", str(ranks), *words]
    if starter == "program":
        return [sys.executable, *words, "--cpu"]
    # Processes that write into one pipe write into each other's lines.
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--redirects=1"]
    return [sys.executable, "-m", *torchrun, f"--log-dir={logs}", *words, "--cpu"]


def verdict(ours, theirs):
    """What the results of a program have in common, and whether that is all."""
    if not theirs or [words for words, _ in ours] != [words for words, _ in theirs]:
        return f"other lines: {len(ours)} and {len(theirs)}", False
    pairs = [pair for (_, a), (_, b) in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    largest = max((abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=0.0)
    return f"{len(theirs)} lines, {len(pairs)} numbers, largest difference {largest:.1e}", largest < TOLERANCE


def main():
    failed = []
    print(f"{'program':22} {'ranks':>5} {'simulated':>10} {'gloo':>8}")
    for name in sys.argv[1:] or PROGRAMS:
        with TemporaryDirectory() as logs:
            ours, our_seconds, code = run(command_of(name, True, logs), logs)
            theirs, their_seconds, their_code = run(command_of(name, False, logs), logs)
        text, equal = verdict(results(ours), results(theirs))
        if code or their_code or not equal:
            failed.append(name)
            text += f", exit codes {code} and {their_code}"
        print(f"{name:22} {PROGRAMS[name][0]:5} {our_seconds:8.1f} s {their_seconds:6.1f} s  {text}", flush=True)
    sys.exit(f"not equal: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
