"""Writes the dump of a rank whose job makes no progress: a watchdog for jobs on the CPU; PyTorch has one for NCCL only.

    flight_recorder.watch(60, "dumps")       # in the program, on every rank
    TORCH_FR_BUFFER_SIZE=2000 torchrun --nproc-per-node 4 train.py
    minidist hang dumps                      # after a minute without a new or a completed operation

A thread compares the numbers of the last operations of every group. When they have stood still for so long, it writes
dumps/fr_trace_rank_0, and again when they stand still at other numbers. gloo does not record sends and receives, so a
rank that only sends makes no progress here; its dump is written again, and says that nothing hangs.

Proved by: tests/flight_recorder/test_watchdog.py
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.files import writing

NAME = "fr_trace_rank_"


def watch(seconds: float, folder: str | Path) -> threading.Thread:
    """Start a thread that writes this rank's dump into a folder when it makes no progress for so long; return it.

    seconds: of real time, above 0. Call it on every rank, before or after init_process_group. Raises UsageError where
    PyTorch records nothing: without TORCH_FR_BUFFER_SIZE, and in versions without a Flight Recorder for the CPU.
    """
    if not seconds > 0:
        raise UsageError(f"seconds={quoted(seconds)}; it must be above 0")
    if not any(
        os.environ.get(name, "0").strip("0") for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    ):
        raise UsageError(
            "PyTorch's Flight Recorder is off; set TORCH_FR_BUFFER_SIZE=2000 before the program starts, and it keeps"
            " the last 2,000 operations of each rank"
        )
    torch = import_module("torch")
    recorder = import_module("torch._C._distributed_c10d") if torch.distributed.is_available() else None
    if not hasattr(recorder, "_dump_fr_trace"):
        raise UsageError(
            f"torch {torch.__version__} has no torch._C._distributed_c10d._dump_fr_trace, which gives the dump of a"
            " rank on the CPU; install a later version"
        )
    with writing("the dumps", folder, "choose another folder"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    thread = threading.Thread(
        target=write_when_idle, args=(recorder, torch.distributed, seconds, Path(folder)), name="watch", daemon=True
    )
    thread.start()
    return thread


def write_when_idle(recorder: Any, distributed: Any, seconds: float, folder: Path) -> None:
    """Write the dump whenever the last numbers of all groups have stood still for `seconds`; never return."""
    seen, since, is_written = b"", time.monotonic(), False
    while True:
        time.sleep(min(seconds / 10, 1))
        status = recorder._dump_fr_trace_json(includeCollectives=False)
        if status != seen:
            seen, since, is_written = status, time.monotonic(), False
        elif not is_written and time.monotonic() - since >= seconds:
            is_written = True
            try:
                write_dump(recorder._dump_fr_trace, folder / f"{NAME}{rank_of(distributed)}")
            except UsageError as error:  # a full disk, say: the job goes on without it
                print(f"minidist: {error}", file=sys.stderr)


def write_dump(dump: Callable[..., bytes], file: Path) -> None:
    """Write the dump of a rank, whole: a reader never finds half of it.

    PyTorch takes seconds to find the lines of the program, and a timeout may end the process meanwhile. So the dump is
    written without them first.
    """
    part = file.with_name(f"{file.name}.part")
    with writing("the dump", file, "make room there, or choose another folder"):
        for has_lines in (False, True):
            part.write_bytes(dump(includeStackTraces=has_lines))
            part.replace(file)


def rank_of(distributed: Any) -> int:
    """Return the rank of this process: of the default group, else as the launcher says it."""
    return int(distributed.get_rank()) if distributed.is_initialized() else int(os.environ.get("RANK", 0))
