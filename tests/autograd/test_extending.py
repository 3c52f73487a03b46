"""Functions from outside, backward hooks, recomputation and the FLOP counter."""

import numpy as np
import pytest

from minidist import nn
from minidist.base.coordinates import batch_coordinates
from minidist.base.flop_counter import FlopCounter, current_flop_counter
from minidist.base.memory import account_memory
from minidist.core import autograd as ag
from minidist.core.autograd import AutogradError, Parameter, ShapeError, Tensor, backward_hook
from minidist.core.nn import MLP, FlatParameters, Linear, Sequential
from minidist.nn import Dropout, Function, causal_attention_heads, checkpoint, gradcheck
from tests.cases import each


def draws(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


class ScaledProduct(Function):
    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.a, ctx.b, ctx.scale, ctx.flops = a, b, scale, 7
        return a * b * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.b * ctx.scale, grad * ctx.a * ctx.scale if ctx.needs_input_grad[1] else None


def test_function_is_an_operation():
    for parameters in (False, True):
        gradcheck(lambda a, b: ScaledProduct.apply(a, b, 3.0), draws(2, 3), draws(2, 3, seed=1), parameters=parameters)
    a = Tensor(draws(2), requires_grad=True)
    ScaledProduct.apply(a, Tensor(draws(2)), 1.0).sum().backward()
    with FlopCounter() as counter:
        ScaledProduct.apply(a, a, 1.0)
    assert counter.take()[0][0] == 7


def test_function_that_returns_one_array_for_both_inputs():
    class Both(Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, grad):
            shared = grad * 1.0
            return shared, shared

    x = Tensor(draws(3), requires_grad=True)
    a, b = x * 1.0, x * 2.0
    earlier = a * 4.0  # adds to a's gradient while b's, the same array, still waits
    (Both.apply(a, b) + earlier).sum().backward()
    np.testing.assert_array_equal(x.grad, [7, 7, 7])


def test_function_errors():
    class Wrong(Function):
        answer = None

        @staticmethod
        def forward(ctx, a):
            return a * 1.0

        @classmethod
        def backward(cls, ctx, grad):
            return cls.answer

    x = Tensor(draws(3), requires_grad=True)
    with pytest.raises(AutogradError, match=r"Wrong\.backward gave no gradient"):
        Wrong.apply(x).sum().backward()
    Wrong.answer = np.ones(2)
    with pytest.raises(ShapeError, match=r"Wrong.backward: gradient 0 has shape \(2,\); the argument has \(3,\)"):
        Wrong.apply(x).sum().backward()
    Wrong.answer = (np.ones(3), np.ones(3))
    with pytest.raises(AutogradError, match="2 gradients for 1"):
        Wrong.apply(x).sum().backward()


def test_backward_hook_is_called_when_the_gradient_is_complete():
    events = []
    w = Parameter(draws(2, 2), name="w")
    w.register_post_accumulate_grad_hook(lambda p: events.append("w ready"))
    x = Tensor(draws(1, 2), requires_grad=True)
    inside = backward_hook(x, lambda _: events.append("backward done"))
    y = backward_hook(inside @ w + inside, lambda _: events.append("backward begins"))
    y.sum().backward()
    assert events == ["backward begins", "w ready", "backward done"]
    np.testing.assert_allclose(x.grad, 1 + np.ones((1, 2)) @ w.data.T)
    assert backward_hook(Tensor(1.0), lambda _: None).node is None


# --- recomputation ---


def watch(parameters):
    """The names of the parameters in the order in which they get ready."""
    names = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: names.append(p.name))
    return names


def gradients(recompute, mode="now"):
    model = Sequential(Linear(4, 6, activation="gelu"), Dropout(0.4), Linear(6, 6), Dropout(0.3), Linear(6, 2))
    model.initialize(1)
    flat = FlatParameters(model.parameters())
    x = Tensor(draws(5, 4).astype(np.float32), requires_grad=True)
    ready = watch(flat.parameters)
    with batch_coordinates(step=2, sample_offset=10, seed=4):
        first, rest = Sequential(*model.layers[:2]), Sequential(*model.layers[1:])  # the first dropout runs twice
        h = checkpoint(first, x) if recompute else first(x)
        y = checkpoint(rest, h) if recompute else rest(h)
        loss = (y * y).sum()
    # backward runs outside of the coordinates: the replay brings its own
    deferred = loss.backward(weight_gradients=mode)
    if deferred is not None:
        assert not ready
        deferred.run()
    return loss.item(), flat.grad.copy(), x.grad, ready


@pytest.mark.parametrize("mode", ["now", "deferred"])
def test_recomputation_replays_dropout_and_changes_no_bit(mode):
    """Museum 14: recomputation draws a new dropout mask."""
    for a, b in zip(gradients(False), gradients(True, mode), strict=True):
        np.testing.assert_array_equal(a, b)


def test_recomputation_counts_sites_across_segments():
    w = Parameter(draws(3, 3), name="w")
    seen = []
    x = Tensor(draws(2, 3), requires_grad=True)
    y = checkpoint(lambda t: nn.tanh(t @ w) @ w, x) @ w
    y = checkpoint(lambda t: t @ w, y)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.copy()))
    y.sum().backward()
    (gradient,) = seen
    np.testing.assert_array_equal(gradient, w.grad)  # after the fourth site
    plain = Parameter(w.data.copy())
    (nn.tanh(Tensor(x.data) @ plain) @ plain @ plain @ plain).sum().backward()
    np.testing.assert_allclose(w.grad, plain.grad, rtol=1e-12)


def test_recomputation_of_a_segment_whose_inputs_need_no_gradient():
    w, read_only = Parameter(draws(3, 3), name="w"), Parameter(draws(3), name="read only")
    seen = watch([w, read_only])
    x = Tensor(draws(2, 3))
    checkpoint(lambda t: t @ w + Tensor(read_only.data), x).sum().backward()
    np.testing.assert_allclose(w.grad, x.data.T @ np.ones((2, 3)))
    assert sorted(seen) == ["read only", "w"]
    np.testing.assert_array_equal(read_only.grad, np.zeros(3))


def test_recomputation_nests_and_passes_other_arguments():
    w = Parameter(draws(3, 3), name="w")

    def inner(t, scale):
        return nn.tanh(t @ w) * scale

    def outer(t):
        return checkpoint(inner, t, 2.0) @ w

    x = Tensor(draws(2, 3), requires_grad=True)
    checkpoint(outer, x).sum().backward()
    y = Tensor(x.data, requires_grad=True)
    kept, w.grad = w.grad.copy(), None
    (inner(y, 2.0) @ w).sum().backward()
    np.testing.assert_array_equal(x.grad, y.grad)
    np.testing.assert_array_equal(kept, w.grad)
    with ag.no_grad():
        assert checkpoint(outer, x).node is None
    with pytest.raises(AutogradError, match="must return a Tensor or a tuple of Tensors, not list"):
        checkpoint(lambda t: [t], x)


@each("used", [(0, 1), (1,), (0,)])
@each("mode", ["now", "deferred"])
def test_a_recomputed_segment_may_return_several_tensors(used, mode):
    """Each output's gradient reaches the replay, whichever of them the loss uses; what they share is summed to the same
    bits.
    """

    def segment(t, w):
        h = nn.tanh(t @ w)
        return h @ w + t, (h * h).sum()

    results = []
    for run in (lambda t, w: checkpoint(segment, t, w), segment):
        w, x = Parameter(draws(3, 3, seed=1), name="w"), Tensor(draws(2, 3), requires_grad=True)
        ready = watch([w])
        outputs = run(x, w)
        loss = Tensor(np.zeros(()))
        for place in used:
            loss = loss + (outputs[place] * outputs[place]).sum()
        deferred = loss.backward(weight_gradients=mode)
        if deferred is not None:
            deferred.run()
        results.append((loss.data, x.grad, w.grad))
        assert ready == ["w"]
    for again, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(again, plain)


def test_a_replay_adds_nothing_to_a_gradient_that_others_hold():
    """An output that is used inside the segment, too: its sum must not be made in the array that the other summand
    received.
    """
    w, other, x = (
        Parameter(draws(3, 3), name="w"),
        Tensor(draws(2, 3), requires_grad=True),
        Tensor(draws(2, 3), requires_grad=True),
    )

    def segment(t):
        h = t @ w
        return h, (h * h).sum()

    h, squares = checkpoint(segment, x)
    (((h + other) * 3.0).sum() + squares).backward()
    np.testing.assert_array_equal(other.grad, np.full((2, 3), 3.0))


def test_recomputation_keeps_only_the_inputs_of_segments():
    def peak(recompute):
        x = Tensor(draws(100, 50), requires_grad=True)
        w = Parameter(draws(50, 50), name="w")

        def segment(t):
            for _ in range(4):
                t = nn.tanh(t @ w)
            return t

        with account_memory() as account:
            y = x
            for _ in range(4):
                y = checkpoint(segment, y) if recompute else segment(y)
            after_forward, forward_peak = account.current, account.peak
            loss = y.sum()
            del y
            loss.backward()
        return after_forward, account.peak, forward_peak

    whole, recomputed = peak(False), peak(True)
    assert recomputed[0] == 4 * 100 * 50 * 8
    assert whole[0] == 4 * 4 * 100 * 50 * 8  # tanh keeps its result, and nothing keeps the products
    assert recomputed[2] <= (3 + 3) * 100 * 50 * 8  # segments' inputs, and what one operation needs at a time
    assert recomputed[1] < 0.75 * whole[1]


# --- the FLOP counter ---


def test_meter_counts_forward_input_and_weight_gradients_apart():
    w, b = Parameter(draws(4, 3), name="w"), Parameter(draws(4), name="b")
    x = Tensor(draws(5, 3), requires_grad=True)
    product = 2 * 5 * 3 * 4
    with FlopCounter() as counter:
        loss = ag.linear(x, w, b).sum()
        forward = counter.take()
        assert [flops for flops, _ in forward] == [product, 20]
        assert forward[0][1] == 8 * (15 + 12 + 4 + 20)
        deferred = loss.backward(weight_gradients="deferred")
        assert [flops for flops, _ in counter.take()] == [20, product]
        deferred.run()
        assert [flops for flops, _ in counter.take()] == [product, 20]
        assert counter.take() == []
    assert counter.totals["weight_gradient"][0] == product + 20
    assert current_flop_counter() is None
    ag.linear(x, w, b)
    assert counter.take() == []


def test_meter_of_a_model_is_about_six_flops_a_weight_and_row():
    model = MLP([64, 128, 128, 16], bias=False)
    with FlopCounter() as counter:
        model(Tensor(draws(32, 64).astype(np.float32), requires_grad=True)).sum().backward()
    weights = sum(p.size for p in model.parameters())
    total = sum(flops for flops, _ in counter.take())
    assert 6 * 32 * weights <= total <= 6.2 * 32 * weights


def test_meter_of_attention_and_layer_norm():
    x = Tensor(draws(2, 8, 24), requires_grad=True)
    with FlopCounter() as counter:
        ag.causal_attention(x, 2).sum().backward()
        assert counter.totals["input_gradient"][0] == 2 * 2 * 8 * 8 * 8 * 5 // 2 + 2 * 8 * 8
    q = Tensor(draws(2, 2, 8, 4), requires_grad=True)
    w, b = Parameter(np.ones(24)), Parameter(np.ones(24), requires_grad=False)
    with FlopCounter() as counter:
        causal_attention_heads(q, q, q).sum().backward()
        assert counter.totals["input_gradient"][0] == 3 * (2 * 2 * 8 * 8 * 8 * 5 // 6) + q.size
        ag.layer_norm(x, w, b).sum().backward()
    assert counter.totals["weight_gradient"] == (3 * x.size, 2 * x.data.nbytes)  # the frozen bias costs nothing


def test_meter_switched_on_after_the_forward_counts_nothing():
    x, w = Tensor(draws(2), requires_grad=True), Parameter(draws(2))
    loss = (x * w).sum()
    with FlopCounter() as counter:
        loss.backward()
    assert sum(flops for flops, _ in counter.take()) == 0
