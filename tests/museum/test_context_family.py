"""Bugs of split sequences, planted: the tests of equality must turn red for each."""

import numpy as np
import pytest

from minidist.parallel.context import ring_attention
from tests.parallel import test_context as right


def test_bug_25_with_one_replica_context_parallel_gradients_are_never_synchronised(monkeypatch):
    """Only the data axis is summed, and it has one rank: every rank keeps the gradient of its own tokens."""
    monkeypatch.setattr(right, "gradient_axes", lambda mesh: mesh["dp"])
    with pytest.raises(AssertionError, match="gradients"):
        right.assert_model(2, "gpt", "ring", "sgd")


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_positions_restart_on_each_context_parallel_rank(monkeypatch, name, kind):
    """Each rank numbers its own tokens from 0: rotary angles, and rows of the position table, are those of others."""
    module = {"gpt": right.GPT, "llama": right.Llama}[name]
    forward = module.forward

    def restarted(self, tokens, targets=None, divisor=None, positions=None):
        return forward(self, tokens, targets, divisor, np.arange(tokens.shape[1]))

    monkeypatch.setattr(module, "forward", restarted)
    with pytest.raises(AssertionError, match="loss"):
        right.assert_model(2, name, kind, "sgd")


def test_the_online_softmax_keeps_the_maximum_of_the_last_block_only(monkeypatch):
    """Right in exact arithmetic; with large scores what came before is scaled up until it overflows."""
    monkeypatch.setattr(ring_attention.xp, "maximum", lambda a, b: b)
    with pytest.raises((AssertionError, FloatingPointError)):
        right.test_large_scores_do_not_overflow_in_the_online_softmax()


def test_gradients_of_keys_and_values_do_not_travel_home(monkeypatch):
    monkeypatch.setattr(ring_attention.RingAttention, "_pass_on", lambda self, gradients, shape: ([], gradients))
    with pytest.raises(AssertionError):
        right.test_packed_attention_forward_and_backward(2, "ring", 16)
