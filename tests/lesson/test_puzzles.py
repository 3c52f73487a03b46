"""Every puzzle: its stub fails, our solution is at the target, each typical wrong answer gets a hint that fits."""

from types import SimpleNamespace

import pytest

from minidist.course import puzzle as puzzles
from minidist.course.lesson import judge, solution
from minidist.course.lesson.answer_process import Job
from minidist.course.lesson.answer_process import run as run_here
from minidist.course.lesson.par import Par, is_measured, par_of
from minidist.course.lesson.puzzles import filled
from minidist.course.lesson.runner import Account, Runner, outcome_of
from tests.cases import each
from tests.lesson.puzzle_attempts import WRONG

EVERY = {puzzle.name: puzzle for row in puzzles.rows().values() for puzzle in row}
OWN = [name for name, puzzle in EVERY.items() if puzzle.exercise.name == f"puzzle.{name}"]


class RunnerHere(Runner):
    """Runs answers that are trusted in this process, where a process for each would take most of the time."""

    def __init__(self, exercise, answer, path, limits, cells=()):
        self.exercise, self.limits, self.inputs, self.answer, self.recorded = exercise, limits, (None, []), answer, []
        self.job = Job(exercise.task, answer, (), (), limits.compute_s, None)

    def _ask(self, case, question):
        account = Account(case.ranks)
        functions = [self.answer.load() for _ in question.inputs] if question.apart else self.answer.load()
        outcome, self.recorded = run_here(self.job, functions, question, SimpleNamespace(send=account.add))
        return outcome_of(outcome, account, case.ranks)

    def traces(self):
        return self.recorded

    def _end(self):
        pass


@pytest.fixture
def judged(monkeypatch):
    """judged(puzzle, function) -> the verdict, without another process."""
    monkeypatch.setattr(judge, "Runner", RunnerHere)
    return lambda puzzle, function: judge.judge(
        judge.Request(puzzle.exercise.name, SimpleNamespace(load=lambda: function), seed=0)
    )


def answer(puzzle, lines):
    """Return the function of a stub whose blanks are filled."""
    namespace = {}
    exec("import numpy as np\n" + filled(puzzle.stub, lines), namespace)
    return namespace[puzzle.function]


def test_there_are_three_rows_of_twenty_and_the_last_are_exercises_of_the_lessons():
    assert [[p.name for p in row] for row in puzzles.rows().values()] == [
        [f"{letter}{number:02}" for number in range(1, 21)] for letter in "mbs"
    ]
    for row in puzzles.rows().values():
        kinds = [p.name in OWN for p in row]
        assert kinds == sorted(kinds, reverse=True)
        assert 4 <= kinds.count(False) <= 5
        assert len({p.title for p in row}) == 20


@each("name", OWN)
def test_our_solution_is_at_the_target(name, judged):
    exercise = EVERY[name].exercise
    verdict = judged(EVERY[name], solution(exercise.name))
    assert verdict.passed, verdict.text
    assert not verdict.above
    # The target is what was measured, on each case.
    if is_measured(exercise):
        runner = RunnerHere(exercise, SimpleNamespace(load=lambda: solution(exercise.name)), (), judge.Request.limits)
        for case in exercise.cases():
            outcome, ours = runner.run(case, False, 1000), par_of(exercise.name, case)
            assert Par(outcome.metrics, outcome.sent.messages, ours.forms) == ours
