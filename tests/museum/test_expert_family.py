"""Bugs of dealt-out experts, planted: the tests must turn red for each."""

import pytest

from minidist.nn import experts
from minidist.parallel.expert import dispatch
from tests.parallel import test_expert as right


def test_expert_gradients_summed_over_the_expert_axis_too(monkeypatch):
    """Tiles of different experts are added: shapes fit, names fit."""
    monkeypatch.setattr(dispatch, "bool", lambda value: False, raising=False)
    with pytest.raises(AssertionError):
        right.assert_experts((1, 2), 1, 12.0, "sgd")


def test_capacity_of_the_whole_batch_instead_of_the_group(monkeypatch):
    """The parallel layer gives out as many slots as one device would for all groups together."""
    correct = experts.expert_capacity
    expected = right.one_device(2, 1, 1.0, "sgd")
    monkeypatch.setattr(experts, "expert_capacity", lambda tokens, *rest: correct(2 * tokens, *rest))
    history = right.SimWorld(2).run(right.expert_train, 1, 1.0, "sgd", (1, 2))[0]
    with pytest.raises(AssertionError):
        right.assert_equal(history, expected[0])


def test_slots_come_back_in_the_order_of_the_way_there(monkeypatch):
    original = dispatch.exchange

    def wrong(comm, slots, to_experts):
        result = original(comm, slots, to_experts)
        return result if to_experts else result[::-1].copy()

    monkeypatch.setattr(dispatch, "exchange", wrong)
    with pytest.raises(AssertionError):
        right.assert_experts((1, 2), 1, 12.0, "sgd")
