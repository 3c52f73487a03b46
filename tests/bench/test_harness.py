"""The harness of the benchmarks: sides in turn, ratios round by round, and no ratio for a wrong step."""

import pytest

from minidist.core.base.errors import MinidistError, UsageError
from minidist.report.bench.harness import interleave, median_ratio, ratio_and_goal, run_ranks, warm_up


def test_every_other_round_goes_backwards():
    order = []

    def seconds(name):
        order.append(name)
        return float(len(order))

    times = interleave(["a", "b"], 3, seconds)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_ratio_is_the_median_over_rounds():
    assert median_ratio([1.0, 9.0, 4.0], [2.0, 3.0, 4.0]) == 1.0
    assert median_ratio([1.0], None) is None


def test_losses_are_compared_before_anything_is_timed():
    sides = {"ours": lambda: 1.0, "alone": lambda: 5.0, "theirs": lambda: 1.0001}
    assert warm_up(sides, "x", ["theirs"]) == [(1.0, 5.0, 1.0001)] * 3
    for wrong in (5.0, float("nan")):
        with pytest.raises(MinidistError, match=rf"x: the loss of step 0 is 1.0 \(ours\) and {wrong} \(theirs\)"):
            warm_up({"ours": lambda: 1.0, "theirs": lambda wrong=wrong: wrong}, "x")


def test_a_ratio_is_shown_with_the_goal_that_it_is_held_to():
    assert ratio_and_goal({"ratio": 1.126, "target": 1.0}) == "ratio  1.13 (goal 1.00, not met)"
    assert ratio_and_goal({"ratio": 0.8, "target": 0.8}) == "ratio  0.80 (goal 0.80, met)"
    assert ratio_and_goal({"ratio": None, "target": 0.8}) == "ratio     - (goal 0.80)"
    assert ratio_and_goal({"ratio": 1.126}) == "ratio  1.13"


def test_a_benchmark_that_starts_its_ranks_is_not_started_by_mpiexec(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(UsageError, match="starts its 4 ranks itself; run it without mpiexec"):
        run_ranks(warm_up, 4)
