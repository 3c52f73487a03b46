"""The step benchmark: what it refuses, what it answers, and that our side of it is fast enough to keep its promises."""

import pytest

from minidist.base.errors import MinidistError, UsageError
from minidist.nn import GPTConfig
from minidist.train.bench_step import StepCase, bench_step, compare_case, make_model, own_step, tape_microseconds

SMALL = StepCase("small", 2, 1.0, config=GPTConfig(16, 8, 16, 1, 2), length=8, steps=2)


def test_own_step_learns_its_batch():
    for case in (SMALL, StepCase("mlp", 8, 1.0, sizes=(4, 64, 3))):
        step = own_step(case, make_model(case))
        losses = [step() for _ in range(60)]
        assert losses[-1] < 0.9 * losses[0]


def test_the_tape_costs_little():
    # The promise is 2 microseconds on an idle core; the bound here leaves room for a busy one.
    assert tape_microseconds(count=500, repeats=5)["forward_backward_us"] < 12


def test_the_account_s_cost_is_measured_on_equal_jobs():
    from minidist.train.bench_memory import bench_memory, compare

    on, timeline = compare(SMALL, rounds=3)
    # The promise is 1.05 on a quiet machine and a model of a few milliseconds a step; this one takes less than one.
    assert 0.8 < on["ratio"] < 1.6
    assert 0.8 < timeline["ratio"] < 1.8
    with pytest.raises(UsageError, match="did you mean 'gpt'"):
        bench_memory(["gtp"])


def test_wrong_arguments():
    with pytest.raises(UsageError, match=r"no case 'gtp' \(did you mean 'gpt'\?\)"):
        bench_step(["gtp"])
    with pytest.raises(UsageError, match="at least 6"):
        bench_step(rounds=3)


@pytest.mark.peers
def test_comparison_reports_a_ratio_only_for_equal_losses(monkeypatch):
    pytest.importorskip("torch")
    result = compare_case(SMALL, rounds=2)
    assert result["ratio"] > 0
    assert result["median_s"] > 0
    from minidist.train import bench_step as module

    honest = module.own_step

    def add_one(step):
        return lambda: step() + 1

    monkeypatch.setattr(module, "own_step", lambda case, model: add_one(honest(case, model)))
    with pytest.raises(MinidistError, match="bench step small: the loss of step 0"):
        compare_case(SMALL, rounds=2)
