"""The sparsity schedule is equation 1 of Zhu and Gupta, and a pattern keeps the largest of each group."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.techniques.pruning.schedule import (
    SparsitySchedule,
    parse_pattern,
    parse_schedule,
    pattern_mask,
    pattern_sparsity,
)
from tests.cases import each


@given(st.integers(1, 50), st.integers(1, 12), st.integers(1, 9), st.sampled_from([0.5, 0.8, 0.9, 0.96875]))
def test_the_schedule_is_equation_1(begin, updates, every, final):
    """s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 for t in {t_0, t_0 + dt, ..., t_0 + n dt}, with s_i = 0."""
    schedule = SparsitySchedule(final, begin, begin + updates * every, every)
    paper = [
        Fraction(final) + (0 - Fraction(final)) * (1 - Fraction(k * every, updates * every)) ** 3
        for k in range(updates + 1)
    ]
    assert [schedule.at(begin + k * every) for k in range(updates + 1)] == pytest.approx([float(s) for s in paper])
    assert [t for t in range(begin + updates * every + 20) if schedule.is_due(t)] == [
        begin + k * every for k in range(updates + 1)
    ]
    assert schedule.at(begin - 1) == 0
    assert schedule.at(10**6) == schedule.at(schedule.end) == final
    # Between two updates it stays, and it never falls.
    every_step = [schedule.at(t) for t in range(schedule.end + 2)]
    assert every_step == sorted(every_step)
    assert schedule.at(begin + every - 1) == schedule.at(begin) == 0


def test_all_at_once():
    schedule = SparsitySchedule(0.75, 3, 3)
    assert [schedule.at(t) for t in range(5)] == [0, 0, 0, 0.75, 0.75]
    assert [schedule.pruned(10, t) for t in (2, 3)] == [0, 8]  # 7.5 is rounded to even


def test_texts():
    assert parse_schedule("10,50,5", 0.8) == SparsitySchedule(0.8, 10, 50, 5)
    assert parse_schedule("10,50", 0.8) == SparsitySchedule(0.8, 10, 50, 1)
    assert parse_schedule("10", 0.8) == SparsitySchedule(0.8, 10, 10, 1)
    assert parse_pattern("2:4") == (2, 4)
    assert pattern_sparsity(2, 4) == 0.5
    assert pattern_sparsity(1, 3) == pytest.approx(2 / 3)


@each("text", ["", "a,b", "1,2,3,4", "1,", "-1,3", "1.5", "1,9" * 99])
def test_wrong_texts_of_a_schedule_are_a_sentence(text):
    with pytest.raises(UsageError, match="it must be BEGIN,END or BEGIN,END,EVERY in steps, such as 10,50,5"):
        parse_schedule(text, 0.5)


@each("text", ["", "2", "4:2", "0:4", "2:2", "2:4:8", "a:b"])
def test_wrong_patterns_are_a_sentence(text):
    with pytest.raises(UsageError, match="it must be N:M, N kept of every M weights, such as 2:4"):
        parse_pattern(text)


@pytest.mark.parametrize("numbers", [(0.5, 0, 3), (0.5, 4, 3), (0.5, 1, 4, 2), (0.5, 1, 4, 0)])
def test_wrong_steps_are_a_sentence(numbers):
    with pytest.raises(UsageError, match="begin at step 1 or later"):
        SparsitySchedule(*numbers)
    with pytest.raises(UsageError, match="from 0 to below 1"):
        SparsitySchedule(1.0, 1, 2)


@given(
    st.integers(1, 5), st.integers(1, 4), st.sampled_from([(2, 4), (1, 2), (3, 8)]), st.booleans(), st.integers(0, 9)
)
def test_a_pattern_keeps_the_largest_of_each_group(outputs, groups, pattern, in_out, seed):
    n, m = pattern
    weight = np.random.default_rng(seed).integers(-3, 4, (outputs, groups * m)).astype(np.float32)  # with equal ones
    mask = pattern_mask(weight.T.copy(), n, m, 0).T if in_out else pattern_mask(weight, n, m, 1)
    assert mask.shape == weight.shape
    for row, kept in zip(weight, mask, strict=True):
        for start in range(0, groups * m, m):
            by_size = sorted(range(start, start + m), key=lambda i: (-abs(row[i]), i))
            assert sorted(np.flatnonzero(kept[start : start + m]) + start) == sorted(by_size[:n])


def test_a_length_that_does_not_divide_is_a_sentence():
    with pytest.raises(UsageError, match=r"shape \(3, 6\) has 6 inputs, .* groups of 4 for the pattern 2:4; use a mul"):
        pattern_mask(np.ones((3, 6)), 2, 4, 1)
