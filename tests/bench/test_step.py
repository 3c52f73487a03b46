"""The step benchmark: what it refuses, what it answers, and that our side of it is fast enough to keep its promises."""

import pytest

from minidist.base.errors import MinidistError, UsageError
from minidist.bench.step import bench_step, compare_case, tape_microseconds
from minidist.bench.workloads import StepCase, make_model, own_step
from minidist.lesson.mpi_leg import mpiexec
from minidist.nn import GPTConfig

SMALL = StepCase("small", 2, 1.0, config=GPTConfig(16, 8, 16, 1, 2), length=8, steps=2)


def test_own_step_learns_its_batch():
    for case in (SMALL, StepCase("mlp", 8, 1.0, sizes=(4, 64, 3))):
        step = own_step(case, make_model(case))
        losses = [step() for _ in range(60)]
        assert losses[-1] < 0.9 * losses[0]


def test_the_cost_of_the_tape_is_measured():
    # The promise, 2 microseconds, is for an idle core: `minidist bench step`.
    times = tape_microseconds(count=500, repeats=5)
    assert 0 < times["forward_us"] <= times["forward_backward_us"]


def test_the_cost_of_the_account_is_measured_on_equal_jobs():
    from minidist.bench.memory import bench_memory, compare

    on, timeline = compare(SMALL, rounds=3)
    assert on["ratio"] > 0 < timeline["ratio"]  # the promise, 1.05, is for a quiet machine: `minidist bench memory`
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
    from minidist.bench import step as module

    honest = module.own_step

    def add_one(step):
        return lambda: step() + 1

    monkeypatch.setattr(module, "own_step", lambda case, model: add_one(honest(case, model)))
    with pytest.raises(MinidistError, match="bench step small: the loss of step 0"):
        compare_case(SMALL, rounds=2)


def test_a_tensor_parallel_step_is_compared_on_ranks_that_share_the_heads():
    from minidist.bench.tensor_parallel import bench_tensor_parallel

    with pytest.raises(UsageError, match=r"bench step --tp 3: the blocks have 8 heads; take one of 2, 4, 8"):
        bench_tensor_parallel(3)
    with pytest.raises(UsageError, match=r"--against 'troch' .did you mean 'torch'"):
        bench_tensor_parallel(2, against="troch")


@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
def test_a_tensor_parallel_step_runs_under_mpiexec_without_torch():
    from minidist.bench.tensor_parallel import bench_tensor_parallel

    (row,) = bench_tensor_parallel(2, rounds=1, against=None)["rows"]
    assert row["ratio"] is None  # without the other side
    assert row["median_s"] > 0
    assert row["target"] == 0.65
