"""Grades a submission: points for a right answer, and for bytes and virtual time within par.

    submission ──▶ the functions of each exercise ──▶ judge: fixed and drawn cases, then one with separate globals
               ──▶ points ──▶ results.json, in the form that Gradescope reads

Par is what our solution needs on the same case. Each exercise runs in a separate process, with limits of time, memory
and messages. An assignment is the exercises of a lesson ("04"), one exercise ("04.ring_all_reduce"), or those of a
course ("cs336"); see assignments/.

Proved by: tests/lesson/test_grade.py
"""

import ast
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.read_file import parse_json
from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.exercise import Exercise
from minidist.course.lesson.judge import Request, Verdict, judge
from minidist.course.lesson.numbers import current
from minidist.course.lesson.runner import Limits, start_server
from minidist.course.lesson.submission import BrokenSubmissionError, read, source_of

RIGHT, WITHIN_PAR = 6.0, 2.0  # points of a right answer, and for each metric within par
LABELS = {"bytes": "bytes", "time": "virtual time", "memory": "peak memory"}
MEMORY = 1 << 30  # bytes that an answer may take
UNFINISHED = "the process that grades was ended before it was done"
GRADED_LIMITS = Limits(memory=MEMORY)


@dataclass(frozen=True)
class Item:
    """One line of a grade."""

    name: str
    score: float
    most: float
    output: str


@dataclass(frozen=True)
class Grade:
    """The grade of a submission. totals: the bytes and the seconds of the right answers on the cases of par."""

    submission: str
    assignment: str
    seed: int
    items: list[Item]
    totals: dict[str, float]
    seconds: float

    @property
    def score(self) -> float:
        return sum(item.score for item in self.items)

    @property
    def most(self) -> float:
        return sum(item.most for item in self.items)

    def results(self) -> dict[str, Any]:
        """Return Gradescope's results.json."""
        return {
            "score": self.score,
            "execution_time": round(self.seconds, 3),
            "output": f"{self.submission}, assignment {self.assignment}, seed {self.seed}",
            "tests": [
                {
                    "name": item.name,
                    "score": item.score,
                    "max_score": item.most,
                    "status": "passed" if item.score == item.most else "failed",
                    "output": item.output,
                    "visibility": "visible",
                }
                for item in self.items
            ],
            "leaderboard": [
                {"name": "points", "value": self.score, "order": "desc"},
                {"name": "bytes", "value": self.totals["bytes"], "order": "asc"},
                {"name": "virtual time in µs", "value": round(self.totals["time"] * 1e6, 6), "order": "asc"},
            ],
            "extra_data": {"submission": self.submission, "assignment": self.assignment, "seed": self.seed},
        }

    def text(self) -> str:
        """Return the grade for people."""
        lines = [f"{self.submission}: {self.score:g} of {self.most:g} points ({self.assignment}, seed {self.seed})"]
        for item in self.items:
            lines.append(f"  {item.score:g} of {item.most:g}  {item.name}")
            if item.score < item.most:
                lines += [f"      {line}" for line in item.output.splitlines()]
        return "\n".join(lines)


def exercises_of(assignment: str) -> list[Exercise]:
    """Return the exercises of an assignment. Raises UsageError, with the names there are, when there is none."""
    table, assignment = {**exercises(), **exercises("assignments")}, current(assignment)
    chosen = [exercise for name, exercise in table.items() if name == assignment or name.split(".")[0] == assignment]
    if not chosen:
        names = [*dict.fromkeys(name.split(".")[0] for name in table), *table]
        raise UsageError(
            f"there is no assignment {quoted(assignment)}{nearest(assignment, names)}; there are"
            f" {', '.join(dict.fromkeys(name.split('.')[0] for name in table))}, and single exercises such as"
            " 04.ring_all_reduce"
        )
    return chosen


def grade(
    path: Path,
    assignment: str,
    seed: int,
    limits: Limits = GRADED_LIMITS,
    begin: Callable[[Grade], None] = lambda unfinished: None,
) -> Grade:
    """Grade a submission. The seed draws some of the cases; one seed for a class makes grades comparable.

    begin: is given a grade of no points before an answer is run, in case this process does not live to return one.
    """
    begun = time.perf_counter()
    start_server()  # while it starts, this process loads the exercises
    chosen = exercises_of(assignment)
    try:
        submission: ast.Module | BrokenSubmissionError = read(path)
    except BrokenSubmissionError as error:
        submission = error
    items: list[Item] = []
    totals = {"bytes": 0.0, "time": 0.0}
    for exercise in chosen:
        items += _items(exercise, Verdict(exercise.name, False, f"{exercise.name}: not graded\n  {UNFINISHED}"))
    begin(Grade(path.name, assignment, seed, items, totals, 0.0))

    items = []
    for exercise in chosen:
        verdict = _verdict(exercise, path, submission, seed, limits)
        items += _items(exercise, verdict)
        for metric in totals:
            totals[metric] += verdict.yours.get(metric, 0.0)
    return Grade(path.name, assignment, seed, items, totals, time.perf_counter() - begun)


def _verdict(
    exercise: Exercise, path: Path, submission: ast.Module | BrokenSubmissionError, seed: int, limits: Limits
) -> Verdict:
    try:
        if isinstance(submission, BrokenSubmissionError):
            raise submission
        source = source_of(exercise, path, submission)
    except UsageError as error:
        return Verdict(exercise.name, False, f"{exercise.name}: not graded\n  {error}")
    places = (str(path.resolve().parent), *(place or os.getcwd() for place in sys.path))
    return judge(Request(exercise.name, source, seed, places, limits=limits, share_nothing=True, needs_par=False))


def _items(exercise: Exercise, verdict: Verdict) -> list[Item]:
    """Return the lines of one exercise: right, and each metric within par."""
    metrics = ["bytes", "time"] if exercise.communicates else ["memory"] if "memory" in exercise.limits else []
    right = RIGHT + WITHIN_PAR * (2 - len(metrics))
    items = [Item(f"{exercise.name}: right", right * verdict.passed, right, verdict.text)]
    for metric in metrics:
        name = f"{exercise.name}: {LABELS[metric]} within par"
        text = verdict.above.get(metric, "within par on all cases") if verdict.passed else "no right answer"
        within = verdict.passed and metric not in verdict.above
        items.append(Item(name, WITHIN_PAR * within, WITHIN_PAR, text))
    return items


def leaderboard(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row per results.json, the best first: most points, then fewest bytes, then least virtual time."""
    rows = []
    for path in paths:
        try:
            results = parse_json(path.read_text(encoding="utf-8"), any_float=True)
            values = {entry["name"]: entry["value"] for entry in results["leaderboard"]}
            data = results["extra_data"]
            row = {
                "submission": data["submission"],
                "assignment": data["assignment"],
                "seed": data["seed"],
                "points": float(values["points"]),
                "bytes": float(values["bytes"]),
                "microseconds": float(values["virtual time in µs"]),
            }
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{quoted_path(path)} is not a results.json of minidist grade; write it again") from None
        rows.append(row)
    kinds = {(row["assignment"], row["seed"]) for row in rows}
    if len(kinds) > 1:
        listed = ", ".join(f"{name} with seed {seed}" for name, seed in sorted(kinds, key=str))
        raise UsageError(f"a leaderboard compares one assignment with one seed; these files have {listed}")
    return sorted(rows, key=lambda row: (-row["points"], row["bytes"], row["microseconds"], row["submission"]))
