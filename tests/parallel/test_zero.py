"""ZeRO 1 and 2 equal one device bit for bit, send what the paper says, and hold what it says."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.optim import AdamW
from minidist.core.parallel.zero import Shard
from minidist.optim import SGD
from minidist.parallel.shards import state_ranges
from minidist.parallel.unreduced import UnusedParameterError
from minidist.parallel.whole_tensors import gather_tensors
from minidist.parallel.zero import ZeroOptimizer
from minidist.planning import block_bytes
from tests.cases import each
from tests.parallel.models import LENGTH, ROWS, assert_same, loss_of, one_device, small_gpt

OPTIMIZERS = {"adam": (AdamW, {"lr": 0.01, "weight_decay": 0.1}), "sgd": (SGD, {"lr": 0.1, "momentum": 0.9})}
FROZEN = ("wpe", "h.0.mlp.c_fc", "ln_f")


def zero(
    comm,
    stage,
    optimizer="adam",
    local=2,
    steps=2,
    clip=None,
    frozen=(),
    bucket=700,
    alignment=1024,
    algorithm="ordered",
):
    """Train; this rank's view of all tensors."""
    kind, settings = OPTIMIZERS[optimizer]
    model = small_gpt(frozen=frozen)
    sharded = ZeroOptimizer(
        model,
        kind,
        comm=comm,
        stage=stage,
        reduction="sum",
        algorithm=algorithm,
        reduce_bucket_size=bucket,
        alignment=alignment,
        **settings,
    )
    for step in range(steps):
        sharded.zero_grad()
        for i in range(local):
            with sharded.no_sync() if stage == 1 and i < local - 1 else nullcontext():
                loss_of(model, step, comm.rank * local + i, comm.size * local).backward()
        if clip is not None:
            sharded.clip_grad_norm_(clip)
        sharded.step()
    return gather_tensors([sharded.shard], sharded.optimizer)


@cache
def expected_of(ranks, local, each, optimizer="adam", steps=2, clip=None, frozen=()):
    """What one device computes, once for all tests that ask for it. each: contributions are added every micro-batch."""
    kind, settings = OPTIMIZERS[optimizer]
    model = small_gpt(frozen=frozen)
    return one_device(lambda flat: kind(flat, **settings), ranks, local, each, steps, clip, model)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_equals_one_device_bit_for_bit(stage, optimizer, ranks):
    expected = expected_of(ranks, 2, stage == 2, optimizer, clip=0.3)
    for result in SimWorld(ranks).run(zero, stage, optimizer, clip=0.3):
        assert_same(result, expected)


@pytest.mark.parametrize("stage", [1, 2])
@settings(max_examples=10)
@given(
    ranks=st.integers(1, 8),
    alignment=st.sampled_from([1, 7, 64]),
    bucket=st.sampled_from([1, 300, 10**6]),
    frozen=st.booleans(),
)
def test_any_cut_gives_the_same_bits(stage, ranks, alignment, bucket, frozen):
    """Shards that cut through parameters, ranks with only padding, buckets across boundaries, frozen parameters."""
    parts = FROZEN if frozen else ()
    expected = expected_of(ranks, 1, stage == 2, steps=1, frozen=parts)
    for result in SimWorld(ranks).run(zero, stage, local=1, steps=1, alignment=alignment, bucket=bucket, frozen=parts):
        assert_same(result, expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_parameters_with_clipping(stage):
    expected = expected_of(3, 2, stage == 2, clip=0.3, frozen=FROZEN)
    for result in SimWorld(3).run(zero, stage, clip=0.3, frozen=FROZEN):
        assert_same(result, expected)


@each("ranks", [1, 2, 3, 8], sampled=6)
@each("local", [1, 3])
@each("stage", [1, 2])
def test_bytes_are_the_papers(stage, local, ranks):
    """Each x (n-1)/n of Psi padded elements of 4 bytes: stage 1 2 Psi, stage 2 (k+1) Psi."""
    world = SimWorld(ranks)
    world.run(zero, stage, local=local, steps=1, algorithm="ring")
    numel = sum(p.size for p in small_gpt().parameters())
    psi = -(-numel // (ranks * 1024)) * ranks * 1024
    for trace in world.traces:
        sent = trace.bytes_by_purpose()
        assert sent.get("gradient_reduce", 0) == (local if stage == 2 else 1) * psi * 4 * (ranks - 1) // ranks
        assert sent.get("parameter_gather", 0) == psi * 4 * (ranks - 1) // ranks


LAYERS, WIDTH = 4, 12


def peaks(comm, stage):
    """(account, the optimizer, bytes of the trainable elements of this rank's shard) after three steps of Adam."""
    with account_memory() as account:
        model = small_gpt(layers=LAYERS)
        sharded = ZeroOptimizer(model, AdamW, comm=comm, stage=stage, reduction="sum", reduce_bucket_size=700)
        for step in range(3):
            sharded.zero_grad()
            loss_of(model, step, comm.rank, comm.size).backward()
            sharded.step()
        return account, sharded, 4 * sum(piece.stop - piece.start for piece in sharded.shard.slices())


@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
def test_the_peak_is_a_list_of_purposes_to_the_byte(stage, ranks):
    """When backward is in the last block's MLP: all blocks' activations, the gradients of its output and its inner
    width.
    """
    for account, sharded, owned in SimWorld(ranks).run(peaks, stage):
        whole, shard = 4 * sharded.flat.padded_numel, 4 * sharded.shard.size
        reducer, named = sharded.reducer, {p.name: p for p in sharded.flat.parameters}
        filling = [
            reducer.bucket_of[named[name]]
            for name in ("transformer.wte.weight", f"transformer.h.{LAYERS - 1}.mlp.c_proj.weight")
        ]
        buckets = 4 * sum(bucket.slice.stop - bucket.slice.start for bucket in filling)
        rows = ROWS * LENGTH
        assert {purpose: nbytes for purpose, nbytes in account.at_peak.items() if nbytes} == {
            "parameter": whole,
            # stage 2: the tied embedding's bucket, and the block's
            "gradient": shard + (whole if stage == 1 else buckets),
            "optimizer": 2 * owned,
            "workspace": owned,  # of the optimizer: the shard is one piece
            # what the blocks keep; the loss, the tokens and the positions
            "activation": LAYERS * block_bytes.fused(LENGTH, ROWS, WIDTH, 2) + 4 + 8 * ROWS * (LENGTH + 1) + 8 * LENGTH,
            "activation_gradient": 4 * rows * WIDTH + 4 * rows * 4 * WIDTH,
        }


@pytest.mark.parametrize("stage", [1, 2])
def test_the_mean_is_the_sum_over_ranks(stage):
    def gradients(comm, reduction):
        model = small_gpt()
        sharded = ZeroOptimizer(model, SGD, comm=comm, stage=stage, reduction=reduction, algorithm="ordered", lr=0.1)
        loss_of(model, 0, comm.rank, 1).backward()
        return gather_tensors([sharded.shard], sharded.optimizer)["gradients"]

    total, mean = SimWorld(4).run(gradients, "sum")[0], SimWorld(4).run(gradients, "mean")[0]
    for name, array in total.items():
        assert np.array_equal(array / np.float32(4), mean[name])


def test_a_parameter_without_gradient_is_named():
    def main(comm):
        model = small_gpt()
        ZeroOptimizer(model, AdamW, comm=comm, stage=2)
        model.transformer.embed(np.zeros((1, 2), int)).sum().backward()

    with pytest.raises(UnusedParameterError, match=r"'transformer\.ln_f\.(weight|bias)' got no gradient"):
        SimWorld(2).run(main)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stage": 3}, "stage 3 is fully_shard"),
        ({"reduction": "max"}, "'mean' or 'sum'"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size=0; it must be a finite number of at least 1"),
        ({"alignment": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_one_sentence(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        SimWorld(2).run(lambda comm: ZeroOptimizer(small_gpt(), AdamW, comm=comm, **settings))


def test_no_sync_and_clipping_say_what_they_need():
    def no_sync(comm):
        with ZeroOptimizer(small_gpt(), AdamW, comm=comm, stage=2).no_sync():
            pass

    with pytest.raises(UsageError, match="use stage=1"):
        SimWorld(1).run(no_sync)
    with pytest.raises(UsageError, match="alignment=1024"):
        SimWorld(2).run(lambda comm: ZeroOptimizer(small_gpt(), AdamW, comm=comm, alignment=64).clip_grad_norm_(1.0))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_without_gradients_gathers_nothing(stage):
    def program(comm):
        model = small_gpt()
        sharded = ZeroOptimizer(model, SGD, comm=comm, stage=stage, reduction="sum", lr=0.1)
        before = sharded.flat.data.copy()
        sharded.step()
        idle = comm.trace.bytes_by_purpose().get("parameter_gather", 0)
        loss_of(model, 0, comm.rank, comm.size).backward()
        sharded.step()
        return idle, comm.trace.bytes_by_purpose().get("parameter_gather", 0), np.array_equal(before, sharded.flat.data)

    for idle, gathered, same in SimWorld(2).run(program):
        assert (idle, gathered > 0, same) == (0, True, False)


def test_a_rank_without_elements_has_an_empty_range_of_state_as_it_has_an_empty_slice():
    def program(comm):
        shard = Shard([Parameter(np.ones(5, np.float32), name="w")], comm)
        return [(p.name, start, stop) for p, start, stop in state_ranges(shard)], [
            (piece.name, piece.start, piece.stop) for piece in shard.slices()
        ]

    assert SimWorld(3).run(program) == [([("w", 0, 5)],) * 2] + [([("w", 0, 0)],) * 2] * 2


def test_an_argument_that_neither_takes_is_named_with_the_nearest_one():
    for wrong, words in (
        ({"algoritm": "ring"}, r"no argument 'algoritm', and AdamW neither \(did you mean 'algorithm'\?\)"),
        ({"weight_decai": 0.1}, r"'weight_decai', and AdamW neither \(did you mean 'weight_decay'\?\)"),
    ):
        with pytest.raises(UsageError, match=words):
            SimWorld(2).run(lambda comm, wrong=wrong: ZeroOptimizer(small_gpt(), AdamW, comm=comm, **wrong))
