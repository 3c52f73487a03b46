"""What a training job reports while it runs, as JSON lines, by way of a callback.

A callback is a function of `StepState`; every rank calls it after every step, so it may communicate, as long as all
ranks do the same. There is no TensorBoard and no Weights & Biases in here: `MetricsFile` is a callback of twenty lines,
and a user's is another one (`run_training(config, ..., callbacks=[yours])`).

    {"step": 3, "loss": 2.31, "lr": 0.003, "samples": 64, "seconds": 0.41, "bytes_sent": 596320}

A loss that is not finite is null, as JSON has no NaN. A resumed job continues the file: the records of the steps before
its first one stay, and later ones (of steps that were not saved before an interruption, and are repeated) are removed.
`check_same_run` refuses a file of another run.

Proved by: tests/commands/test_generation.py, tests/checkpoint/test_used_folders.py
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Self, TextIO

from minidist.base.errors import UsageError, quoted, quoted_path, reason
from minidist.base.files import strict, writing
from minidist.base.read_file import parse_json
from minidist.job.train.state import StepEnd, StepState

METRICS_BEGIN = '{"step": '  # the first characters of every file of metrics
MAX_LINE = 10_000  # characters of a record


class MetricsFile:
    """Writes one JSON line per step, from rank 0; `seconds` and `bytes_sent` (by rank 0) count from this run's start.

    Both are of the moment at which the step ends on rank 0. With a parameter server rank 0 is a server, and a step ends
    with the update by its last push. resume: continue the file of the run before, instead of beginning a new one.
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
            before = _records(self.path) if self.resume else ()
            kept = [line for line, record in before if record["step"] < state.step]
            self._file = self.path.open("w", encoding="utf-8")
            self._file.writelines(kept)
        config, batches, (shares, start) = state.job.config, state.job.batches, state.job.batch
        end = state.end or StepEnd.now(state.comm)
        record: dict[str, Any] = {
            "step": state.step,
            "loss": state.loss,
            "lr": config.lr * state.job.lr_factor(state.step),
            "samples": (state.step + 1) * batches.global_batch if start is None else start + shares.samples,
            "seconds": round(end.seconds - self._began, 6),
            "bytes_sent": end.bytes_sent,
        }
        if state.job.plan.changes:
            record["rows"] = [sum(rows) for rows in shares.rows]
        record |= state.held_out_losses
        for extension in state.job.extensions:
            record |= extension.record(state.job, state.step + 1)
        self._file.write(json.dumps(strict(record), allow_nan=False) + "\n")
        # So that `tail -f` shows each step.
        self._file.flush()

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            # Every record was flushed, so what cannot be written now was reported already.
            with suppress(OSError):
                self._file.close()
            self._file = None


def check_same_run(path: str | Path, losses: Sequence[float]) -> None:
    """Raise UsageError unless the file is of the run that is resumed, or does not exist, or has no record.

    losses: of the steps that the run has done. Those of different runs differ, and JSON keeps every bit of them.
    """
    remedy = "choose another --metrics, or remove that file"
    records = [record for _, record in _records(path)]
    known = [record for record in records if record["step"] < len(losses)]
    if records and not known:
        raise UsageError(
            f"--metrics {quoted_path(path)} is of another run: it has no record of the {len(losses)} steps that are"
            f" resumed; {remedy}"
        )
    for record in known:
        then = losses[record["step"]]
        # Files of before have NaN where null is now.
        if strict(record["loss"]) != strict(then):
            raise UsageError(
                f"--metrics {quoted_path(path)} is of another run: in step {record['step']} its loss is"
                f" {quoted(record['loss'])}, and that of the run that is resumed was {then}; {remedy}"
            )


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of a file with its record; nothing when there is no file. Raises UsageError with a wrong line.

    Half a line at the end, which a killed job may leave, is left out.
    """
    # A device or a pipe has no records, and reading it could block.
    if not Path(path).is_file():
        return
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number in count(1):
            # One character more than allowed is asked for, so that an endless line is not read to its end.
            line = file.readline(MAX_LINE + 1)
            if not line.endswith("\n") and len(line) <= MAX_LINE:
                return
            try:
                record = parse_json(line, any_float=True)
                wrong = None if _is_record(record) else f"{quoted(line.strip())} is not a record of a step"
            except ValueError as error:
                wrong = f"it is not JSON: {reason(error)}"
            if wrong:
                raise UsageError(f"{quoted_path(path)}, line {number}: {wrong}; remove the line")
            yield line, record


def _is_record(record: object) -> bool:
    return (
        isinstance(record, dict)
        and type(record.get("step")) is int
        and record["step"] >= 0
        and type(record.get("loss", "")) in (int, float, type(None))
    )


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file that `MetricsFile` has written. A loss that is not finite is None."""
    if not Path(path).is_file():
        raise UsageError(f"there is no file {quoted_path(path)}; minidist train --metrics writes one")
    return [record for _, record in _records(path)]
