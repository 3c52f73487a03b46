"""All-gather attention equals one device, whole texts and documents, and sends what the closed form says."""

import ml_dtypes
import numpy as np
import pytest

from minidist.base.flop_counter import FlopCounter
from minidist.comm import SimWorld
from minidist.core.autograd import ShapeError, Tensor, causal_attention
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.parallel.context import AllGatherAttention, document_ids, documents
from minidist.parallel.context.orders import sequence_positions
from minidist.parallel.context.ulysses import UlyssesAttention
from tests.cases import each
from tests.jobs import equals_one_device_in_closed_form
from tests.parallel.test_context import KINDS, assert_model


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def by_hand(q, k, v, ids):
    """Masked attention, head by head and query by query; q (batch, T, heads, n), k and v with fewer heads."""
    out = np.empty_like(q)
    shared = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = [j for j in range(i + 1) if ids is None or ids[b, j] == ids[b, i]]
        scores = np.array([q[b, i, h] @ k[b, j, h // shared] for j in seen]) / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ v[b, seen, h // shared]
    return out


def attend(ranks, qkv, g, ids, kind="all-gather"):
    """Return (positions, output, gradients) of each rank; qkv: whole arrays of q, k and v."""
    length = qkv[0].shape[1]

    def main(comm):
        order = "zigzag" if kind == "all-gather" else "contiguous"
        mine = sequence_positions(length, comm.rank, comm.size, order)
        whole = AllGatherAttention(None, length)
        fn = AllGatherAttention(comm, length) if kind == "all-gather" else UlyssesAttention(comm, length, whole)
        inputs = [Tensor(a[:, mine], requires_grad=True) for a in qkv]
        with documents(ids):
            y = fn(*inputs)
        y.backward(g[:, mine])
        return mine, y.data, [x.grad for x in inputs], comm.trace.bytes_by_purpose()

    return SimWorld(ranks).run(main)


IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3], [0] * 10 + [1]])  # the first row ends documents inside chunks


@each("ids", [None, IDS], ids=["text", "documents"])
@each(("ranks", "kind"), [(1, "all-gather"), (2, "all-gather"), (5, "all-gather"), (2, "ulysses")])
def test_forward_and_backward_equal_one_device(ranks, kind, ids):
    """11 tokens: ragged; 5 ranks leave chunks empty. Gradients: those of one rank, and these of finite differences."""
    qkv, g = [random(i, 2, 11, heads, 4) for i, heads in enumerate((4, 2, 2))], random(9, 2, 11, 4, 4)
    expected = by_hand(*qkv, ids)
    ((_, _, gradients, _),) = attend(1, qkv, g, ids)
    for mine, y, parts, _ in attend(ranks, qkv, g, ids, kind):
        assert np.abs(y - expected[:, mine]).max() < 1e-13
        for part, whole in zip(parts, gradients, strict=True):
            assert np.abs(part - whole[:, mine]).max() < 1e-12

    packed = Tensor(random(3, 2, 8, 24))
    assert np.allclose(AllGatherAttention(None, 8)(packed, 2).data, causal_attention(packed, 2).data, atol=1e-13)

    # A direction in each of q, k, v.
    for at in range(3):
        step = random(20 + at, *qkv[at].shape)
        moved = [[a + sign * 1e-6 * step if i == at else a for i, a in enumerate(qkv)] for sign in (1, -1)]
        slope = ((by_hand(*moved[0], ids) - by_hand(*moved[1], ids)) * g).sum() / 2e-6
        assert (gradients[at] * step).sum() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_model_with_dropout_of_weights_equals_one_device(name, monkeypatch):
    monkeypatch.setitem(KINDS, "all-gather", (AllGatherAttention, "zigzag"))
    assert_model(3, name, "all-gather", "adam", dropout=0.25)


def test_two_byte_values_travel_in_two_bytes():
    qkv, g = [random(i, 2, 16, 2, 4) for i in range(3)], random(9, 2, 16, 2, 4)
    half = [a.astype(ml_dtypes.bfloat16) for a in qkv]
    expected = by_hand(*qkv, None)
    wide = attend(4, [a.astype(np.float32) for a in qkv], g.astype(np.float32), None)
    for (mine, y, _, sent), (*_, four) in zip(attend(4, half, g.astype(ml_dtypes.bfloat16), None), wide, strict=True):
        assert y.dtype == ml_dtypes.bfloat16
        assert np.abs(y.astype(np.float64) - expected[:, mine]).max() < 0.03 * np.abs(expected).max()
        assert {name: 2 * value for name, value in sent.items()} == four


def test_all_ranks_compute_alike():
    def main(comm):
        mine = sequence_positions(16, comm.rank, comm.size)
        with FlopCounter() as counter:
            AllGatherAttention(comm, 16)(*(Tensor(random(i, 1, 16, 2, 4)[:, mine]) for i in range(3)))
        return sum(flops for flops, _ in counter.take())

    assert len(set(SimWorld(4).run(main))) == 1


def test_documents_of_tokens():
    tokens = np.array([[5, 0, 7, 7, 0, 1], [0, 0, 3, 0, 2, 0]])
    assert document_ids(tokens, 0).tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 3, 3]]
    with (
        documents(np.zeros((1, 3), int)),
        pytest.raises(ShapeError, match=r"document ids have shape .1, 3.; they must"),
    ):
        AllGatherAttention(None, 4)(Tensor(random(0, 1, 4, 6)), 1)
    with pytest.raises(ShapeError, match="rank 0 of 1 holds 4 of 4 tokens"):
        AllGatherAttention(None, 4)(Tensor(random(0, 1, 3, 6)), 1)


JOB = {"model": "llama", "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "context": 10, "data": "markov"}
JOB |= {"steps": 2, "micro_batch": 2, "reduction": "ordered", "attention_dropout": 0.1}
TEXTS = {"document_separator": 3}


@each(
    ("ranks", "layout"),
    [
        (2, {"cp": 2, "attention": "all-gather"}),
        (4, {"cp": 2, "attention": "all-gather", "tp": 2, "zero": 1, **TEXTS}),
        (4, {"cp": 2, "attention": "all-gather", "pp": 2, "recompute": "full", "microbatches": 2, **TEXTS}),
        (2, {"cp": 2, "attention": "ulysses", "recompute": "selective", **TEXTS}),
        (2, {"cp": 2, "attention": "all-gather", "model": "gpt", "kv_heads": None, "recompute": "full", **TEXTS}),
        (3, {"dp": 3, "zero": 3, **TEXTS}),
        (2, {"pp": 2, "schedule": "v-half", "layers": 4, "microbatches": 2, **TEXTS}),
    ],
    sampled=2,
)
def test_jobs_equal_one_device_with_every_byte_in_the_closed_form(ranks, layout):
    floats = {"precision": "fp64"} if layout.get("cp") else {}
    result, _ = equals_one_device_in_closed_form(ranks, TrainConfig.make(**{**JOB, **layout, **floats}))
    assert result.tier == ("float" if floats else "ordered")


def test_documents_change_the_losses_and_are_evaluated_and_resumed(tmp_path):
    values = {**JOB, "steps": 2, "evaluate_every": 1, "prefetch_batches": 1}

    def run(ranks=2, **changed):
        return SimWorld(ranks).run(train, TrainConfig.make(**{**values, **changed}))[0]

    split = {"cp": 2, "attention": "all-gather", "micro_batch": 4}
    straight = run(**split, **TEXTS)
    run(**split, **TEXTS, steps=1, save=str(tmp_path))
    assert run(**split, **TEXTS, save=str(tmp_path), resume=True).digest == straight.digest
    plain, alone, piped = run(**split), run(1, micro_batch=4, **TEXTS), run(pp=2, **TEXTS, global_batch=4)
    for one, other in ((straight, alone), (piped, alone)):
        assert one.held_out == pytest.approx(other.held_out, rel=1e-5)
    assert straight.losses != pytest.approx(plain.losses, rel=1e-4)
