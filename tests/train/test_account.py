"""The memory account agrees with NumPy's own allocations, as tracemalloc sees them, within 2 % on a whole step."""

import tracemalloc

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.core.nn import GPT, GPTConfig
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import AdamW
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train


def numpy_bytes():
    """Live bytes in NumPy's tracemalloc domain."""
    chosen = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([chosen]).traces)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_account_agrees_with_tracemalloc_on_a_whole_step(dtype, dropout):
    tokens = np.random.default_rng(0).integers(0, 256, (4, 129))
    tracemalloc.start()
    try:
        before = numpy_bytes()
        with account_memory() as account:
            model = GPT(GPTConfig(256, 128, 128, 2, 4, dropout), dtype=dtype)
            flat = FlatParameters(model.parameters())
            optimizer = AdamW(flat)
            for step in range(2):
                flat.zero_grad()
                account.peak = account.current
                tracemalloc.reset_peak()
                others = tracemalloc.get_traced_memory()[0] - numpy_bytes()  # Python's objects
                with batch_coordinates(step, 0):
                    loss = model(tokens[:, :-1], tokens[:, 1:], 512.0)
                assert account.current == pytest.approx(numpy_bytes() - before, rel=0.02)
                loss.backward()
                del loss
                optimizer.step()
                assert account.current == pytest.approx(numpy_bytes() - before, rel=0.02)
                assert account.peak == pytest.approx(tracemalloc.get_traced_memory()[1] - others, rel=0.02)
    finally:
        tracemalloc.stop()


def test_the_account_over_time_is_in_the_trace():
    """Of the first three steps and eight ranks; its highest point is the peak, and every event has its time."""
    config = TrainConfig.make(width=16, heads=2, context=8, data="markov", steps=4, zero=3)
    world = SimWorld(9)
    results = world.run(train, config, (), True)
    for result, trace in zip(results, world.traces, strict=True):
        if trace.rank >= 8:
            assert not trace.memory
            continue
        times = [time for time, _ in trace.memory]
        assert times == sorted(times)
        steps = [span for span in trace.spans if span.category == "step"]
        assert times[-1] <= steps[2].end
        assert max(sum(live.values()) for _, live in trace.memory) == result.peak_bytes
        for step in steps[:3]:  # a tooth a step: more activations in its middle than at its ends
            tooth = [live.get("activation", 0) for time, live in trace.memory if step.start <= time <= step.end]
            assert max(tooth) > 4 * max(tooth[0], tooth[-1])


def test_a_train_trace_draws_its_memory(tmp_path, minidist):
    trace = tmp_path / "t.jsonl"
    job = ["--width", "16", "--heads", "2", "--context", "8", "--steps", "2", "--dp", "2"]
    minidist("train", *job, "--trace", trace)
    minidist("report", trace, "--picture", "memory", "-o", tmp_path / "m.svg")
    text = (tmp_path / "m.svg").read_text()
    assert text.count('id="peak') == 2
