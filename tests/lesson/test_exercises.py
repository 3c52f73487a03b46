"""Every exercise: our solution passes, the stub fails, and each typical wrong answer gets a hint that fits."""

import pytest

from minidist.lesson import examine, names, solution
from minidist.lesson.exercise import find
from tests.lesson.attempts import ATTEMPTS
from tests.lesson.wrong_answers import WRONG


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "function", "hint"), [*WRONG, *ATTEMPTS[::3]], ids=lambda value: getattr(value, "__name__", None)
)
def test_a_typical_wrong_answer_gets_a_hint_that_fits(name, function, hint):
    result = examine(name, function, mpi=False)
    assert not result
    assert hint in result.hint, result.text
    assert "not yet" in result.text


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "function", "hint"), ATTEMPTS, ids=lambda value: getattr(value, "__name__", None))
def test_every_attempt_gets_a_hint_that_fits(name, function, hint):
    assert hint in examine(name, function, mpi=False).hint


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", names())
def test_our_solution_passes_at_par(name):
    result = examine(name, solution(name), mpi=False)
    assert result.passed, result.text
    assert result.par == pytest.approx(result.yours, rel=1e-9)


@pytest.mark.parametrize("name", names())
def test_an_unwritten_function_fails(name):
    def stub(*arguments):
        raise NotImplementedError("yours")

    result = examine(name, stub, mpi=False)
    assert not result
    assert "this is the stub" in result.hint
    assert not examine(name, lambda *arguments: None, mpi=False)


@pytest.mark.parametrize("name", names())
def test_each_exercise_has_two_to_six_wrong_answers(name):
    wrong = sum(exercise == name for exercise, _, _ in WRONG)
    # The three ways of lesson 03 share their hints.
    assert wrong >= (1 if name.startswith("03.by_s") else 2)
    assert find(name).hints
