"""Offloading changes where bytes live and what crosses the link, and no bit of the result."""

import itertools
from functools import partial

import numpy as np
import pytest

from minidist.base.flop_counter import FlopCounter
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, no_grad
from minidist.core.autograd.backward import backward_hook
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.nn import checkpoint
from minidist.optim import ParameterSlice
from minidist.optim.adam import Adam
from minidist.parallel import HostPool
from minidist.techniques.offload.activations import HostCopy, SavedOnHost
from minidist.techniques.offload.optimizer import OffloadedOptimizer
from tests.cases import each
from tests.jobs import SMALL_GPT, equals_one_device

GPT = SMALL_GPT | {
    "layers": 3,
    "steps": 3,
    "clip": 0.5,
    "micro_batch": 1,
    "accumulation": 2,
    "reduction": "ordered",
    "dropout": 0.1,
}
ACTIVATIONS = {"offload": "activations", "recompute": "full"}
SAVED = {"offload": "activations"}


def run(ranks, **values):
    world = SimWorld(ranks)
    return world.run(train, TrainConfig.make(**{**GPT, **values})), world


@each("ranks", [1, 3])
@each(
    ("offload", "zero"),
    list(itertools.product([{"offload": "optimizer"}, ACTIVATIONS, SAVED], [0, 1, 2, 3])),
    sampled=6,
)
def test_offloading_is_equal_bit_for_bit(offload, zero, ranks):
    config = TrainConfig.make(**GPT, **offload, zero=zero)
    equals_one_device(ranks, config)


@each("ranks", [1, 2, 4], sampled=6)
@each("zero", [0, 1, 3])
def test_a_step_moves_each_element_of_the_shard_once_each_way(zero, ranks):
    """4 + 4 bytes a parameter in float32, 1/n of them on each rank when the optimizer is sharded."""
    results, _ = run(ranks, zero=zero, offload="optimizer")
    plain, _ = run(ranks, zero=zero)
    owned = [r.measured["host"]["to_host"] // GPT["steps"] for r in results]
    assert sum(owned) == 4 * parameters() * (ranks if zero == 0 else 1)
    for result, nbytes, without in zip(results, owned, plain, strict=True):
        assert result.measured["host"]["to_device"] == result.measured["host"]["to_host"]
        largest = 4 * 16 * 64  # the slice that the optimizer's block has to hold: c_fc
        # values, gradient and two moments, and a block to compute in (two while it grows)
        assert 4 * nbytes < result.measured["host"]["peak"] <= 4 * nbytes + 2 * largest
        assert result.peak_by_purpose.get("optimizer", 0) == 0
        assert result.peak_bytes < without.peak_bytes


@each("precision", ["fp16", "bf16"], sampled=6)
@each(("zero", "offload"), [(0, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")])
def test_in_16_bit_training_2_and_2_bytes_a_parameter_cross(zero, offload, precision):
    """ZeRO-Offload's volume; masters and moments never cross. Shards on the host go up once more, for forward, and with
    padding.
    """
    config = TrainConfig.make(**{**GPT, "steps": 2}, precision=precision, zero=zero, offload=offload)
    equals_one_device(2, config)
    results = SimWorld(2).run(train, config)
    crossed = [sum(r.measured["host"][way] for r in results) // config.steps for way in ("to_host", "to_device")]
    if offload == "optimizer":
        assert crossed == [2 * parameters() * (2 if zero == 0 else 1)] * 2
    else:
        padded, k = sum(results[0].sizes[0].units), GPT["accumulation"]
        assert crossed == [2 * padded * k, 2 * 2 * padded * k]


def parameters():
    from minidist.job.config.train_config import resolve_batches
    from minidist.job.train.job import build

    config = TrainConfig.make(**GPT)
    return sum(p.size for p in build(config, resolve_batches(config, 1)).model.parameters())


def test_the_blocks_inputs_wait_on_the_host():
    """Each block's input, b s d of 4 bytes, goes down in forward and comes up in backward, once a micro-batch."""
    (result,), _ = run(1, **ACTIVATIONS)
    an_input = 1 * GPT["context"] * GPT["width"] * 4
    crossings = GPT["layers"] * GPT["accumulation"] * GPT["steps"]
    assert result.measured["host"] == {
        "peak": GPT["layers"] * an_input,
        "to_host": crossings * an_input,
        "to_device": crossings * an_input,
    }


def test_what_is_on_the_host_is_not_on_the_device():
    """With three blocks' inputs away, the peak (in the last block's replay) falls by all but its own and the next
    one's.
    """
    large = {"context": 32, "micro_batch": 8, "optimizer": "sgd", "dropout": 0.0}
    (away,), _ = run(1, **ACTIVATIONS, **large)
    (kept,), _ = run(1, recompute="full", **large)
    assert kept.peak_bytes - away.peak_bytes == (3 - 2) * 8 * 32 * GPT["width"] * 4


def test_a_transfer_takes_bytes_over_bandwidth():
    def main(comm):
        pool = HostPool(comm, bandwidth=1e6)
        there = pool.start_store(np.zeros(250, np.float32), "optimizer").wait()
        pool.start_fetch(there, "parameter").wait()
        return comm.time()

    assert SimWorld(1).run(main) == [pytest.approx(2e-3)]


@each("ratio", [0.25, 1.0, 3.0])
@each("slices", [1, 2, 5])
def test_steps_and_both_directions_overlap_slice_by_slice(slices, ratio):
    """k slices through three stations (down, step, up): what one slice needs, and k - 1 times the slowest station."""

    def main(comm):
        seconds = 1000 * 4 / 1e6  # of a slice on the link
        pool = HostPool(comm, bandwidth=1e6, host_bandwidth=7 * 1e6 / ratio)
        near = [ParameterSlice(np.ones(1000, np.float32), np.ones(1000, np.float32), f"{i}") for i in range(slices)]
        optimizer = OffloadedOptimizer(near, Adam, pool, lr=0.5)
        optimizer.step()
        assert all((piece.data == 0.5).all() for piece in near)
        return comm.time() / seconds

    assert SimWorld(1).run(main) == [pytest.approx(2 + ratio + (slices - 1) * max(1, ratio))]


@each("ratio", [0.5, 1.0, 2.0])
@each("prefetch", [0, 1])
def test_activations_cross_while_blocks_compute(prefetch, ratio):
    """A block computes `ratio` times as long as its input crosses; its backward is a replay and as long again."""
    blocks = 4

    def main(comm):
        pool, seconds = HostPool(comm, bandwidth=1e6, prefetch=prefetch), 1000 * 4 / 1e6
        # FLOPs, as a counter reports them: time passes only when somebody asks for it.
        operations = ratio * seconds * 1e11

        def block(x):
            counted.add("forward", operations, 0)
            return backward_hook(x * 2.0, lambda _: counted.add("input_gradient", operations, 0))

        with FlopCounter() as counted:
            x = Tensor(np.ones(1000, np.float32), requires_grad=True)
            for _ in range(blocks):
                x = checkpoint(block, x, pack=partial(HostCopy, pool=pool))
            forward = comm.time() / seconds
            x.backward(np.ones(1000, np.float32))
            comm.compute(counted.take())
        return forward, comm.time() / seconds - forward

    ((forward, backward),) = SimWorld(1).run(main)
    if prefetch == 0:
        assert backward == pytest.approx(1 + blocks * (1 + 2 * ratio), rel=1e-3)  # the last input has to leave first
    else:  # a replay and a backward hide the next fetch
        assert backward == pytest.approx(1 + 1 + blocks * 2 * ratio, rel=1e-3)
    # one input leaves at a time, while the next block computes
    assert forward == pytest.approx(blocks * ratio if ratio >= 1 else (blocks - 1) + ratio, rel=1e-3)


def test_what_is_saved_for_backward_crosses_once_each_way():
    """17 arrays of a block's width, 2 behind the blocks, and the exponentials of attention; masks of dropout."""
    sizes = {"micro_batch": 4, "layers": 2, "context": 8, "accumulation": 1}
    (with_it,), _ = run(1, **SAVED, **sizes, dropout=0.0)
    (without,), _ = run(1, **sizes, dropout=0.0)
    nbytes = 4 * ((17 * 2 + 2) * 4 * 8 * GPT["width"] + 2 * 4 * GPT["heads"] * 8 * 8)
    assert with_it.measured["host"] == {"peak": nbytes, "to_host": 3 * nbytes, "to_device": 3 * nbytes}
    # The device keeps what no node saves: the residual stream, and the logits with their gradient.
    activations = [result.peak_by_purpose["activation"] for result in (with_it, without)]
    assert activations[0] < activations[1] - nbytes / 2
    assert with_it.digest == without.digest

    (masked,), _ = run(1, **SAVED, **sizes, dropout=0.5)
    assert masked.measured["host"]["peak"] == nbytes + (2 * 2 + 1) * 4 * 8 * GPT["width"]  # one byte per element


def test_without_a_backward_nothing_leaves():
    def main(comm):
        pool, x = HostPool(comm), Tensor(np.ones((2, 3), np.float32), requires_grad=True)
        with SavedOnHost(pool).saving():
            with no_grad():
                (x * 2.0).tanh()
            assert pool.to_host == 0
            loss = ((x * 2.0) * (x * 3.0)).sum()
        loss.backward()
        return pool.to_host, pool.to_device, x.grad.tolist()

    assert SimWorld(1).run(main) == [(48, 48, [[12.0] * 3] * 2)]


@pytest.mark.parametrize(("zero", "offload"), [(2, "optimizer"), (3, "parameters")])
def test_a_resumed_offloaded_job_has_the_same_bits(zero, offload, tmp_path):
    whole, _ = run(2, zero=zero, offload=offload)
    run(2, zero=zero, offload="none", steps=2, save=str(tmp_path))
    resumed, _ = run(2, zero=zero, offload=offload, save=str(tmp_path), resume=True)
    assert [r.digest for r in resumed] == [r.digest for r in whole]


def test_wrong_settings_are_one_sentence():
    with pytest.raises(UsageError, match="above 0"):
        SimWorld(1).run(lambda comm: HostPool(comm, 0))
