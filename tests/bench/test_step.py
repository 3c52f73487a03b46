"""The step benchmark: what it refuses, what it answers, and that our side of it is fast enough to keep its promises."""

import json

import numpy as np
import pytest

from minidist.base.device import cuda
from minidist.core.base.errors import MinidistError, UsageError
from minidist.core.nn import GPTConfig
from minidist.course.lesson.mpi_leg import mpiexec
from minidist.report.bench import workloads
from minidist.report.bench.step import bench_memory, bench_step, compare_accounts, compare_case, tape_microseconds
from minidist.report.bench.workloads import StepCase, make_model, own_step
from tests.cupy.stand_in import Device, DeviceArray

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
    on, timeline = compare_accounts(SMALL, rounds=3)
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
    from minidist.report.bench import step as module

    honest = module.own_step

    def add_one(step):
        return lambda: step() + 1

    monkeypatch.setattr(module, "own_step", lambda *given: add_one(honest(*given)))
    with pytest.raises(MinidistError, match="bench step small: the loss of step 0"):
        compare_case(SMALL, rounds=2)


def test_a_tensor_parallel_step_is_compared_on_ranks_that_share_the_heads():
    from minidist.report.bench.tensor_parallel import bench_tensor_parallel

    with pytest.raises(UsageError, match=r"bench step --tp 3: the blocks have 8 heads; take one of 2, 4, 8"):
        bench_tensor_parallel(3)
    with pytest.raises(UsageError, match=r"--against 'troch' .did you mean 'torch'"):
        bench_tensor_parallel(2, against="troch")


@pytest.mark.exhaustive
@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec: pip install 'minidist[mpi]'")
def test_a_tensor_parallel_step_runs_under_mpiexec_without_torch():
    from minidist.report.bench.tensor_parallel import bench_tensor_parallel

    (row,) = bench_tensor_parallel(2, rounds=1, against=None)["rows"]
    assert row["ratio"] is None  # without the other side
    assert row["median_s"] > 0
    assert row["target"] == 0.65


def test_a_step_on_a_device(monkeypatch, minidist):
    # The arrays have CuPy's interface and NumPy's values, so the losses are those of the host.
    host = compare_case(SMALL, rounds=2, against=None)
    there = compare_case(SMALL, rounds=2, device=Device(), against=None)
    assert np.allclose(there["losses"], host["losses"], rtol=1e-5)
    assert there["ratio"] is None
    assert (host["target"], there["target"]) == (1.0, 1.3)
    assert host["products_s"] > 0
    assert "products_s" not in there
    assert all(isinstance(p.data, DeviceArray) for p in own_parameters(Device()))

    monkeypatch.setattr("minidist.base.device.cuda", Device)
    monkeypatch.setitem(workloads.GPU_CASES, "gpt2", SMALL)
    monkeypatch.setattr("minidist.report.bench.step.tape_microseconds", dict)
    result = json.loads(
        minidist("bench", "step", "--device", "cuda", "--against", "none", "--rounds", "6", "--json").out
    )
    assert [row["name"] for row in result["rows"]] == ["small"]
    assert {"gpu", "cupy"} <= set(result["environment"])


def own_parameters(device):
    model = make_model(SMALL)
    own_step(SMALL, model, device)
    return list(model.parameters())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device", "tpu"], "--device 'tpu'; it must be cpu or cuda"),
        (["--device", "cuda", "--ranks", "2"], "bench step --device cuda measures one rank"),
        (["gpt2"], "no case 'gpt2'"),
    ],
)
def test_what_a_device_cannot_do_is_one_sentence(flags, sentence, minidist):
    assert sentence in minidist("bench", "step", *flags, code=2).err


def test_without_a_gpu_there_is_no_benchmark_of_one(minidist):
    try:
        cuda()
        pytest.skip("this machine has a GPU")
    except UsageError as error:
        expected = str(error)
    assert expected in minidist("bench", "step", "--device", "cuda", code=2).err


@pytest.mark.cuda
@pytest.mark.peers
def test_a_step_beside_pytorch_on_a_gpu():
    pytest.importorskip("torch")
    try:
        device = cuda()
    except UsageError as error:
        pytest.skip(str(error))
    assert compare_case(SMALL, rounds=2, device=device)["ratio"] > 0
