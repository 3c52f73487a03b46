"""What is said about a measurement: the processor, both BLAS, and what other processes did meanwhile."""

import json

import pytest

from minidist.report.bench import environment as module
from minidist.report.bench import step
from minidist.report.bench.environment import Others, environment, other_processes, processor


def test_the_processor_has_its_name_and_its_vectors(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU 9\nflags\t\t: sse avx2 avx512f\n")
    assert processor(tmp_path / "cpuinfo") == "Fast CPU 9, AVX-512"
    (tmp_path / "cpuinfo").write_text("model name\t: Fast CPU 8\nflags\t\t: sse avx2\n")
    assert processor(tmp_path / "cpuinfo") == "Fast CPU 8, AVX2"
    assert processor(tmp_path / "absent")  # other systems have a name, too

    assert environment(False)["processor"] == processor()
    assert environment(False)["numpy_blas"]


def test_what_other_processes_did_is_what_all_did_without_ours(tmp_path, monkeypatch):
    times = type(
        "Times", (), {"user": 1.0, "system": 0.5, "children_user": 2.0, "children_system": 0.5, "elapsed": 10.0}
    )
    monkeypatch.setattr(module.os, "times", lambda: times)
    monkeypatch.setattr(module.os, "sysconf", lambda name: 100)
    stat = tmp_path / "stat"

    # In ten seconds all processors together were busy for 13 s: 6 s with us and our children, 7 s with others.
    stat.write_text("cpu  100 0 100 5000 70 0 0 0 0 0\ncpu0 1 2 3\n")
    with other_processes(stat) as others:
        stat.write_text("cpu  1000 50 300 5700 99 20 20 110 0 0\ncpu0 1 2 3\n")
        times.user, times.children_user, times.elapsed = 3.0, 6.0, 20.0
    assert others.cores == pytest.approx(0.7)
    assert "other processes kept 0.70 of its" in others.sentence()

    quiet = Others()
    assert quiet.sentence() is None  # not known
    quiet.cores = 0.01
    assert quiet.sentence() is None
    with other_processes(tmp_path / "absent") as unknown:
        pass
    assert unknown.cores is None


def test_a_benchmark_on_a_busy_machine_is_warned_of(monkeypatch, minidist):
    monkeypatch.setattr(module.Others, "cores", 1.5)
    monkeypatch.setattr(module, "_processor_seconds", lambda stat: None)
    monkeypatch.setattr(step, "bench_step", lambda *arguments: {"environment": {}, "rows": []})
    printed = minidist("bench", "step", "--json")
    assert json.loads(printed.out)["environment"]["other_processes"] == 1.5
    assert "the machine is busy: other processes kept 1.50 of its" in printed.err
