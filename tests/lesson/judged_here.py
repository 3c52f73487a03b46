"""Judges answers that are trusted in this process, where a process for each would take most of the time.

Proved by: tests/lesson/test_puzzles.py, tests/lesson/test_bank.py
"""

from types import SimpleNamespace
from unittest import mock

from minidist.course.lesson import judge
from minidist.course.lesson.answer_process import Job, run
from minidist.course.lesson.runner import Account, Runner, outcome_of


class RunnerHere(Runner):
    """Runs answers in this process."""

    def __init__(self, exercise, answer, path, limits, cells=()):
        self.exercise, self.limits, self.inputs, self.answer, self.recorded = exercise, limits, (None, []), answer, []
        self.job = Job(exercise.task, answer, (), (), limits.compute_s, None)

    def _ask(self, case, question):
        account = Account(case.ranks)
        functions = [self.answer.load() for _ in question.inputs] if question.apart else self.answer.load()
        outcome, self.recorded = run(self.job, functions, question, SimpleNamespace(send=account.add))
        return outcome_of(outcome, account, case.ranks)

    def traces(self):
        return self.recorded

    def _end(self):
        pass


def packed(function):
    """Return a function as the judge expects it."""
    return SimpleNamespace(load=lambda: function)


def judged(name, function):
    """Return the verdict on an answer to the exercise `name`, without another process."""
    with mock.patch.object(judge, "Runner", RunnerHere):
        return judge.judge(judge.Request(name, packed(function), seed=0))
