"""Wrong numbers are described by how they differ from the right ones, where an exercise has no hint for them."""

import numpy as np

from minidist.course.lesson.answer_patterns import pattern_of, places_of
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.exercise import Case, Failure, difference
from minidist.course.lesson.solutions import solution
from tests.lesson.judged_here import judged


def said(answers, expected):
    failure = Failure("wrong", "", Case(len(expected), 1), answers=answers, expected=expected)
    return pattern_of(failure) or places_of(failure)


def test_each_pattern_is_said():
    one, other, third = np.array([1.0, 2.0, 5.0]), np.array([3.0, 7.0, 4.0]), np.array([0.0, 1.0, 9.0])
    right = [one, other, third]
    cases = [
        ([3 * a for a in right], right, "n times the expected one: a sum"),
        ([a / 3 for a in right], right, "1/n times the expected one: a mean"),
        ([2 * a for a in right], right, "2 times the expected one: something is added twice"),
        ([0.5 * a for a in right], right, "1/2 times"),
        ([-a for a in right], right, "-1 times the expected one: a sign"),
        (right[::-1], right, "in the reverse order: is it rank or n - 1 - rank?"),
        ([other, third, one], right, "every rank has the answer of the next rank"),
        ([third, one, other], right, "every rank has the answer of the previous rank"),
        ([a[::-1] for a in right], right, "the right numbers in the reverse order"),
        ([one, other, one], right, "right on the other ranks, wrong on rank 2"),
        ([np.ones((2, 3)) * [[1, 2, 3], [4, 5, 6]]], [np.array([[1.0, 4], [2, 5], [3, 6]])], "transposed"),
        ([[1.0, 2.0, 0.0, 4.0]], [np.array([1.0, 2.0, 3.0, 4.0])], "right but for 1 of 4 entries: those at 2"),
        ([(one, 2 * other)], [(one, other)], "result 1: every number is 2 times"),
        ([0.2 * a for a in right], right, "every number is 0.2 times the expected one"),
        ([1e-310 * a for a in right], right, "nothing was received into the array"),
        ([1e30 * a for a in right], right, "nothing was received into the array"),
        ([(other, one)], [(one, other)], "the results are right and exchanged"),
        ([(one, one)], [(one, other)], "the second result is the first one once more"),
        ([one], [(one, other)], "2 values are asked for"),
        ([a[:2] for a in right], right, "another shape than it should"),
        ([one + 0.25, other, third - 1.0], right, "wrong on ranks 0, 2"),
    ]
    for answers, expected, wanted in cases:
        assert wanted in said(answers, expected), (wanted, said(answers, expected))


def test_what_is_no_pattern_is_not_said():
    right = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    for answers in ([np.array([9.0, 1.0]), np.array([8.0, 8.0])], ["a", "b"], [None, None], []):
        assert said(answers, right) == "", answers
    assert said([np.array([7.0, 10.5])], [np.array([2.0, 3.0])]) == "", "two numbers are multiples by chance"
    zeros = [np.zeros(2)] * 2
    assert "times" not in said([np.ones(2)] * 2, zeros)


def changed(f, results, common, weights, momentum):
    """Return the right results of an exercise with f(first result, ...) in place of the first."""
    return f(results[0], common, weights, momentum), results[1]


def test_an_argument_that_came_back_or_is_missing_is_named():
    exercise, case = find("06e.outer_step"), Case(3, 8)
    expected = exercise.expected(case)
    for f, text in (
        (lambda right, common, own, momentum: own, "result 0: this is the second argument after comm as it came in"),
        (lambda right, common, own, momentum: common, "result 0: this is the first argument after comm as it came in"),
        (lambda right, common, own, momentum: right - momentum / 2, "the right numbers minus 0.5 times the third"),
        (lambda right, common, own, momentum: right + momentum, "the right numbers plus the third argument"),
    ):
        answers = [changed(f, expected[rank], *exercise.arguments(case, rank)[:3]) for rank in range(3)]
        failure = Failure("wrong", "", case, answers=answers, expected=expected)
        assert text in pattern_of(failure, exercise), text


def test_a_larger_case_says_what_one_number_cannot():
    def with_momentum(comm, common, own, momentum, lr, mu):
        results = solution("06e.outer_step")(comm, common, own, momentum, lr, mu)
        return changed(lambda right, *given: right + momentum, results, common, own, momentum)

    verdict = judged("06e.outer_step", with_momentum)
    assert verdict.failure.case.size == 1
    assert verdict.hint.startswith("on 4 ranks, 8 elements: result 0: the right numbers plus the third argument")


def test_a_long_array_names_the_first_entry_that_differs():
    right = np.zeros((4, 6))
    wrong = right.copy()
    wrong[2, 3] = 7
    text = difference(wrong, right, 1e-9)
    assert text.endswith("; 1 of 24 differ, first [2, 3]: 7 for 0")
    assert difference([1.0, 2.0], np.array([1.0, 3.0]), 1e-9) == "got [1., 2.], expected [1., 3.]"
    assert difference(right, right, 1e-9) == ""
