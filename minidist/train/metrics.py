"""What a training job reports while it runs, as JSON lines, by way of a callback.

A callback is a function of `StepState`; every rank calls it after every step, so it may communicate, as long as all
ranks do the same. There is no TensorBoard and no Weights & Biases in here: `MetricsFile` is a callback of twenty lines,
and a user's is another one (`run_training(config, ..., callbacks=[yours])`).

    {"step": 3, "loss": 2.31, "lr": 0.003, "samples": 64, "seconds": 0.41, "bytes_sent": 596320}

Proved by: tests/commands/test_generation.py
"""

import json
import time
from pathlib import Path
from typing import Self, TextIO

from minidist.train.state import StepState


class MetricsFile:
    """Writes one JSON line per step, from rank 0. seconds: since the start. bytes_sent: by rank 0, so far."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._began = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __call__(self, state: StepState) -> None:
        if state.rank != 0:
            return
        # Opened for the first record, so that a job that is refused leaves an older file as it is.
        self._file = self._file or self.path.open("w", encoding="utf-8")
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
            self._file.close()
            self._file = None


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the records of a file that `MetricsFile` has written."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
