"""The library in 200 lines: ZeRO 3, 1F1B and weight stashing equal one device bit for bit, in both worlds.

If one of these fails, the design is wrong, not a detail.
"""

import hashlib

import numpy as np
import pytest

from minidist.base.traces import signature
from minidist.comm import SimWorld
from minidist.core.collectives import reduce_scatter
from minidist.core.comm import LinkModel
from minidist.core.nn.flat import FlatParameters
from mpi_examples.library_in_200_lines import (
    LAYERS,
    LEARNING_RATE,
    build_layers,
    contributions,
    in_order,
    one_f_one_b,
    weight_stashing,
    zero3,
)
from tests.cases import each

SENDS = [0, 1 << 20]  # synchronous, buffered


@each("ranks", [1, 2, 3, 4, 5, 8])
@each("eager_bytes", SENDS)
def test_zero3_adds_each_micro_batch_over_replicas_and_then_the_sums(ranks, eager_bytes):
    k = 2
    parts = contributions(range(ranks * k))
    results = SimWorld(ranks, eager_bytes=eager_bytes).run(zero3, k)
    for i in range(LAYERS):
        expected = in_order([in_order([parts[i, r * k + b] for r in range(ranks)]) for b in range(k)])
        actual = np.concatenate([result[i] for result in results])
        assert np.array_equal(actual[: expected.size], expected)
        assert not actual[expected.size :].any()  # padding


def test_zero3_sends_three_times_the_parameters():
    ranks, k = 3, 2
    world = SimWorld(ranks)
    world.run(zero3, k)
    unit = 30 * 4  # padded bytes of a layer: 30 elements divide by 3
    for trace in world.traces:
        by_purpose = trace.bytes_by_purpose()
        assert by_purpose["parameter_gather"] == 2 * k * LAYERS * unit * (ranks - 1) // ranks
        assert by_purpose["gradient_reduce"] == k * LAYERS * unit * (ranks - 1) // ranks


@each("m", [1, 2, 3, 5, 7])
@each("eager_bytes", SENDS)
def test_1f1b_adds_micro_batches_in_plan_order(m, eager_bytes):
    parts = contributions(range(m))
    results = SimWorld(LAYERS, eager_bytes=eager_bytes).run(one_f_one_b, m)
    for stage, result in enumerate(results):
        assert np.array_equal(result, in_order([parts[stage, i] for i in range(m)]))


@pytest.mark.parametrize("m", [3, 5, 8])
def test_1f1b_takes_the_closed_form_time(m):
    forward, backward = 0.25, 0.5  # binary fractions, so that sums are exact
    world = SimWorld(LAYERS, eager_bytes=1 << 20, links=LinkModel(alpha=0.0, beta=0.0))
    world.run(one_f_one_b, m, forward, backward)
    assert world.end_time == (m + LAYERS - 1) * (forward + backward)


@pytest.mark.parametrize("eager_bytes", SENDS)
def test_weight_stashing_follows_its_update_law(eager_bytes):
    """W(t+1) = W(t) - lr grad f(w_0^(t-p+1), ..., w_{p-1}^(t)): stage s uses version max(0, t - (p-1-s))."""
    m, p = 6, LAYERS
    results = SimWorld(p, eager_bytes=eager_bytes).run(weight_stashing, m)
    history = [[FlatParameters(layer.parameters()).data.copy()] for layer in build_layers()]
    for t in range(m):
        seen = [history[s][max(0, t - (p - 1 - s))] for s in range(p)]
        parts = contributions([t], {t: seen})
        for s in range(p):
            history[s].append(history[s][-1] - LEARNING_RATE * parts[s, t])
    for s, (actual, used) in enumerate(results):
        assert used == [max(0, t - (p - 1 - s)) for t in range(m)]
        assert all(np.array_equal(a, b) for a, b in zip(actual, history[s], strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_ordered_reduce_scatter_in_a_lane_takes_the_closed_form_time_beside_the_main_program(ranks):
    alpha, beta, seconds, size = 2.0**-10, 2.0**-20, 2.0**-8, 64 * ranks

    def program(comm):
        work = reduce_scatter(comm, np.arange(size, dtype=np.float64) + comm.rank, algorithm="ordered", async_op=True)
        comm.compute(seconds=seconds)
        before = comm.time()
        work.wait()
        return before, comm.time()

    world = SimWorld(ranks, links=LinkModel(alpha=alpha, beta=beta))
    closed_form = alpha + (ranks - 1) * beta * 64 * 8 if ranks > 1 else 0.0
    for before, after in world.run(program):
        assert before == seconds
        assert after == max(seconds, closed_form)


def _fingerprint(value):
    flat = [np.asarray(v).tobytes() for v in value] if isinstance(value, list) else [np.asarray(value).tobytes()]
    return hashlib.sha256(b"".join(flat)).hexdigest()


@pytest.mark.mpi(3)
@pytest.mark.parametrize("client", [zero3, one_f_one_b, weight_stashing])
def test_mpi_gives_the_same_bits_and_the_same_sequences_as_the_simulation(comm, client):
    world = SimWorld(comm.size)
    simulated = world.run(client)[comm.rank]
    start = len(comm.trace.messages)
    real = client(comm)
    if client is weight_stashing:
        assert simulated[1] == real[1]
        simulated, real = simulated[0], real[0]
    assert _fingerprint(simulated) == _fingerprint(real)
    expected: dict = {}
    for message in world.traces[comm.rank].messages:
        expected.setdefault(message.lane, []).append(signature(message)[:-1])
    actual: dict = {}
    for message in comm.trace.messages[start:]:
        actual.setdefault(message.lane, []).append(signature(message)[:-1])
    assert {k.split(":")[0]: v for k, v in expected.items()} == {k.split(":")[0]: v for k, v in actual.items()}
