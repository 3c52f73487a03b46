"""Measures par: runs our solutions on every case of every exercise.

python -m tests.lesson.par_table            writes minidist/course/lesson/par.json
python -m tests.lesson.par_table puzzle     measures the exercises whose names begin with this word, and keeps the rest
"""

import json
import sys
from dataclasses import replace

from minidist.core.base.errors import UsageError
from minidist.course.lesson.catalogue import exercises
from minidist.course.lesson.par import COLUMNS, TABLE, Par, all_cases, is_measured, key_of
from minidist.course.lesson.plain import form
from minidist.course.lesson.runner import Limits, Runner
from minidist.course.lesson.solutions import solution
from minidist.course.lesson.transport import Packed, dumps

DIGITS = 12  # of a virtual time, which is a sum in floating point


def measured_exercises():
    """Return the exercises that have rows in the table."""
    every = [*exercises().values(), *exercises("assignments").values(), *exercises("puzzles").values()]
    return [exercise for exercise in every if is_measured(exercise)]


def run(exercise, function, case, *, buffered=False):
    """Return the outcome of a run, and its traces. An answer may call all of the library, as our solutions do."""
    with Runner(replace(exercise, written_by_hand=()), Packed(dumps(function)), sys.path, Limits()) as runner:
        return runner.run(case, buffered, 1000), runner.traces()


def measure(exercise, function, case):
    """Return par as a run of this function on a case shows it."""
    outcome, traces = run(exercise, function, case)
    if outcome.error is not None:
        raise UsageError(f"our solution of {exercise.name} fails on {case}: {outcome.message}")
    metrics = {name: float(f"{outcome.metrics[name]:.{DIGITS}g}") for name in COLUMNS}
    forms = [] if exercise.check_answers is None else [form(answer) for answer in outcome.answers]
    return Par(metrics, sum(len(trace.messages) for trace in traces), forms)


def row(par):
    """Return par as the table has it: the forms of all ranks as one where they are equal."""
    numbers = [int(number) if number == int(number) else number for number in par.metrics.values()]
    return [*numbers, par.messages, par.forms[0] if len(set(par.forms)) == 1 else par.forms]


def main():
    before = json.loads(TABLE.read_text(encoding="utf-8"))
    lines = []
    for exercise in measured_exercises():
        rows = before.get(exercise.name)
        if exercise.name.startswith(tuple(sys.argv[1:]) or ""):
            function = solution(exercise.name)
            rows = {key_of(case): row(measure(exercise, function, case)) for case in all_cases(exercise)}
            print(f"{exercise.name}: {len(rows)} cases", flush=True)
        lines.append(f"{json.dumps(exercise.name)}: {json.dumps(rows, separators=(',', ':'))}")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
