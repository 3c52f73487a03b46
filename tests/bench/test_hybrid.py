"""The benchmark of a hybrid step's overhead: what it measures, what it refuses."""

import time

import pytest

from minidist.core.base.errors import UsageError
from minidist.report.bench.hybrid import ProcessTimer, bench_hybrid
from tests.mpi_runner import mpiexec


def test_time_inside_messages_is_counted_once():
    timer = ProcessTimer()

    def busy(inner=None):
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return inner and timer(inner)

    began = time.process_time()
    timer(busy, busy)
    assert 0.04 <= timer.seconds <= time.process_time() - began
    assert not timer.inside


@pytest.mark.exhaustive
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec here")
def test_a_small_layout():
    step, arithmetic = bench_hybrid(rounds=1, dp=1, tp=2, pp=1)["rows"]
    assert step["name"].startswith("dp 1 x tp 2 x pp 1")
    assert 0 < step["ratio"] < arithmetic["ratio"] < 1
    assert step["ratio"] * step["median_s"] == pytest.approx(arithmetic["ratio"] * arithmetic["median_s"])


def test_wrong_input():
    with pytest.raises(UsageError, match="--rounds 0"):
        bench_hybrid(rounds=0)
    with pytest.raises(UsageError, match=r"--heads 8 .*--tp 3"):
        bench_hybrid(tp=3)
