"""The account is right: NumPy's own allocations, as tracemalloc sees them, agree within 2 % on a whole step."""

import tracemalloc

import numpy as np
import pytest

from minidist.base.memory import account_memory
from minidist.base.random import batch_coordinates
from minidist.nn import GPT, GPTConfig
from minidist.nn.flat import FlatParameters
from minidist.optim import AdamW


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
