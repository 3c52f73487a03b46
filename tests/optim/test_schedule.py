"""Schedules are functions of the step: their ends, their middle, their monotony."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.base.errors import UsageError
from minidist.optim import DeepSpeedWarmup, Warmup, WarmupCosine, WarmupLinear
from tests.cases import each


def test_the_first_step_is_never_lost_and_the_warmup_ends_at_one():
    assert [Warmup(4)(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Warmup(0)(0) == 1.0


def test_cosine_at_its_ends_and_in_the_middle():
    schedule = WarmupCosine(warmup_steps=10, total_steps=110, final_factor=0.1)
    assert schedule(9) == 1.0
    assert schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.55)
    assert schedule(110) == pytest.approx(0.1)
    assert schedule(1000) == pytest.approx(0.1)


def test_a_line_at_its_ends_and_in_the_middle():
    schedule = WarmupLinear(warmup_steps=2, total_steps=12, final_factor=0.5)
    assert [schedule(step) for step in (0, 1, 2, 7, 12, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.5])


@pytest.mark.parametrize("kind", [WarmupCosine, WarmupLinear])
@given(warmup=st.integers(0, 50), more=st.integers(1, 50), final=st.floats(0, 1))
def test_up_then_down_and_between_the_ends(kind, warmup, more, final):
    schedule = kind(warmup, warmup + more, final)
    factors = [schedule(step) for step in range(warmup + more + 2)]
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors[:warmup])
    assert all(final <= factor <= 1 for factor in factors[warmup:])


def test_a_warmup_longer_than_the_run_is_named():
    with pytest.raises(UsageError, match="20 warm-up steps of 10"):
        WarmupCosine(20, 10)


@each(
    ("make", "words"),
    [
        (lambda: Warmup(-1), "warmup_steps=-1; it must be a whole number of at least 0"),
        (lambda: Warmup(True), "warmup_steps=True; it must be a whole number"),
        (lambda: WarmupCosine(1.5, 10), "warmup_steps=1.5; it must be a whole number"),
        (lambda: WarmupLinear(1, float("nan")), "total_steps=nan; it must be a whole number"),
        (lambda: WarmupLinear(1, 10, float("nan")), "final_factor=nan; it must be a finite number of at least 0"),
        (lambda: WarmupCosine(1, 10, -0.1), "final_factor=-0.1; it must be a finite number"),
        (lambda: DeepSpeedWarmup(10, "line"), "curve='line'; it must be 'log' or 'linear'"),
        (lambda: DeepSpeedWarmup(10, total_steps="100"), "total_steps='100'; it must be a whole number"),
    ],
)
def test_wrong_settings_of_a_schedule(make, words):
    with pytest.raises(UsageError, match=words):
        make()
