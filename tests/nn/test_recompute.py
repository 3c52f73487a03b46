"""Recomputation changes no bit, and what a block keeps is a closed form to the byte."""

import numpy as np
import pytest

from minidist.base.errors import UsageError
from minidist.base.memory import account_memory
from minidist.base.random import batch_coordinates
from minidist.nn import GPT, MLP, GPTConfig, Module
from minidist.nn.recompute import recompute

CHOICES = ["none", "full", "selective"]
QUERIES = 64  # rows of a block of the attention


def gpt(layers, what, length, width, heads, dropout):
    return recompute(GPT(GPTConfig(11, length, width, layers, heads, dropout, attention_dropout=dropout)), what)


def step(model, batch, length):
    tokens = np.random.default_rng(0).integers(0, 11, (batch, length + 1))
    with batch_coordinates(0, 0):
        return model(tokens[:, :-1], tokens[:, 1:], float(batch * length))


def kept(layers, what, batch, length, width, heads, dropout):
    """Bytes of activations alive between forward and backward."""
    model = gpt(layers, what, length, width, heads, dropout)
    with account_memory() as account:
        loss = step(model, batch, length)
        assert loss.size == 1
        return account.by_purpose["activation"]


def block_form(what, b, s, h, a, dropout):
    """Bytes that one fused block of float32 keeps.

    16 sbh values: two sums of the residual stream, two normalised inputs, queries, keys and values, the attention's output,
    and in the MLP the inner width of 4 h twice (GELU's result and derivative); 2 sb of the norms' reciprocal deviations;
    the scores up to the diagonal block, with a sum a row. With dropout masks of 1 byte: two of sbh, and one of as²b.
    """
    if what == "full":
        return 4 * s * b * h
    attention = what == "none"
    scores = sum(min(QUERIES, s - first) * (min(first + QUERIES, s) + 1) for first in range(0, s, QUERIES))
    masks = 2 * s * b * h + (a * s * s * b if attention else 0) if dropout else 0
    return 4 * (16 * s * b * h + 2 * s * b + (a * b * scores if attention else 0)) + masks


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("what", CHOICES)
@pytest.mark.parametrize("sizes", [(2, 48, 16, 2), (2, 48, 32, 2), (1, 96, 16, 2), (2, 150, 16, 4)])
def test_a_block_keeps_its_closed_form_to_the_byte(what, sizes, dropout):
    a_block = kept(3, what, *sizes, dropout) - kept(2, what, *sizes, dropout)
    assert a_block == block_form(what, *sizes, dropout)


@pytest.mark.parametrize("what", CHOICES[1:])
def test_gradients_have_the_same_bits_with_dropout(what):
    results = []
    for choice in ("none", what):
        model = gpt(2, choice, 10, 16, 2, 0.2)
        loss = step(model, 3, 10)
        loss.backward()
        results.append([loss.data, *(parameter.grad for parameter in model.parameters())])
    for plain, again in zip(*results, strict=True):
        assert np.array_equal(plain, again)


def test_an_mlp_recomputes_its_layers():
    from minidist.autograd import Tensor

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
