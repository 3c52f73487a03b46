"""Deferred weight gradients are counted where they run, and a recorder gets copies of arrays."""

import numpy as np

from minidist.base.flop_counter import FlopCounter
from minidist.core.autograd import Parameter, Tensor, contribution_recorder


def test_deferred_weight_gradients_count_on_the_meter_that_is_on_when_they_run():
    weight = Parameter(np.ones((3, 2)))
    with FlopCounter() as during_backward:
        deferred = (Tensor(np.ones((4, 3))) @ weight).sum().backward(weight_gradients="deferred")
    with FlopCounter() as during_run:
        deferred.run()
    assert "weight_gradient" not in during_backward.totals
    assert during_run.totals["weight_gradient"][0] >= 2 * 4 * 3 * 2


def test_a_recorded_contribution_is_a_copy():
    weight, contribution, caught = Parameter(np.zeros(2)), np.ones(2), []
    token = contribution_recorder.set(lambda parameter, array: caught.append(array))
    try:
        weight.accumulate(contribution)
    finally:
        contribution_recorder.reset(token)
    contribution[...] = 7.0
    assert caught[0].tolist() == [1.0, 1.0]
