"""A run in the form of PyTorch's profiler: what HolisticTraceAnalysis asks of it, and that package itself."""

import json
from itertools import pairwise

import pytest

from minidist.base.trace_file import read_traces
from minidist.comm import SimWorld
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.report.from_file import export_trace
from minidist.report.kineto import write_kineto

JOB = {"model": "gpt", "layers": 2, "width": 64, "heads": 2, "context": 16, "steps": 3, "microbatches": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("kineto") / "run.jsonl"
    run_training(TrainConfig.make(**JOB, pp=2, dp=2), None, 60.0, path)
    return path


def test_each_rank_has_its_steps_its_kernels_and_its_number(run, tmp_path):
    traces, _ = read_traces(run)
    folder = export_trace(run, "hta", tmp_path)
    for trace in traces:
        page = json.loads((folder / f"run-rank-{trace.rank}.json").read_text())
        assert (page["distributedInfo"]["rank"], page["distributedInfo"]["world_size"]) == (trace.rank, 4)
        events = page["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]

        # Every kernel was launched once, and streams do one thing at a time.
        kernels = [event for event in events if event.get("cat") == "kernel"]
        launches = [event["args"]["correlation"] for event in events if event.get("cat") == "cuda_runtime"]
        assert sorted(launches) == sorted(kernel["args"]["correlation"] for kernel in kernels)
        for stream in {kernel["tid"] for kernel in kernels} - {9, 10}:
            spans = sorted(
                (kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels if kernel["tid"] == stream
            )
            overlaps = [pair for pair in pairwise(spans) if pair[0][1] > pair[1][0] + 1e-6]
            assert not overlaps, stream

        # All computing, and all messages that are not of a collective, are there.
        computed = sum(kernel["dur"] for kernel in kernels if kernel["tid"] == 7)
        assert computed == pytest.approx(1e6 * sum(s.end - s.start for s in trace.spans if s.category == "compute"))
        sent = sum(kernel["args"]["bytes"] for kernel in kernels if kernel["tid"] == 9)
        assert sent == sum(message.nbytes for message in trace.sent() if message.operation in ("message", "tied"))
        assert any(kernel["name"].startswith("ncclDevKernel_AllReduce") for kernel in kernels)


def test_a_run_without_steps_is_refused(tmp_path):
    world = SimWorld(2)
    world.run(lambda comm: comm.barrier())
    with pytest.raises(UsageError, match="no steps"):
        write_kineto(tmp_path, "a", world.traces)


@pytest.mark.peers
def test_holistic_trace_analysis_reads_the_folder(run, tmp_path):
    """Its share of computing is that of the trace. The package leaves the last step out."""
    hta = pytest.importorskip("hta.trace_analysis")
    traces, _ = read_traces(run)
    folder = export_trace(run, "hta", tmp_path)
    analysis = hta.TraceAnalysis(trace_dir=str(folder))
    table = analysis.get_temporal_breakdown(visualize=False)
    assert sorted(table["rank"]) == [0, 1, 2, 3]
    for trace in traces:
        last = max(span.start for span in trace.spans if span.category == "step")
        computed = sum(s.end - s.start for s in trace.spans if s.category == "compute" and s.start < last)
        found = float(table[table["rank"] == trace.rank]["compute_time(us)"].iloc[0])
        assert found == pytest.approx(1e6 * computed, rel=0.05)
