"""How long each stage's actions take and how many bytes they hold: the measured or assumed input of the timing.

    --times F=1,I=1,W=1,comm=0        the same for every stage
    --profile FILE.json               one entry per stage, one latency per edge between two stages

Proved by: tests/pipeline/test_plans.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.limits import MAX_VALUE, MIN_VALUE, is_size
from minidist.base.read_file import read_json

FIELDS = ("F", "I", "W", "FB", "bytes_until_b", "bytes_until_w", "input_bytes", "parameters")


@dataclass(frozen=True)
class Times:
    """Times of each stage (lists of one number per stage), in any unit, and the bytes that one micro-batch holds.

    FB: time of an overlapped pair (default F + I + W). comm[s]: latency between stage s and s+1 on different ranks.
    until_b, until_w: bytes freed by I and by W (both by B); inputs: bytes kept instead when the stage recomputes.
    """

    F: list[float]
    I: list[float]
    W: list[float]
    comm: list[float]
    FB: list[float] | None = None
    until_b: list[float] = field(default_factory=list)
    until_w: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    parameters: list[float] = field(default_factory=list)

    def of_parts(self, share: float) -> "Times":
        """Return the times of stages that are `share` of these; a message between two ranks takes what it took."""
        return replace(
            self,
            F=[share * t for t in self.F],
            I=[share * t for t in self.I],
            W=[share * t for t in self.W],
            FB=self.FB and [share * t for t in self.FB],
        )

    @property
    def has_bytes(self) -> bool:
        """Whether the bytes that a micro-batch holds are known."""
        return bool(self.until_b or self.until_w)


class GivenTimes:
    """An observer of a `Pipeline` on `comm`: actions advance a virtual clock by given seconds, for teaching.

    Without it, actions advance the clock by what a `FlopCounter` counted in them.
    """

    def __init__(self, comm: Any, times: Times) -> None:
        self.comm, self.times = comm, times

    @contextmanager
    def __call__(self, step: Any) -> Iterator[None]:
        """Advance the clock by the seconds of an action's kind and stage when the action has ended."""
        yield
        times = self.times
        f, x, w = times.F[step.stage], times.I[step.stage], times.W[step.stage]
        seconds = {"F": f, "RECOMPUTE": f, "I": x, "W": w, "B": x + w}[step.kind]
        self.comm.compute(seconds=seconds, name=step.name)


def uniform(
    stages: int, F: float = 1.0, I: float = 1.0, W: float = 1.0, comm: float = 0.0, FB: float | None = None
) -> Times:
    """Return equal times for every stage."""
    return Times([F] * stages, [I] * stages, [W] * stages, [comm] * (stages - 1), None if FB is None else [FB] * stages)


def parse_times(text: str, stages: int) -> Times:
    """Return the times that `F=1,I=1,W=1,comm=0` writes; any may be left out, FB is that of an overlapped pair."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        name = name.strip()
        if name in values:
            raise UsageError(f"--times gives {quoted(name, marks=False)} twice; leave one of them out")
        if name not in ("F", "I", "W", "comm", "FB"):
            raise UsageError(
                f"--times has no {quoted(name)}{nearest(name, ('F', 'I', 'W', 'comm', 'FB'))}; write F=1,I=1,W=1,comm=0"
            )
        values[name] = _number(number, f"--times {quoted(part, marks=False)}")
    return uniform(stages, **values)


def _fields(row: Any, where: str) -> dict[str, float]:
    """Return the numbers of a stage: a field that it leaves out is 0, except FB, which all stages give or none."""
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {quoted(row)}; it must be an object with F, I and W")
    for name in row:
        if name not in FIELDS:
            raise UsageError(
                f"{where} has an unknown {quoted(name)}{nearest(name, FIELDS)}; it may have {', '.join(FIELDS)}"
            )
    return {
        name: _number(row.get(name), f"{where}, {name}") if name in row or name in ("F", "I", "W") else 0.0
        for name in FIELDS
        if name in row or name != "FB"
    }


def read_profile(path: str | Path, stages: int) -> Times:
    """Return the times of a JSON file of `stages` stages.

    {"stages": [{"F": 1, "I": 1, "W": 1, "bytes_until_b": 0, "bytes_until_w": 0, "parameters": 0}, ...], "edges": [0]}
    """
    data = read_json(path, "the profile", "give a JSON file with stages and edges")
    rows = data.get("stages") if isinstance(data, dict) else None
    if not isinstance(rows, list) or len(rows) != stages:
        count = len(rows) if isinstance(rows, list) else "no list of"
        raise UsageError(
            f"profile {quoted_path(path)} has {count} stages and the plan has {stages}; give one entry per stage"
        )

    # One column per field.
    columns: dict[str, list[float]] = {name: [] for name in FIELDS}
    for number, row in enumerate(rows):
        for name, value in _fields(row, f"profile {quoted_path(path)}, stage {number}").items():
            columns[name].append(value)

    # Latencies lie between stages, so there is one less.
    edges = data.get("edges", [0.0] * (stages - 1))
    if not isinstance(edges, list) or len(edges) != stages - 1:
        raise UsageError(f"profile {quoted_path(path)} needs {stages - 1} edges, one between each two stages")
    comm = [_number(value, f"profile {quoted_path(path)}, edge {i}") for i, value in enumerate(edges)]
    if columns["FB"] and len(columns["FB"]) != stages:
        raise UsageError(
            f"profile {quoted_path(path)} gives FB for {len(columns['FB'])} of {stages} stages; give it for all or none"
        )
    return Times(
        columns["F"],
        columns["I"],
        columns["W"],
        comm,
        columns["FB"] or None,
        columns["bytes_until_b"],
        columns["bytes_until_w"],
        columns["input_bytes"],
        columns["parameters"],
    )


def _number(value: Any, where: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{where}: {quoted(value)} is not a number; give a time or a size of at least 0") from None
    if not is_size(number):
        raise UsageError(f"{where}: {quoted(value)} must be 0, or a number from {MIN_VALUE:g} to {MAX_VALUE:g}")
    return number
