"""Bugs of the museum, planted into the engine: each must be caught, where it can be by a message with the cause.

Each check passes on the engine as it is and fails, or is answered by an error of the engine, with the bug in it.
"""

import contextlib
import weakref

import numpy as np
import pytest

from minidist import autograd as ag
from minidist.autograd import DtypeError, Parameter, Tensor, checkpoint, operands
from minidist.autograd.backward import BackwardPass, DeferredWeights
from minidist.base.random import batch_coordinates
from minidist.nn import Dropout, FlatParameters, Linear, Sequential


def check_two_sites(mode):
    """sum(x @ w @ w): the gradient of w is the sum of two terms, one a site."""
    x, w = np.array([[1.0, 2.0]]), Parameter(np.array([[1.0, 3.0], [2.0, 5.0]]), name="w")
    deferred = (Tensor(x) @ w @ w).sum().backward(weight_gradients=mode)
    if deferred is not None:
        deferred.run()
    ones = np.ones((1, 2))
    np.testing.assert_array_equal(w.grad, x.T @ (ones @ w.data.T) + (x @ w.data).T @ ones)


@pytest.mark.parametrize("mode", ["now", "deferred"])
def test_22_a_weight_used_at_two_sites_is_double_counted(mode, monkeypatch):
    check_two_sites(mode)
    once = BackwardPass.contribute if mode == "now" else DeferredWeights.add

    def once_for_each_site_that_exists(self, parameter, *work):
        for _ in range(2):
            with contextlib.suppress(KeyError):
                once(self, parameter, *work)

    if mode == "now":
        monkeypatch.setattr(BackwardPass, "contribute", once_for_each_site_that_exists)
    else:
        monkeypatch.setattr(DeferredWeights, "add", once_for_each_site_that_exists)
    with pytest.raises(AssertionError):
        check_two_sites(mode)


def check_float32_stays():
    w = Parameter(np.ones(3, np.float32), name="w")
    y = w * np.float64(0.5) + np.float64(1)
    assert y.dtype == np.float32
    y.sum().backward()
    assert w.grad.dtype == np.float32


def test_26_a_numpy_scalar_promotes_float32(monkeypatch):
    check_float32_stays()
    monkeypatch.setattr(operands, "as_tensor", lambda value, like: Tensor(value))
    with pytest.raises(DtypeError, match="mul: dtypes float32 and float64 differ"):
        check_float32_stays()
    monkeypatch.setattr(
        "minidist.autograd.elementwise.pair",
        lambda name, a, b: tuple(t if isinstance(t, Tensor) else Tensor(t) for t in (a, b)),
    )
    with pytest.raises(AssertionError):
        check_float32_stays()


def check_replayed_mask():
    model = Sequential(Linear(8, 8), Dropout(0.5)).initialize(1)
    x = np.ones((4, 8), np.float32)
    gradients = []
    for run in (model, lambda t: checkpoint(model, t)):
        leaf = Tensor(x, requires_grad=True)
        with batch_coordinates(step=1):
            run(leaf).sum().backward()
        gradients.append(leaf.grad)
    np.testing.assert_array_equal(*gradients)


def test_14_recomputation_draws_a_new_mask(monkeypatch):
    check_replayed_mask()
    monkeypatch.setitem(checkpoint.__globals__, "replay_calls", lambda calls: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        check_replayed_mask()


def check_released_weights_are_gone():
    layer = Linear(3, 3)
    flat = FlatParameters(layer.parameters())
    loss = layer(Tensor(np.ones((2, 3), np.float32), requires_grad=True)).sum()
    dead = weakref.ref(flat.release())
    assert dead() is None
    assert loss.requires_grad


def test_19_the_tape_keeps_released_weights_alive(monkeypatch):
    check_released_weights_are_gone()
    monkeypatch.setattr(Parameter, "saved", lambda self: Tensor(self.data))
    with pytest.raises(AssertionError):
        check_released_weights_are_gone()


def check_masked_shards():
    logits, targets = np.linspace(-1, 1, 15).reshape(5, 3), np.array([0, -100, 2, 1, -100])
    whole = ag.cross_entropy(Tensor(logits), targets).item()
    shards = (slice(0, 2), slice(2, 5))
    assert sum(ag.cross_entropy(Tensor(logits[s]), targets[s], divisor=3).item() for s in shards) == pytest.approx(
        whole
    )


def test_4_the_mean_of_means_over_masked_shards(monkeypatch):
    check_masked_shards()
    own = ag.cross_entropy
    monkeypatch.setattr(ag, "cross_entropy", lambda logits, targets, divisor=None: own(logits, targets) * 0.5)
    with pytest.raises(AssertionError):
        check_masked_shards()
