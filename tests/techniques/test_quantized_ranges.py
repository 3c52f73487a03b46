"""Quantised training on several ranks: one range and one grid for all rows, the bits of one device, and its bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.nn import MLP, FlatParameters
from minidist.optim import SGD
from minidist.optim.adam import Adam
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.zero import ZeroOptimizer
from minidist.techniques.quantization.layers import OBSERVERS, MinMaxObserver, convert, observers_of, prepare_qat
from minidist.techniques.quantization.ranges import ranges_volume, update_ranges
from tests.cases import each

ROWS, STEPS = 11, 4
INPUTS = np.random.default_rng(0).standard_normal((STEPS, ROWS, 5))
TARGETS = np.random.default_rng(1).integers(0, 3, (STEPS, ROWS))


def parts(ranks):
    """The rows of each rank; some have fewer than others."""
    return np.array_split(np.arange(ROWS), ranks)


def on_one_device(ranks, observer, per_channel, optimizer):
    """(weights, ranges) after all steps of the micro-batches that `ranks` ranks would compute."""
    model = prepare_qat(MLP([5, 8, 3], dtype=np.float64), observer, per_channel)
    flat = FlatParameters(model.parameters())
    optimizer = optimizer(flat, lr=0.1)
    for x, targets in zip(INPUTS, TARGETS, strict=True):
        flat.zero_grad()
        for rows in parts(ranks):
            cross_entropy(model(Tensor(x[rows])), targets[rows], divisor=ROWS).backward()
        optimizer.step()
        update_ranges(observers_of(model))
    return flat.data, {name: seen.range for name, seen in observers_of(model).items()}


def on_ranks(comm, stage, observer, per_channel, optimizer):
    model = prepare_qat(MLP([5, 8, 3], dtype=np.float64), observer, per_channel)
    observers, call = observers_of(model), model
    if stage:
        zero = ZeroOptimizer(model, optimizer, comm=comm, stage=stage, reduction="sum", algorithm="ordered", lr=0.1)
        flat, step = zero.flat, zero.step
    else:
        call = DistributedDataParallel(model, comm, reduction="sum", algorithm="ordered")
        flat = call.flat
        step = optimizer(flat, lr=0.1).step
    rows = parts(comm.size)[comm.rank]
    for x, targets in zip(INPUTS, TARGETS, strict=True):
        flat.zero_grad()
        cross_entropy(call(Tensor(x[rows])), targets[rows], divisor=ROWS).backward()
        step()
        update_ranges(observers, comm)
    ranges = {name: seen.range for name, seen in observers.items()}
    return flat.data[: flat.numel].copy(), ranges, convert(model)(Tensor(INPUTS[0])).data


@each("observer", OBSERVERS, sampled=6)
@each("per_channel", [True, False])
@each(("stage", "optimizer"), [(0, SGD), (0, Adam), (1, Adam), (2, SGD)])
@each("ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_has_the_bits_of_one_device(ranks, stage, optimizer, per_channel, observer):
    weights, ranges = on_one_device(ranks, observer, per_channel, optimizer)
    results = SimWorld(ranks).run(on_ranks, stage, observer, per_channel, optimizer)
    for mine, mine_ranges, outputs in results:
        assert np.array_equal(mine, weights)
        assert mine_ranges == ranges
        assert np.array_equal(outputs, results[0][2])  # of the INT8 model


def test_without_an_agreement_every_rank_has_another_grid():
    def main(comm):
        model = prepare_qat(MLP([5, 8, 3], dtype=np.float64))
        model(Tensor(INPUTS[0][parts(comm.size)[comm.rank]]))
        update_ranges(observers_of(model))  # on this rank alone
        return model.layers[0].observer.range

    assert len(set(SimWorld(3).run(main))) == 3


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 9), st.sampled_from([np.float32, np.float64]))
def test_the_range_is_that_of_all_values_and_the_bytes_are_the_closed_form(ranks, layers, seed, dtype):
    values = np.random.default_rng(seed).standard_normal((ranks, layers, 3)).astype(dtype) + dtype(seed - 4)
    world = SimWorld(ranks)

    def main(comm):
        observers = {str(i): MinMaxObserver(dtype) for i in range(layers)}
        for observer, x in zip(observers.values(), values[comm.rank], strict=True):
            observer.observe(x)
        update_ranges(observers, comm)
        return [observer.range for observer in observers.values()]

    for ranges in world.run(main):
        assert ranges == [(x.min(), x.max()) for x in values.swapaxes(0, 1)]
    sent = [trace.bytes_by_purpose() for trace in world.traces]
    assert sum(row.get("quantization_range", 0) for row in sent) == ranges_volume(layers, ranks) * dtype().itemsize
    if ranks in (2, 4):  # log2 n messages of two numbers per layer
        assert sent[0] == {"quantization_range": 2 * layers * dtype().itemsize * (ranks // 2)}


def test_a_layer_that_some_ranks_do_not_run_has_the_range_of_those_that_do():
    def main(comm):
        observers = {name: MinMaxObserver(np.float64) for name in ("here", "nowhere")}
        if comm.rank == 1:
            observers["here"].observe(np.array([2.0, 3.0]))
        update_ranges(observers, comm)
        update_ranges(observers, comm)  # a step in which no rank saw anything
        return [observer.range for observer in observers.values()]

    assert SimWorld(3).run(main) == [[(2, 3), None]] * 3
