"""Recomputation changes no bit, and what a block keeps is a closed form to the byte."""

import ml_dtypes
import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.base.memory import account_memory
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, MLP, GPTConfig, Module
from minidist.nn.recompute import recompute
from minidist.planning import block_bytes
from tests.cases import each
from tests.nn.composite_block import CompositeBlock

CHOICES = ["none", "full", "selective"]


def gpt(layers, what, length, width, heads, dropout, dtype=np.float32):
    return recompute(GPT(GPTConfig(11, length, width, layers, heads, dropout, attention_dropout=dropout), dtype), what)


def step(model, batch, length):
    tokens = np.random.default_rng(0).integers(0, 11, (batch, length + 1))
    with batch_coordinates(0, 0):
        return model(tokens[:, :-1], tokens[:, 1:], float(batch * length))


def kept(layers, what, batch, length, width, heads, dropout, dtype=np.float32):
    """Bytes of activations alive between forward and backward."""
    model = gpt(layers, what, length, width, heads, dropout, dtype)
    with account_memory() as account:
        loss = step(model, batch, length)
        assert loss.size == 1
        return account.by_purpose["activation"]


def block_form(what, b, s, h, a, dropout):
    """Bytes that one fused block keeps: its input only; all; or all but the scores."""
    if what == "full":
        return 4 * s * b * h
    return block_bytes.fused(s, b, h, a if what == "none" else 0, dropout=dropout > 0)


@each("dropout", [0.0, 0.1])
@each("what", CHOICES)
@each("sizes", [(2, 48, 16, 2), (2, 48, 32, 2), (1, 96, 16, 2), (2, 150, 16, 4)])
def test_a_block_keeps_its_closed_form_to_the_byte(what, sizes, dropout):
    a_block = kept(3, what, *sizes, dropout) - kept(2, what, *sizes, dropout)
    assert a_block == block_form(what, *sizes, dropout)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 48, 16, 2), (1, 150, 16, 4)])
def test_a_fused_block_of_2_byte_values_keeps_its_closed_form(sizes, dtype):
    a_block = kept(3, "none", *sizes, 0.1, dtype) - kept(2, "none", *sizes, 0.1, dtype)
    b, s, h, a = sizes
    assert a_block == block_bytes.fused(s, b, h, a, 2, dropout=True)


@each("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@each("sizes", [(2, 48, 32, 2), (1, 70, 16, 4), (3, 8, 64, 1)])
def test_the_composite_block_keeps_what_the_paper_counts(sizes, dtype):
    """34 s b h + 5 a s^2 b with values of 2 bytes and masks of 1, and the two norms' deviations."""
    b, s, h, a = sizes
    blocks = [CompositeBlock(GPTConfig(11, s, h, 2, a, 0.1), dtype) for _ in range(2)]
    with account_memory() as account, batch_coordinates(0, 0):
        x = Tensor(np.random.default_rng(0).standard_normal((b, s, h)).astype(dtype), requires_grad=True)
        x = blocks[0](x)
        first = account.by_purpose["activation"]
        x = blocks[1](x)
        kept = account.by_purpose["activation"] - first
    itemsize = np.dtype(dtype).itemsize
    assert x.dtype == dtype
    # Our layer norms also keep the reciprocal deviation of each row, at least in float32.
    norms = 2 * s * b * max(itemsize, 4)
    assert kept == block_bytes.unfused(s, b, h, a, itemsize) + norms
    if itemsize == 2:
        assert block_bytes.unfused(s, b, h, a) == 34 * s * b * h + 5 * a * s * s * b


def test_the_composite_block_computes_what_the_fused_one_does():
    from minidist.core.nn.gpt import Block

    config = GPTConfig(11, 20, 16, 2, 2)
    fused, composite = Block(config, np.float64), CompositeBlock(config, np.float64, seed=5)
    for (_, mine), (_, theirs) in zip(fused.named_parameters(), composite.named_parameters(), strict=True):
        mine.data[...] = theirs.data
    x = np.random.default_rng(0).standard_normal((3, 20, 16))
    results = []
    for block in (fused, composite):
        leaf = Tensor(x, requires_grad=True)
        y = block(leaf)
        (y * y).sum().backward()
        results.append([y.data, leaf.grad, *(p.grad for p in block.parameters())])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def have_the_same_bits(models):
    """Assert that the loss and the gradients of two models are the same after a step."""
    results = []
    for model in models:
        loss = step(model, 3, 10)
        loss.backward()
        results.append([loss.data, *(parameter.grad for parameter in model.parameters())])
    for plain, again in zip(*results, strict=True):
        assert np.array_equal(plain, again)


@pytest.mark.parametrize("what", CHOICES[1:])
def test_gradients_have_the_same_bits_with_dropout(what):
    have_the_same_bits(gpt(2, choice, 10, 16, 2, 0.2) for choice in ("none", what))


@pytest.mark.parametrize(("what", "top_k"), [("full", 1), ("full", 2), ("sqrt", 1), ("budget:80000", 2)])
def test_experts_are_balanced_by_the_same_bits(what, top_k):
    """The balancing loss is computed inside the blocks and comes out of a recomputed one with its gradient."""
    config = GPTConfig(11, 10, 16, 3, 2, 0.2, n_experts=4, expert_top_k=top_k, aux_loss_weight=1.0)
    have_the_same_bits(recompute(GPT(config), choice, None, (3, 10, 16), np.float32) for choice in ("none", what))


def test_an_mlp_recomputes_its_layers():
    results = []
    for choice in ("none", "full"):
        model = recompute(MLP([5, 7, 3]), choice)
        model(Tensor(np.ones((4, 5), np.float32))).sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*results, strict=True):
        assert np.array_equal(plain, again)


@pytest.mark.parametrize(
    ("model", "what", "sentence"),
    [
        (lambda: MLP([2, 2]), "some", "none, full, selective"),
        (lambda: MLP([2, 2]), "selective", "use 'full'"),
        (Module, "full", "wrap yours in checkpoint"),
    ],
)
def test_wrong_choices_are_one_sentence(model, what, sentence):
    with pytest.raises(UsageError, match=sentence):
        recompute(model(), what)
