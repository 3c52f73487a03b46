"""What a training job reports while it runs, as JSON lines, by way of a callback.

A callback is a function of `StepState`; every rank calls it after every step, so it may communicate, as long as all
ranks do the same. There is no TensorBoard and no Weights & Biases in here: `MetricsFile` is a callback of twenty lines,
and a user's is another one (`run_training(config, ..., callbacks=[yours])`).

    {"step": 3, "loss": 2.31, "lr": 0.003, "samples": 64, "seconds": 0.41, "bytes_sent": 596320}

A resumed job continues the file: the records of the steps before its first one stay, later ones (of steps that were not
saved before the job was interrupted, and are made again) go.

Proved by: tests/commands/test_generation.py, tests/checkpoint/test_used_folders.py
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

from minidist.base.files import writing
from minidist.train.state import StepState


class MetricsFile:
    """Writes one JSON line per step, from rank 0; `seconds` and `bytes_sent` (by rank 0) count from this run's start.

    resume: continue the file of the run before, instead of beginning a new one.
    """

    reads_tensors = False

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        self.path, self.resume = Path(path), resume
        self._file: TextIO | None = None
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __call__(self, state: StepState) -> None:
        if state.rank != 0:
            return
        with writing("the metrics", self.path, "make room there, or choose another --metrics"):
            self._write(state)

    def _write(self, state: StepState) -> None:
        # Opened for the first record, so that a job that is refused leaves an older file as it is.
        if self._file is None:
            kept = _records_before(self.path, state.step) if self.resume else []
            self._file = self.path.open("w", encoding="utf-8")
            self._file.writelines(kept)
        config, batches = state.job.config, state.job.batches
        record = {
            "step": state.step,
            "loss": state.loss,
            "lr": config.lr * state.job.schedule(state.step),
            "samples": (state.step + 1) * batches.global_batch,
            "seconds": round(time.perf_counter() - self._began, 6),
            "bytes_sent": 0 if state.comm is None else sum(state.comm.trace.bytes_by_purpose().values()),
        }
        if state.held_out_loss is not None:
            record["held_out_loss"] = state.held_out_loss
        self._file.write(json.dumps(record) + "\n")
        # So that `tail -f` shows each step.
        self._file.flush()

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            # Every record was flushed, so what cannot be written now was reported already.
            with suppress(OSError):
                self._file.close()
            self._file = None


def _records_before(path: Path, step: int) -> list[str]:
    """Return the lines of the steps before `step`; the half line that a killed job may have left is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else ():
        try:
            number = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if line.endswith("\n") and isinstance(number, int) and number < step:
            kept.append(line)
    return kept


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the records of a file that `MetricsFile` has written."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
