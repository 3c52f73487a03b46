"""Tensor parallelism equals one device, sends what the papers say, and holds what they say."""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.coordinates import batch_coordinates
from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, no_grad
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.base.layout import Layout
from minidist.core.comm import init_device_mesh
from minidist.core.nn import GPT, MLP, Block, Embedding, FlatParameters, GPTConfig, Linear, cross_entropy
from minidist.core.parallel.model_parallel import parallelize_module
from minidist.core.parallel.tensor_parallel import (
    RowParallelLinear,
    ShardContext,
    VocabParallelEmbedding,
    copy_to_tensor_parallel_region,
    padded_vocab_size,
    reduce_from_tensor_parallel_region,
    split_heads,
    split_loss,
    take_shard,
    vocab_parallel_cross_entropy,
    vocab_range,
)
from minidist.job.checkpoint import Checkpoint, CheckpointShard, ReplicaId, save
from minidist.nn import Llama, LlamaConfig, causal_attention_composite
from minidist.nn.recompute import recompute
from minidist.optim import SGD
from minidist.optim.adam import Adam
from minidist.parallel.replica_check import check_module_replicas
from minidist.parallel.tensor import (
    boxes,
    clip_grad_norm_,
    full_state_dict,
    full_tensor,
    llama_plan,
    load_full_state_dict,
)
from minidist.parallel.tensor.full_state import join_shards, local_shape
from minidist.parallel.tensor.gathering import ColumnParallelLinear, gather_from_tensor_parallel_region
from minidist.parallel.tensor.sequence_layers import gpt_plan, split_sequence
from minidist.parallel.tensor.sequence_parallel import SequenceParallel
from minidist.parallel.tensor.sequence_regions import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from tests.cases import each
from tests.parallel.split_models import assert_equal, replicated, text, train

RANKS = [1, 2, 3, 4]
BATCH, LENGTH = 2, 12


def integers(seed, *shape, limit=3):
    """float64 integers in [-limit, limit]."""
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(np.float64)


# --- the regions ---

# region, shape in, what forward does to the arrays of all ranks, whether the input is the same on all ranks
REGIONS = [
    (copy_to_tensor_parallel_region, lambda xs, r: xs[r], lambda gs, r: sum(gs)),
    (reduce_from_tensor_parallel_region, lambda xs, r: sum(xs), lambda gs, r: gs[r]),
    (
        gather_from_tensor_parallel_region,
        lambda xs, r: np.concatenate(xs, -1),
        lambda gs, r: np.split(gs[r], len(gs), -1)[r],
    ),
    (
        scatter_to_sequence_parallel_region,
        lambda xs, r: np.split(xs[r], len(xs), 1)[r],
        lambda gs, r: np.concatenate(gs, 1),
    ),
    (
        gather_from_sequence_parallel_region,
        lambda xs, r: np.concatenate(xs, 1),
        lambda gs, r: np.split(sum(gs), len(gs), 1)[r],
    ),
    (
        reduce_scatter_to_sequence_parallel_region,
        lambda xs, r: np.split(sum(xs), len(xs), 1)[r],
        lambda gs, r: np.concatenate(gs, 1),
    ),
]


@each("ranks", RANKS)
@each("case", REGIONS, ids=lambda case: case[0].__name__)
def test_a_region_does_what_its_name_says_and_backward_its_conjugate(case, ranks):
    region, forward, backward = case

    def main(comm):
        x = Tensor(integers(comm.rank, 2, 12, 12), requires_grad=True)
        y = region(x, comm)
        assert np.array_equal(region(x.data, comm).data, y.data)  # an array is a tensor without a gradient
        g = integers(50 + comm.rank, *y.shape)
        y.backward(g)
        return x.data, y.data, g, x.grad

    xs, ys, gs, dxs = zip(*SimWorld(ranks).run(main), strict=True)
    for rank in range(ranks):
        assert np.array_equal(ys[rank], forward(xs, rank))
        assert np.array_equal(dxs[rank], backward(gs, rank))


def test_a_gathered_result_that_all_ranks_treat_alike_keeps_its_own_rows_of_the_gradient():
    def main(comm):
        x = Tensor(integers(comm.rank, 1, 4, 3), requires_grad=True)
        y = gather_from_sequence_parallel_region(x, comm, tensor_parallel_output_grad=False)
        y.backward(integers(9, 1, 8, 3))
        return x.grad

    grads = SimWorld(2).run(main)
    assert np.array_equal(np.concatenate(grads, 1), integers(9, 1, 8, 3))


# --- the exact tier ---


def integer_model(model):
    """Integer weights in an MLP or an embedding, so that sums have no rounding whatever their order."""
    for i, parameter in enumerate(model.parameters()):
        parameter.data[...] = integers(i, *parameter.shape)
    return model


def exact_step(model, x, g, optimizer="sgd"):
    """Output, input gradient and parameters after the first step of an optimizer with learning rate 1/4."""
    x = Tensor(x, requires_grad=True)
    y = model(x)
    y.backward(g)
    {"sgd": SGD, "adam": Adam}[optimizer](list(model.parameters()), lr=0.25).step()
    return y.data, x.grad


@pytest.mark.parametrize("ranks", [*RANKS, 6])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_column_and_row_parallel_layers_are_exact_on_integers(ranks, sequence_parallel, optimizer):
    x, g = integers(7, 2, 12, 5), integers(8, 2, 12, 4)
    single = integer_model(MLP([5, 12, 4], dtype=np.float64))
    y, dx = exact_step(single, x, g, optimizer)

    def main(comm):
        model = integer_model(MLP([5, 12, 4], dtype=np.float64))
        plan = {"layers.0": ColumnParallelLinear, "layers.1": RowParallelLinear}
        parallelize_module(model, comm, split_sequence(plan) if sequence_parallel else plan)
        rows = (
            slice(comm.rank * 12 // comm.size, (comm.rank + 1) * 12 // comm.size) if sequence_parallel else slice(None)
        )
        outputs = exact_step(model, x[:, rows], g[:, rows], optimizer)
        return outputs, full_state_dict(model, {"tp": comm}), [p.shape for p in model.parameters()]

    for rank, ((ty, tdx), state, shapes) in enumerate(SimWorld(ranks).run(main)):
        rows = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks) if sequence_parallel else slice(None)
        assert np.array_equal(ty, y[:, rows])
        assert np.array_equal(tdx, dx[:, rows])
        assert shapes == [(12 // ranks, 5), (12 // ranks,), (4, 12 // ranks), (4,)]
        for name, value in single.state_dict().items():
            assert np.array_equal(state[name], value), name
            assert np.abs(value).max() < 2**40  # far from 2^53: nothing was rounded


@pytest.mark.parametrize("ranks", RANKS)
def test_whole_inputs_and_outputs(ranks):
    """gather_output: a layer that no other layer has to know of."""
    whole = integer_model(Linear(12, 12, dtype=np.float64))
    x, g = integers(1, 3, 12), integers(2, 3, 12)
    y, dx = exact_step(whole, x, g)

    def main(comm):
        column = integer_model(Linear(12, 12, dtype=np.float64))
        column = ColumnParallelLinear(column, ShardContext(comm), gather_output=True)
        assert np.array_equal(column(x).data, y)  # it takes arrays as `Linear` does
        return exact_step(column, x, g), full_state_dict(column, {"tp": comm})

    for (ty, tdx), state in SimWorld(ranks).run(main):
        assert np.array_equal(ty, y)
        assert np.array_equal(tdx, dx)
        assert all(np.array_equal(state[name], value) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("words", [1, 2, 3, 7, 8, 9, 12])
def test_the_embedding_is_exact_for_every_word(ranks, words):
    tokens = np.stack([np.arange(words), np.arange(words)[::-1]])
    g = integers(3, 2, words, 5)
    single = integer_model(Embedding(words, 5, np.float64))
    single(tokens).backward(g)

    def main(comm):
        model = VocabParallelEmbedding(integer_model(Embedding(words, 5, np.float64)), ShardContext(comm))
        y = model(tokens)
        if y.requires_grad:
            y.backward(g)
        gradient = full_tensor(model.weight.grad, model.weight.layout, {"tp": comm})
        return (
            y.data,
            gradient,
            model.weight.data[model.last - model.first :],
            model.weight.grad[model.last - model.first :],
        )

    for y, gradient, padding, padding_gradient in SimWorld(ranks).run(main):
        assert np.array_equal(y, single(tokens).data)
        assert np.array_equal(gradient, single.weight.grad)
        assert not padding.any()
        assert not padding_gradient.any()


def test_ranges_of_words_cover_the_vocabulary_once():
    for words in range(1, 30):
        for ranks in range(1, 9):
            ranges = [vocab_range(words, rank, ranks) for rank in range(ranks)]
            assert [word for first, last in ranges for word in range(first, last)] == list(range(words))
            assert padded_vocab_size(words, ranks) % ranks == 0


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("words", [5, 12])
@pytest.mark.parametrize("masked", [None, -100, 3])
def test_vocab_parallel_cross_entropy(ranks, words, masked):
    logits = np.random.default_rng(0).standard_normal((2, 4, words)) * 30
    targets = np.random.default_rng(1).integers(0, words, (2, 4))
    targets[0, :2] = 0, words - 1
    if masked is not None:
        targets[1, 1:] = masked
    ignored = -100 if masked is None else masked
    whole = Tensor(logits, requires_grad=True)
    loss = cross_entropy(whole, targets, ignore_index=ignored)
    loss.backward()
    padding = padded_vocab_size(words, ranks) - words

    def main(comm):
        # What stands in the padding does not count.
        padded = np.concatenate([logits, np.full((2, 4, padding), 1e6)], -1)
        mine = Tensor(np.split(padded, ranks, -1)[comm.rank].copy(), requires_grad=True)
        result = vocab_parallel_cross_entropy(mine, targets, ignore_index=ignored, comm=comm, vocab_size=words)
        result.backward()
        return result.item(), mine.grad

    results = SimWorld(ranks).run(main)
    assert len({value for value, _ in results}) == 1
    assert abs(results[0][0] - loss.item()) < 1e-12
    gradient = np.concatenate([g for _, g in results], -1)
    assert np.abs(gradient[..., :words] - whole.grad).max() < 1e-14
    assert not gradient[..., words:].any()


def test_the_loss_never_holds_the_full_logits_and_sends_three_numbers_a_row():
    ranks, rows, words = 4, 32, 4096

    def main(comm):
        mine = Tensor(np.ones((rows, words // ranks)), requires_grad=True)
        with account_memory() as account:
            loss = vocab_parallel_cross_entropy(mine, np.zeros(rows, int), comm=comm, vocab_size=words)
            loss.backward()
        return account.peak

    world = SimWorld(ranks)
    peaks = world.run(main)
    assert max(peaks) <= 1.1 * rows * words // ranks * 8  # one tile of logits: the saved gradient
    for trace in world.traces:
        assert trace.bytes_by_purpose() == {"tensor_forward": 3 * 2 * (ranks - 1) * rows // ranks * 8}


# --- GPT in the float tier ---


def gpt(ranks, words=13, dropout=0.0, layers=2):
    heads = 6 if ranks == 3 else 4
    config = GPTConfig(
        vocab_size=words,
        n_positions=LENGTH,
        n_embd=24,
        n_layer=layers,
        n_head=heads,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return GPT(config, dtype=np.float64, seed=3)


def gpt_loss(words):
    return lambda model, step: model(*text(step, BATCH, LENGTH, words), BATCH * LENGTH)


@cache
def one_device(heads_for, words, optimizer, dropout):
    return train(gpt(heads_for, words, dropout), gpt_loss(words), optimizer)


def parallel_gpt(comm, optimizer, words=13, sequence_parallel=False, dropout=0.0):
    model = gpt(comm.size, words, dropout)
    names = [name for name, _ in model.named_parameters()]
    parallelize_module(model, comm, gpt_plan(words, sequence_parallel))
    assert [name for name, _ in model.named_parameters()] == names
    history = train(model, gpt_loss(words), optimizer, {"tp": comm})
    return history, replicated(model)


def assert_gpt(ranks, optimizer, words=13, sequence_parallel=False, dropout=0.0):
    results = SimWorld(ranks).run(parallel_gpt, optimizer, words, sequence_parallel, dropout)
    for history, replica in results:
        assert_equal(history, one_device(3 if ranks == 3 else 4, words, optimizer, dropout))
        assert replica == results[0][1]  # bitwise the same on all ranks


@pytest.mark.sampled(12)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gpt_equals_one_device_in_every_tensor_of_every_step(ranks, optimizer, sequence_parallel):
    assert_gpt(ranks, optimizer, sequence_parallel=sequence_parallel)


@each("ranks", [2, 3, 4], sampled=4)
@each("sequence_parallel", [False, True])
def test_gpt_with_a_vocabulary_that_divides_and_dropout(ranks, sequence_parallel):
    assert_gpt(ranks, "adam", words=16, sequence_parallel=sequence_parallel, dropout=0.25)


@pytest.mark.parametrize("what", ["full", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_replays_the_messages_in_the_same_order_on_all_ranks(what, sequence_parallel):
    def main(comm):
        model = parallelize_module(gpt(comm.size, dropout=0.25), comm, gpt_plan(13, sequence_parallel))
        recompute(model, what)
        return train(model, gpt_loss(13), "sgd", {"tp": comm})

    for history in SimWorld(2).run(main):
        assert_equal(history, one_device(4, 13, "sgd", 0.25))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_unsplit_weights_are_freed(name, sequence_parallel):
    """What is alive after the split is this rank's shards: no hook or module keeps a weight of one device."""
    sizes = {"gpt": GPTConfig(16, LENGTH, 24, 2, 4), "llama": LlamaConfig(16, 24, 48, 2, 4, 4, LENGTH)}
    make, plan = (GPT, gpt_plan) if name == "gpt" else (Llama, llama_plan)

    def main(comm):
        with account_memory() as account:
            model = parallelize_module(make(sizes[name], seed=3), comm, plan(16, sequence_parallel))
            return account.by_purpose["parameter"], sum(p.data.nbytes for p in model.parameters())

    for alive, shards in SimWorld(2).run(main):
        assert alive == shards


@given(st.data())
def test_tiles_join_to_the_whole_and_boxes_say_where_they_lie(data):
    draw = data.draw
    ranks, copies, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    dim = draw(st.integers(0, len(sizes) - 1))
    sizes[dim] *= ranks * blocks
    padding = draw(st.integers(0, sizes[dim] - 1)) if blocks == 1 else 0
    shape = tuple(n - padding * (i == dim) for i, n in enumerate(sizes))
    layout = Layout(shape, ("tp",), (dim,), blocks, padding, copies)
    whole = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    tiles = [take_shard(whole, layout, rank, ranks * copies) for rank in range(ranks * copies)]
    assert np.array_equal(join_shards(np.stack(tiles), layout), whole)
    again, count = np.zeros(shape), np.zeros(shape, int)
    for rank, tile in enumerate(tiles):
        assert tile.shape == local_shape(layout, ranks * copies)
        for box, local in boxes(layout, {"tp": SimpleNamespace(rank=rank, size=ranks * copies)}):
            place = tuple(slice(*pair) for pair in box)
            again[place], count[place] = tile[local], count[place] + 1
    assert np.array_equal(again, whole)
    assert (count == copies).all()


def test_a_layout_has_one_dim_for_each_axis_and_two_axes_cut_one_block():
    with pytest.raises(ValueError, match=r"^layout has 1 axes \('tp',\) but 0 dims \(\)$"):
        Layout((4, 4), ("tp",))
    for wrong in ({"blocks": 3}, {"padding": 1}, {"copies": 2}):
        with pytest.raises(
            ValueError, match=r"^a tensor cut over \('ep', 'tp'\) has one block, no padding and no copies"
        ):
            Layout((4, 4), ("ep", "tp"), (0, 1), **wrong)


@each("dtype", [ml_dtypes.bfloat16, np.float16])
@each("sequence_parallel", [False, True])
@each("name", ["gpt", "llama"])
def test_values_of_two_bytes_travel_in_two_bytes(dtype, sequence_parallel, name):
    """Within what rounding to 8 or 11 bits does to a float64 model; half the bytes of float32."""
    sizes = {"gpt": GPTConfig(13, LENGTH, 24, 2, 4), "llama": LlamaConfig(13, 24, 48, 2, 4, 2, LENGTH)}
    make, plan = (GPT, gpt_plan) if name == "gpt" else (Llama, llama_plan)
    tokens, targets = text(0, BATCH, LENGTH, 13)

    def main(comm, dtype):
        model = parallelize_module(make(sizes[name], dtype, seed=3), comm, plan(13, sequence_parallel))
        loss = model(tokens, targets, BATCH * LENGTH)
        loss.backward()
        gradients = {n: full_tensor(p.grad, p.layout, {"tp": comm}) for n, p in model.named_parameters()}
        return float(loss.item()), gradients, comm.trace.bytes_by_purpose(), replicated(model)

    low, single = SimWorld(2).run(main, dtype), SimWorld(1).run(main, np.float64)[0]
    four = SimWorld(2).run(main, np.float32)[0]
    bound = 0.05 if dtype == ml_dtypes.bfloat16 else 0.01
    for loss, gradients, sent, replica in low:
        assert abs(loss - single[0]) < bound
        largest = max(np.abs(g).max() for g in single[1].values())
        for parameter, gradient in gradients.items():
            assert gradient.dtype == dtype
            assert np.abs(gradient.astype(np.float64) - single[1][parameter]).max() < bound * largest, parameter
        numbers_of_the_loss = 3 * BATCH * LENGTH * 4  # they stay float32
        for why, value in four[2].items():
            kept = numbers_of_the_loss if why == "tensor_forward" else 0
            assert 2 * (sent[why] - kept) == value - kept, why
        assert replica == low[0][3]


@pytest.mark.parametrize(
    ("make", "plan", "shape"),
    [
        (lambda: gpt(4), gpt_plan(13), (2, 2)),
        (lambda: gpt(4, words=5), gpt_plan(5), (1, 4)),
        (lambda: llama(4, kv=1), llama_plan(13), (2, 2)),
        (lambda: llama(4, kv=1), llama_plan(13, True), (1, 4)),
    ],
)
def test_tiles_of_a_checkpoint_are_boxes_of_global_tensors(tmp_path, make, plan, shape):
    """Saved by one mesh, read by another: fused, padded (one of nothing but padding), shared and plain tiles."""

    def build(comm, shape):
        mesh = init_device_mesh(comm, shape, ("dp", "tp"))
        return parallelize_module(make(), mesh["tp"], plan), mesh

    def writes(comm):
        model, mesh = build(comm, shape)
        dp, tp, pieces = mesh["dp"], mesh["tp"], []
        for name, p in model.named_parameters():
            same = p.layout.copies if p.layout.axes else tp.size  # tp ranks of a replica that hold the same
            holder = (dp.rank * same + tp.rank % same, dp.size * same)
            pieces += [
                CheckpointShard(name, p.layout.global_shape, p.data[local], box=box, replica=ReplicaId(*holder))
                for box, local in boxes(p.layout, mesh)
            ]
        save(comm, tmp_path, 1, pieces, {})

    def reads(comm):
        model, mesh = build(comm, (4 // shape[0] // 2, 2 * shape[0]))
        for p in model.parameters():
            p.data[...] = 0
        checkpoint = Checkpoint(tmp_path)
        load_full_state_dict(model, {name: checkpoint.tensor(name) for name in checkpoint.tensors}, mesh)
        return {name: value.copy() for name, value in full_state_dict(model, mesh).items()}

    SimWorld(4).run(writes)
    for state in SimWorld(4).run(reads):
        assert all(np.array_equal(state[name], value) for name, value in make().state_dict().items())


def test_loading_whole_weights_into_a_cut_model_names_what_does_not_fit():
    def main(comm):
        model = parallelize_module(gpt(4), comm, gpt_plan(13))
        state = gpt(4).state_dict()
        with pytest.raises(UsageError, match=r"'transformer\.ln_f\.weigth' .did you mean"):
            load_full_state_dict(model, state | {"transformer.ln_f.weigth": np.zeros(24)}, {"tp": comm})
        with pytest.raises(UsageError, match=r"wte\.weight' has shape \(7, 24\); the whole parameter has \(13, 24\)"):
            load_full_state_dict(model, state | {"transformer.wte.weight": np.zeros((7, 24))}, {"tp": comm})

    SimWorld(2).run(main)


def test_logits_are_gathered_without_the_padding():
    tokens, _ = text(0, BATCH, LENGTH, 13)
    with no_grad():
        expected = gpt(4)(tokens).data

    def main(comm, sequence_parallel):
        model = parallelize_module(gpt(4), comm, gpt_plan(13, sequence_parallel))
        with no_grad():
            return model(tokens).data

    for sequence_parallel in (False, True):
        for logits in SimWorld(4).run(main, sequence_parallel):
            assert logits.shape == (BATCH, LENGTH, 13)
            assert np.abs(logits - expected).max() < 1e-12


# --- Llama ---


def llama(ranks, tied=False, kv=None, dropout=0.0):
    heads, kv = (6, kv or 3) if ranks == 3 else (8, kv or 4)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=48,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
    )
    return Llama(config, dtype=np.float64, seed=3)


@cache
def one_device_llama(heads_for, optimizer, tied):
    return train(llama(heads_for, tied), gpt_loss(13), optimizer)


@each(("ranks", "optimizer"), list(product(RANKS, ("sgd", "adam"))), sampled=12)
@each(("sequence_parallel", "tied"), [(False, False), (True, True)])
def test_llama_equals_one_device_in_every_tensor_of_every_step(ranks, optimizer, sequence_parallel, tied):
    def main(comm):
        model = parallelize_module(llama(comm.size, tied), comm, llama_plan(13, sequence_parallel))
        return train(model, gpt_loss(13), optimizer, {"tp": comm}), replicated(model)

    results = SimWorld(ranks).run(main)
    for history, replica in results:
        assert_equal(history, one_device_llama(3 if ranks == 3 else 4, optimizer, tied))
        assert replica == results[0][1]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_llama_with_attention_dropout(sequence_parallel):
    expected = train(llama(4, dropout=0.25), gpt_loss(13), "sgd")

    def main(comm):
        model = parallelize_module(llama(4, dropout=0.25), comm, llama_plan(13, sequence_parallel))
        return train(model, gpt_loss(13), "sgd", {"tp": comm})

    for history in SimWorld(2).run(main):
        assert_equal(history, expected)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("ranks", "kv"), [(2, 1), (4, 2), (4, 1), (8, 4), (3, 1)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_key_value_heads_than_ranks(ranks, kv, sequence_parallel):
    """Neighbours share a head; its gradient is summed over them once, and it counts once in the norm."""
    length = 16 if ranks == 8 else LENGTH

    def model_of():
        single = llama(ranks, kv=kv).config
        config = replace(single, vocab_size=16, max_position_embeddings=length, intermediate_size=24)
        return Llama(config, np.float64, seed=3)

    def loss_of(model, step):
        return model(*text(step, BATCH, length, 16), BATCH * length)

    expected = train(model_of(), loss_of, "adam", steps=2)
    single = model_of()
    loss_of(single, 0).backward()
    norm = float(np.sqrt(sum((p.grad**2).sum() for p in single.parameters())))

    def main(comm):
        model = parallelize_module(model_of(), comm, llama_plan(16, sequence_parallel))
        loss_of(model, 0).backward()
        mine = clip_grad_norm_(model, 1e9, comm)
        history = train(model, loss_of, "adam", {"tp": comm}, steps=2)
        check_module_replicas(model, comm)
        full = {name: value.copy() for name, value in full_state_dict(model, {"tp": comm}).items()}
        load_full_state_dict(model, {name: value + 1 for name, value in full.items()}, {"tp": comm})
        again = full_state_dict(model, {"tp": comm})
        assert all(np.array_equal(again[name], full[name] + 1) for name in full)
        model.model.layers[0].self_attn.k_proj.weight.data[...] += comm.rank % 2
        with pytest.raises(
            MismatchError, match=r"self_attn\.k_proj\.weight' of .* not the same on rank 1 as on rank 0"
        ):
            check_module_replicas(model, comm)
        return history, mine

    for history, mine in SimWorld(ranks).run(main):
        assert_equal(history, expected)
        assert abs(mine - norm) < 1e-12 * norm


def test_key_value_heads_that_do_not_divide():
    plan = llama_plan(13)
    refuse(
        4,
        plan,
        lambda: llama(3),
        "6 heads of model.layers.0.self_attn cannot be divided among 4 .* one of 1, 2, 3, 6 ranks",
    )
    refuse(
        6,
        plan,
        lambda: Llama(LlamaConfig(13, 48, 36, 1, 12, 4)),
        "4 key-value heads of .* cannot be divided among 6 .* use 6, or one of 1, 2, 4 ranks",
    )


# --- the gradient norm, and replicas ---


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_clip_norm_counts_every_global_element_once(ranks, sequence_parallel):
    single = gpt(ranks)
    gpt_loss(13)(single, 0).backward()
    flat = np.concatenate([p.grad.reshape(-1) for p in single.parameters()])
    norm = float(np.sqrt(flat @ flat))
    factor = 0.25 * norm / (norm + 1e-6)

    def main(comm):
        model = parallelize_module(gpt(comm.size), comm, gpt_plan(13, sequence_parallel))
        gpt_loss(13)(model, 0).backward()
        before = clip_grad_norm_(model, 0.25 * norm, comm)
        return before, {name: full_tensor(p.grad, p.layout, {"tp": comm}) for name, p in model.named_parameters()}

    for before, gradients in SimWorld(ranks).run(main):
        assert abs(before - norm) < 1e-12 * norm
        for name, parameter in single.named_parameters():
            assert np.abs(gradients[name] - parameter.grad * factor).max() < 1e-12 * norm, name


def test_a_replica_that_differs_is_named():
    def main(comm, rank):
        model = parallelize_module(gpt(4), comm, gpt_plan(13))
        if comm.rank == rank:
            model.transformer.h[1].ln_2.weight.data[3] += 1e-12
        check_module_replicas(model, comm)

    SimWorld(4).run(main, None)
    for rank in range(4):
        with pytest.raises(MismatchError, match=r"'transformer\.h\.1\.ln_2\.weight' .* not the same on rank"):
            SimWorld(4).run(main, rank)


# --- counts ---


def block_activations(
    ranks, sequence_parallel, heads=4, batch=2, length=16, width=24, dtype=np.float32, dropout=0.0, **options
):
    """Per rank the bytes of activations that a GPT block keeps after forward."""

    def main(comm):
        sp = sequence_parallel
        rows = length // comm.size if sp else length
        x = Tensor(np.ones((batch, rows, width), dtype), requires_grad=True)
        plan = {
            name.removeprefix("transformer.h.*."): style for name, style in gpt_plan(9, sp).items() if "h.*." in name
        }
        with account_memory() as account, batch_coordinates():
            block = Block(
                GPTConfig(n_embd=width, n_head=heads, dropout=dropout, attention_dropout=dropout), dtype, **options
            )
            block.initialize(0)
            block = parallelize_module(block, comm, plan)
            y = block(x)
            return account.by_purpose["activation"] - y.data.nbytes  # the output is the next block's

    return SimWorld(ranks).run(main)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_activation_bytes_are_the_papers(dtype):
    """Korthikanti et al. 2022, equations 2 and 4: sbh (10 + 24/t + 5as/(ht)) bytes, with the sequence split
    sbh/t (34 + 5as/h). These are 2-byte values, and masks of 1 byte: with i bytes a value the 10 are 4 i and two masks,
    the 24 are 12 i, and the 5 are 2 i (softmax, and what dropout left of it) and a mask. In addition, 1 / standard
    deviation of each row for two norms, in 4 bytes at least.
    """
    batch, length, width, heads = 2, 16, 24, 4
    dtype = np.dtype(dtype)
    sbh, i = batch * length * width, dtype.itemsize

    def paper(t, split, i):
        whole, cut, scores = 4 * i + 2, 12 * i, (2 * i + 1) * heads * length / width
        return sbh * (whole / (t if split else 1) + cut / t + scores / t)

    assert paper(1, False, 2) == sbh * (34 + 5 * heads * length / width)  # the paper's own numbers
    assert paper(4, False, 2) == sbh * (10 + 24 / 4 + 5 * heads * length / (width * 4))
    assert paper(4, True, 2) == sbh / 4 * (34 + 5 * heads * length / width)
    for ranks in (1, 2, 4):
        for split in (False, True):
            kept = block_activations(ranks, split, dtype=dtype, dropout=0.1, attention_fn=causal_attention_composite)
            deviations = 2 * batch * length * max(i, 4) // (ranks if split else 1)
            assert kept == [paper(ranks, split, i) + deviations] * ranks, (ranks, split)


def test_fused_attention_keeps_one_value_a_score_instead_of_two():
    """The causal half is still computed in whole blocks; besides, 1 / sum of each row, and the mask while weights are
    dropped.
    """
    batch, length, width, heads = 2, 16, 24, 4
    scores, sbh = batch * heads * length * length, batch * length * width
    for ranks in (1, 2, 4):
        for dropout, masks in ((0.0, 0), (0.1, 1)):
            kept = block_activations(ranks, False, dropout=dropout)
            expected = 4 * 4 * sbh + 2 * masks * sbh + 8 * batch * length  # norms and masks outside, on every rank
            expected += (12 * 4 * sbh + 4 * (scores + batch * heads * length) + masks * scores) // ranks
            assert kept == [expected] * ranks, (ranks, dropout)


def test_regathered_arrays_are_gone_when_their_readers_are():
    """The peak of communication memory in backward is one gathered input, whatever the depth."""

    def main(comm, layers):
        with account_memory() as account:
            model = parallelize_module(gpt(4, layers=layers), comm, gpt_plan(13, True))
            model(*text(0, BATCH, LENGTH, 13)).backward()
        return account.peak_by_purpose["communication"], account.by_purpose["communication"]

    one = BATCH * LENGTH * 24 * 8
    for layers in (1, 3):
        assert SimWorld(2).run(main, layers) == [(one, 0)] * 2


# --- bad input ---


def refuse(ranks, plan, model=None, match=""):
    def main(comm):
        with pytest.raises(UsageError, match=match):
            parallelize_module(model() if model else gpt(2), comm, plan)

    SimWorld(ranks).run(main)


def test_bad_plans_are_one_sentence_with_the_nearest_values():
    attention = {"transformer.h.*.attn": split_heads}
    refuse(
        3,
        attention,
        match=r"4 heads of transformer\.h\.0\.attn cannot be divided among 3 .* use 3 or 6, or one of 1, 2, 4",
    )
    refuse(
        2, {"transformer.h.*.atn": split_heads}, match=r"'transformer\.h\.\*\.atn', which is not a module .did you mean"
    )
    refuse(
        5,
        {"layers.0": ColumnParallelLinear},
        lambda: MLP([4, 6, 3]),
        r"6 out features of layers\.0 .* use 5 or 10, or one of 1, 2, 3, 6",
    )
    refuse(4, {"layers.1": RowParallelLinear}, lambda: MLP([4, 6, 3]), r"6 in features of layers\.1 .* use 4 or 8")
    refuse(2, {"layers.0": RowParallelLinear}, lambda: MLP([4, 6, 3]), "activation 'relu'")
    refuse(
        2,
        {"transformer.wte": VocabParallelEmbedding},
        match=r"'lm_head\.weight' shares a parameter .* name its module in the plan",
    )
    refuse(2, gpt_plan(16), match="a vocabulary of 16 words, the model has 13; give the plan 13")
    split = partial(split_loss, vocab_size=3)
    refuse(2, {"": split}, lambda: MLP([4, 6, 3]), "split_loss is for LanguageModel; '' is a MLP")
    refuse(
        2, {"layers.1": split_heads}, lambda: MLP([4, 6, 3]), r"split_heads is for Attention; 'layers\.1' is a Linear"
    )
    refuse(2, {"layers.0": SequenceParallel()}, lambda: MLP([4, 6, 3]), "'layers.0' is a Linear")

    def flat():
        model = MLP([4, 6, 3])
        model.flat = FlatParameters(model.parameters())
        return model

    refuse(2, {"layers.0": ColumnParallelLinear}, flat, "belongs to a FlatParameters already")


def test_bad_sequences_and_words():
    def main(comm):
        model = parallelize_module(gpt(4), comm, gpt_plan(13, True))
        with pytest.raises(
            UsageError, match="7 tokens of a sequence cannot be divided among 4 tensor-parallel ranks; use 4 or 8"
        ):
            model(np.zeros((1, 7), int))
        with pytest.raises(UsageError, match=r"word 13 is out of range: the vocabulary has words 0\.\.12"):
            model(np.full((1, 8), 13))
        with pytest.raises(UsageError, match="initialize the whole model first"):
            model.initialize(1)

    SimWorld(4).run(main)
