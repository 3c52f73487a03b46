"""Context parallelism equals one device over the whole sequence, and sends what the papers say."""

import sys
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.autograd import ShapeError, Tensor, causal_attention
from minidist.core.base.errors import UsageError
from minidist.core.comm import init_device_mesh
from minidist.core.nn import GPT, Block, GPTConfig
from minidist.core.parallel.context_parallel import RingAttention
from minidist.nn import Llama
from minidist.nn.ops.grouped_attention import grouped_query_attention
from minidist.nn.recompute import recompute
from minidist.parallel.context.orders import sequence_positions
from minidist.parallel.context.ulysses import UlyssesAttention
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.fitting_dims import gradient_axes
from tests.cases import each
from tests.parallel.split_models import assert_equal, summed_loss, text, train
from tests.parallel.test_tensor import gpt, llama

KINDS = {"ring": (RingAttention, "zigzag"), "ulysses": (UlyssesAttention, "contiguous")}
LENGTH, BATCH, WORDS = 11, 2, 13  # 11 tokens: ragged over 2, 3 and 4 ranks


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# --- positions ---


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_positions_cover_the_sequence_once_and_zigzag_is_balanced(order):
    for ranks in range(1, 7):
        for length in (ranks, 2 * ranks, 2 * ranks + 1, 8 * ranks):
            parts = [sequence_positions(length, rank, ranks, order) for rank in range(ranks)]
            assert sorted(np.concatenate(parts)) == list(range(length))
            assert min(len(part) for part in parts) > 0
            if order == "zigzag" and length % (2 * ranks) == 0:  # keys that the queries of a rank see
                assert len({int((part + 1).sum()) for part in parts}) == 1


def test_bad_sequences():
    with pytest.raises(
        UsageError, match=r"3 tokens over 4 context-parallel ranks .* at most 3 ranks, or at least 4 tokens"
    ):
        sequence_positions(3, 0, 4)
    with pytest.raises(UsageError, match=r"unknown order 'zigzak' .* .did you mean 'zigzag'"):
        sequence_positions(8, 0, 2, "zigzak")

    def main(comm):
        with pytest.raises(
            UsageError,
            match=r"6 .key-value. heads cannot be divided among 4 .* one of 1, 2, 3, 6 ranks, or ring attention",
        ):
            UlyssesAttention(comm, 8)(Tensor(random(0, 1, 2, 18)), 6)
        with pytest.raises(ShapeError, match="holds 2 of 8 tokens"):
            RingAttention(comm, 8)(Tensor(random(0, 1, 3, 18)), 6)

    SimWorld(4).run(main)


# --- attention alone ---


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 16, 23])
def test_packed_attention_forward_and_backward(ranks, kind, length):
    make, order = KINDS[kind]
    heads, size = 60 // 5, 2  # 12 heads divide over 1..4
    if kind == "ulysses" and heads % ranks:
        pytest.skip("12 heads do not divide over 5 ranks")
    qkv, g = random(0, 2, length, 3 * heads * size) * 3, random(1, 2, length, heads * size)
    whole = Tensor(qkv, requires_grad=True)
    expected = causal_attention(whole, heads)
    expected.backward(g)

    def main(comm):
        mine = sequence_positions(length, comm.rank, comm.size, order)
        x = Tensor(qkv[:, mine], requires_grad=True)
        y = make(comm, length)(x, heads)
        y.backward(g[:, mine])
        return mine, y.data, x.grad

    for mine, y, dx in SimWorld(ranks).run(main):
        assert np.abs(y - expected.data[:, mine]).max() < 1e-13
        assert np.abs(dx - whole.grad[:, mine]).max() < 1e-12


@each("kind", KINDS)
@each(("ranks", "heads", "kv_heads"), [(2, 4, 2), (3, 6, 3), (4, 8, 4)])
def test_grouped_attention_forward_and_backward(kind, ranks, heads, kv_heads):
    make, order = KINDS[kind]
    length = 13
    arrays = [random(i, 2, length, n, 4) for i, n in enumerate((heads, kv_heads, kv_heads))]
    g = random(9, 2, length, heads, 4)
    whole = [Tensor(a, requires_grad=True) for a in arrays]
    expected = grouped_query_attention(*whole)
    expected.backward(g)

    def main(comm):
        mine = sequence_positions(length, comm.rank, comm.size, order)
        inputs = [Tensor(a[:, mine], requires_grad=True) for a in arrays]
        y = make(comm, length)(*inputs)
        y.backward(g[:, mine])
        return mine, y.data, [x.grad for x in inputs]

    for mine, y, gradients in SimWorld(ranks).run(main):
        assert np.abs(y - expected.data[:, mine]).max() < 1e-13
        for gradient, x in zip(gradients, whole, strict=True):
            assert np.abs(gradient - x.grad[:, mine]).max() < 1e-12


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_two_byte_values(kind, dtype):
    """Computed in float32, sent in two bytes: half of what float32 sends, within what rounding does."""
    make, order = KINDS[kind]
    qkv, g = random(0, 2, 16, 3 * 8), random(1, 2, 16, 8)

    def main(comm, dtype):
        mine = sequence_positions(16, comm.rank, comm.size, order)
        x = Tensor(qkv[:, mine].astype(dtype), requires_grad=True)
        y = make(comm, 16)(x, 4)
        y.backward(g[:, mine].astype(dtype))
        return mine, y.data, x.grad, comm.trace.bytes_by_purpose()

    bound = 0.03 if dtype == ml_dtypes.bfloat16 else 0.004
    whole = SimWorld(1).run(main, np.float64)[0]
    four = SimWorld(4).run(main, np.float32)[0][3]
    for mine, y, dx, sent in SimWorld(4).run(main, dtype):
        assert y.dtype == dx.dtype == dtype
        assert np.abs(y.astype(np.float64) - whole[1][:, mine]).max() < bound * np.abs(whole[1]).max()
        assert np.abs(dx.astype(np.float64) - whole[2][:, mine]).max() < bound * np.abs(whole[2]).max()
        assert {name: 2 * value for name, value in sent.items()} == four


def test_large_scores_do_not_overflow_in_the_online_softmax():
    qkv = random(0, 1, 8, 6) * 100

    def main(comm):
        mine = sequence_positions(8, comm.rank, comm.size)
        return mine, RingAttention(comm, 8)(Tensor(qkv[:, mine]), 1).data

    with np.errstate(over="raise", invalid="raise"):
        for mine, y in SimWorld(2).run(main):
            assert np.abs(y - causal_attention(Tensor(qkv), 1).data[:, mine]).max() < 1e-12


# --- whole models ---


def context_model(comm, name, kind, length=LENGTH, words=WORDS, dropout=0.0):
    attention = KINDS[kind][0](comm, length)
    if name == "gpt":
        single = gpt(comm.size, words, dropout)
        return GPT(single.config, dtype=np.float64, seed=3, attention_fn=attention)
    single = llama(comm.size, dropout=dropout)
    return Llama(single.config, dtype=np.float64, seed=3, attention_fn=attention)


def positions_of(comm, kind):
    return sequence_positions(LENGTH, comm.rank, comm.size, KINDS[kind][1])


def context_train(comm, name, kind, optimizer, dropout=0.0):
    """Each rank has some tokens of every row; gradients are summed over all ranks."""
    mesh = init_device_mesh(comm, (1, comm.size), ("dp", "cp"))
    model = context_model(mesh["cp"], name, kind, dropout=dropout)
    parallel = DistributedDataParallel(model, gradient_axes(mesh), reduction="sum")
    mine = positions_of(mesh["cp"], kind)

    def loss_of(_, step):
        tokens, targets = text(step, BATCH, LENGTH, WORDS)
        return parallel(tokens[:, mine], targets[:, mine], BATCH * LENGTH, positions=mine)

    return train(
        model, loss_of, optimizer, {}, synchronize=summed_loss(comm), flat=parallel.flat, positions=mine, length=LENGTH
    )


@cache
def one_device_of(name, heads_for, optimizer, dropout):
    model = gpt(heads_for, WORDS, dropout) if name == "gpt" else llama(heads_for, dropout=dropout)
    return train(model, lambda model, step: model(*text(step, BATCH, LENGTH, WORDS), BATCH * LENGTH), optimizer)


def assert_model(ranks, name, kind, optimizer, dropout=0.0):
    for history in SimWorld(ranks).run(context_train, name, kind, optimizer, dropout):
        assert_equal(history, one_device_of(name, 3 if ranks == 3 else 4, optimizer, dropout))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_model_equals_one_device_in_every_tensor_of_every_step(ranks, name, kind, optimizer):
    assert_model(ranks, name, kind, optimizer)


@each("ranks", [2, 3, 4], sampled=6)
@each("name", ["gpt", "llama"])
@each("kind", KINDS)
def test_masks_are_drawn_by_global_sample_head_and_position(ranks, name, kind):
    assert_model(ranks, name, kind, "sgd", dropout=0.25)


@pytest.mark.parametrize("what", ["full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_replays_messages_and_masks(what, kind, monkeypatch):
    original = context_model
    monkeypatch.setattr(
        sys.modules[__name__], "context_model", lambda *args, **options: recompute(original(*args, **options), what)
    )
    assert_model(2, "gpt", kind, "sgd", dropout=0.25)


def test_dropout_is_refused_where_a_rank_would_draw_the_wrong_rows():
    def main(comm):
        model = GPT(gpt(2, WORDS, dropout=0.1).config, dtype=np.float64, attention_fn=RingAttention(comm, LENGTH))
        tokens, targets = text(0, BATCH, LENGTH, WORDS)
        mine = positions_of(comm, "ring")
        other = sequence_positions(LENGTH, 1 - comm.rank, comm.size)
        for place in ({}, {"positions": other, "length": LENGTH}):
            with batch_coordinates(**place), pytest.raises(UsageError, match="give them there too: batch_coordinates"):
                model(tokens[:, mine], targets[:, mine], positions=mine)

    SimWorld(2).run(main)


# --- counts ---


def test_no_rank_computes_more_than_another_in_zigzag():
    """The virtual clock says it: the work of the rounds is equal, and contiguous parts would not be."""

    def pairs(comm):
        ring = RingAttention(comm, 48)
        return [
            sum(
                (rows.stop - rows.start) * (keys.stop - keys.start) / (2 if diagonal else 1)
                for rows, keys, diagonal in ring._visible(owner)
            )
            for owner in range(comm.size)
        ]

    work = SimWorld(4).run(pairs)
    assert len({sum(w) for w in work}) == 1
    assert len({w for ws in work for w in ws}) == 1  # each step too


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_rank_keeps_its_share_of_a_block_and_no_scores(dropout):
    """16 sbh / P values, two norms' deviations and the log of the sum of each query and head; with dropout masks, of 1
    byte.
    """
    batch, length, width, heads = 2, 16, 24, 4

    def main(comm):
        mine = sequence_positions(length, comm.rank, comm.size)
        x = Tensor(np.ones((batch, len(mine), width), np.float32), requires_grad=True)
        config = GPTConfig(n_embd=width, n_head=heads, dropout=dropout, attention_dropout=dropout)
        with account_memory() as account, batch_coordinates(positions=mine, length=length):
            block = Block(config, np.float32, attention_fn=RingAttention(comm, length))
            block.initialize(0)
            y = block(x)
            return account.by_purpose["activation"] - y.data.nbytes

    rows = batch * length
    for ranks in (1, 2, 4):
        values = 16 * rows * width + 2 * rows + heads * rows
        masks = 2 * rows * width + heads * rows * length if dropout else 0
        assert SimWorld(ranks).run(main) == [(4 * values + masks) // ranks] * ranks


def test_a_block_of_scores_is_read_and_written_once_per_pass():
    """Chunks of 4 tokens: of 4 chunks rank 0 has the first and the last, which see 1 and 4; rank 1 those that see 2
    and 3.
    """

    def main(comm):
        q, k, v = (Tensor(np.ones((2, 8, 3, 4)), requires_grad=True) for _ in range(3))
        with FlopCounter() as counted:
            y = RingAttention(comm, 16)(q, k, v)
            y.backward(np.ones(y.shape))
        return counted.totals["input_gradient"][1], counted.totals["forward"][1]

    block = 2 * 3 * 4 * 4 * 8  # samples x heads x queries x keys x bytes
    inputs_and_result = 4 * 2 * 8 * 3 * 4 * 8
    for backward, forward in SimWorld(2).run(main):
        assert (backward, forward) == (5 * 2 * block, 5 * 2 * block + inputs_and_result)


def test_rounds_are_charged_between_their_messages_and_hide_them():
    """On the virtual clock each round computes while the next block travels; the work is that of one device."""
    batch, length, width, heads, ranks = 1, 64, 16, 2, 4

    def main(comm, kind=RingAttention):
        mine = sequence_positions(length, comm.rank, comm.size, "zigzag")
        x = Tensor(random(0, batch, length, 3 * width)[:, mine], requires_grad=True)
        with FlopCounter() as counted:
            y = (kind(comm, length) if kind else causal_attention)(x, heads)
            comm.compute(counted.take(), name="forward")
            y.backward(y.data)
            comm.compute(counted.take(), name="backward")
        return {name: flops for name, (flops, _) in counted.totals.items()}

    alone = SimWorld(1).run(main, None)[0]
    slow = SimWorld(ranks, links=LinkModel(alpha=0.0, beta=0.0, flops=1e6))
    each = slow.run(main)
    assert len({tuple(one.items()) for one in each}) == 1  # all ranks compute the same
    reshapes = 3 * 3 * width * length  # in addition to the node: heads taken apart, one FLOP an element
    for kind in ("forward", "input_gradient"):
        assert 0 <= ranks * each[0][kind] - alone[kind] <= reshapes, kind
    links = LinkModel(alpha=0.0, beta=1e-9, flops=1e6)  # a block takes much longer to compute than to travel
    world = SimWorld(ranks, links=links)
    world.run(main)
    names = [span.name for span in world.traces[0].spans]
    assert names.count("forward") >= ranks
    last = 2 * length // ranks * width * 8 * 1e-9  # the gradients' last hop home has nothing to hide behind
    assert world.end_time - slow.end_time <= 2.1 * last
