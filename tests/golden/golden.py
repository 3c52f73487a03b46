"""Run the golden jobs and record what must not change: `python -m tests.golden.golden` writes golden.json anew.

Of each job: the keys of its JSON, bytes and messages by purpose, peaks, the end of its virtual time, a checksum of all
messages of its trace (order, sizes, tags, purposes, times), and what depends on the processor's arithmetic too: the
digest of weights and optimizer state, and the losses. Digests are compared where `environment()` is the recorded one.
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

from minidist import cli
from tests.golden.jobs import JOBS

GOLDEN = Path(__file__).with_name("golden.json")
# Of the JSON: equal everywhere. What is absent here is compared by its key only.
COUNTS = ("ranks", "bytes_by_purpose", "messages_by_purpose", "peak_bytes", "tier", "equal", "virtual_seconds")
# Whose cuts follow from measured seconds, so that only the keys of its JSON are equal in every run.
TIMED = ("repartition",)


def environment():
    """What the last bits of a product depend on: NumPy, its BLAS, and the processor."""
    model = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"numpy {np.__version__}, {model}"


def command(line, folder):
    """Run one command line in this process, in the folder; return what it printed on standard output."""
    printed, errors, before = io.StringIO(), io.StringIO(), (sys.argv, os.getcwd())
    sys.argv = ["minidist"]
    os.chdir(folder)
    code = 0
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            cli.main(line.format(dir=".").split())
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = before[0]
        os.chdir(before[1])
    assert code == 0, f"minidist {line}: exit code {code}\n{errors.getvalue()}"
    return printed.getvalue()


def traced(path):
    """Return the last virtual time of a trace and the checksum of its messages."""
    end, checksum = 0.0, hashlib.sha256()
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        event = json.loads(line)
        end = max(end, event.get("end", 0.0))
        if event.get("event") == "message":
            checksum.update(json.dumps(event, sort_keys=True).encode())
    return {"virtual_end": end, "messages": checksum.hexdigest()[:16]}


def record(name):
    """Run a job's command lines in an empty folder and return what is recorded of the last one, counts and numbers."""
    lines = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        for line in lines[:-1]:
            command(f"{line} --trace none", folder)
        # A folded dry run and `compare` keep no trace.
        trace = Path(folder, "trace.jsonl")
        keeps = lines[-1].startswith("train") and "--fold" not in lines[-1]
        printed = json.loads(command(f"{lines[-1]} --json" + (" --trace trace.jsonl" if keeps else ""), folder))
        assert np.isfinite(printed.get("losses", 0)).all(), f"{name}: losses {printed['losses']}"
        if name in TIMED:
            return {"keys": sorted(printed)}, {}
        counts = {key: printed[key] for key in COUNTS if key in printed}
        found = {"keys": sorted(printed), **counts, **(traced(trace) if keeps else {})}
        return found, {key: printed[key] for key in ("digest", "losses") if key in printed}


def main():
    """Run every job and write what was found."""
    jobs = {}
    for name in JOBS:
        found, numbers = record(name)
        jobs[name] = {**found, "numbers": numbers}
        print(f"{name}: {numbers.get('digest', '')[:12]}", flush=True)
    text = json.dumps({"environment": environment(), "jobs": jobs}, separators=(",", ":"))
    GOLDEN.write_text(text.replace('"keys":', '\n"keys":') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
