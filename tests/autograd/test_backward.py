"""The backward pass as strategies see it: order, ownership, readiness, deferral, versions, and what is freed when."""

import gc
import weakref

import numpy as np
import pytest

from minidist import nn
from minidist.base.memory import account_memory
from minidist.core import autograd as ag
from minidist.core.autograd import (
    AutogradError,
    BackwardObserver,
    Node,
    Parameter,
    ShapeError,
    Tensor,
    contribution_recorder,
    no_grad,
)
from minidist.core.autograd.tensor import set_grad_enabled
from minidist.core.nn import MLP, FlatParameters
from tests.cases import each


def draws(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def site_gradients(x, w):
    """Gradient of sum(x @ w @ w) with respect to w, by hand: one term a site."""
    ones = np.ones((x.shape[0], w.shape[1]))
    return x.T @ (ones @ w.T) + (x @ w).T @ ones


@each("product", [ag.matmul, lambda a, w: ag.linear(a, w, weight_is_in_out=True)])
@each("mode", ["now", "deferred", "recorded"])
def test_a_weight_used_at_two_sites_counts_twice_once_each(product, mode):
    """Museum 22: the weight-gradient pass double counts `x @ w @ w`."""
    x, w = draws(3, 4), Parameter(draws(4, 4, seed=1), name="w")
    loss = product(product(Tensor(x), w), w).sum()
    expected = site_gradients(x, w.data)
    if mode == "now":
        loss.backward()
    elif mode == "deferred":
        deferred = loss.backward(weight_gradients="deferred")
        assert w.grad is None
        deferred.run()
        with pytest.raises(AutogradError, match="ran already"):
            deferred.run()
    else:
        received = []
        token = contribution_recorder.set(lambda p, c: received.append((p, c)))
        loss.backward()
        contribution_recorder.reset(token)
        assert [p for p, _ in received] == [w, w]
        assert w.grad is None
        # later site first: backward order
        np.testing.assert_allclose(received[0][1], (x @ w.data).T @ np.ones((3, 4)), rtol=1e-12)
        np.testing.assert_allclose(received[0][1] + received[1][1], expected, rtol=1e-12)
        return
    np.testing.assert_allclose(w.grad, expected, rtol=1e-12)


def test_deferred_weights_equal_immediate_ones_bit_for_bit():
    x, targets = draws(6, 5).astype(np.float32), np.array([0, 1, 2, 0, 1, 2])
    grads = []
    for mode in ("now", "deferred"):
        model = MLP([5, 7, 7, 3], "gelu")
        flat = FlatParameters(model.parameters())
        leaf = Tensor(x, requires_grad=True)
        answer = ag.cross_entropy(model(leaf), targets).backward(weight_gradients=mode)
        assert leaf.grad is not None
        if answer is not None:
            assert all(p.grad is None for p in model.parameters())
            answer.run()
        grads.append((flat.grad.copy(), leaf.grad))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_array_equal(a, b)


def test_deferred_weights_run_in_the_order_of_deferral():
    model = MLP([2, 3, 2], bias=False)
    order = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: order.append(p.name))
    model(Tensor(draws(4, 2).astype(np.float32))).sum().backward(weight_gradients="deferred").run()
    assert order == ["layers.1.weight", "layers.0.weight"]


def test_first_contribution_overwrites_and_later_ones_are_added_whole():
    w = Parameter(np.zeros(2, np.float32), name="w")
    big, small = np.float32(2**24), np.float32(1)
    w.accumulate(np.array([1, 1], np.float32))
    w.zero_grad()
    assert w.grad is None
    outs = []

    def contribution(value):
        def compute(out):
            outs.append(out)
            target = np.empty(2, np.float32) if out is None else out
            target[...] = value
            return target

        return compute

    for value in (big, small, -big):
        w.accumulate(contribution(value))
    assert outs[0] is not None
    assert outs[1] is None
    assert outs[2] is None
    np.testing.assert_array_equal(w.grad, [0, 0])  # (big + 1) - big in float32, in this order
    with pytest.raises(ShapeError, match=r"'w' has shape \(3,\)"):
        w.accumulate(np.zeros(3, np.float32))


def test_each_parameter_is_ready_once_after_its_last_contribution():
    tied, other, unused = (Parameter(draws(3, 3, seed=i), name=n) for i, n in enumerate(["tied", "other", "unused"]))
    seen = []
    for parameter in (tied, other, unused):
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append((p.name, p.grad.copy())))
    loss = (nn.tanh(Tensor(draws(2, 3)) @ tied @ other) @ tied).sum()
    loss.backward()
    assert [name for name, _ in seen] == ["other", "tied"]
    for parameter, (_, gradient) in zip((other, tied), seen, strict=True):
        np.testing.assert_array_equal(gradient, parameter.grad)  # nothing was added after it was ready
    assert unused.grad is None


class Log(BackwardObserver):
    """An observer that writes down what it is told."""

    def __init__(self):
        self.events = []

    def started(self):
        self.events.append("started")

    def parameter_ready(self, parameter):
        self.events.append(parameter.name)

    def node_done(self):
        self.events.append("node")

    def finished(self):
        self.events.append("finished")


def test_an_observer_joins_when_it_is_given_registered_or_attached():
    def run(register=None, hook=None, **options):
        w, b = Parameter(draws(3, 3), name="w"), Parameter(draws(3), name="b")
        if register is not None:
            w.observers.append(register)
        y = Tensor(draws(2, 3)) @ w
        y = y if hook is None else ag.backward_hook(y, lambda running: running.attach(hook))
        (y.tanh() + b).sum().backward(**options)

    # Nodes in backward order: sum, add (b gets ready), tanh, the hook, the product (w gets ready).
    given, registered, attached = Log(), Log(), Log()
    run(observers=[given])
    assert given.events == ["started", "node", "b", "node", "node", "w", "node", "finished"]
    run(register=registered)
    assert registered.events == ["started", "w", "node", "finished"]
    run(hook=attached)
    assert attached.events == ["started", "node", "node", "finished"]
    both = Log()
    run(register=both, hook=both)
    assert both.events == ["started", "node", "w", "node", "finished"]  # it joins once


def test_an_observer_is_not_told_that_a_pass_finished_when_an_error_ended_it():
    def fail(_):
        raise ZeroDivisionError

    log = Log()
    with pytest.raises(ZeroDivisionError):
        ag.backward_hook(Tensor(draws(2), requires_grad=True), fail).sum().backward(observers=[log])
    assert log.events == ["started", "node"]
    assert not ag.current_pass()


def test_a_tensor_used_twice_gets_both_gradients_and_nobody_elses():
    """Ownership: `add` hands the same array to both inputs, and each then receives a second contribution."""
    a, b = Tensor(draws(3), requires_grad=True), Tensor(draws(3, seed=1), requires_grad=True)
    x, y = a * 2.0, b * 3.0
    loss = ((x + y) + x.tanh() + y.exp() + x).sum()
    loss.backward()
    np.testing.assert_allclose(a.grad, 2 * (2 + 1 - np.tanh(2 * a.data) ** 2), rtol=1e-12)
    np.testing.assert_allclose(b.grad, 3 * (1 + np.exp(3 * b.data)), rtol=1e-12)


def test_leaf_gradients_belong_to_the_leaf_and_add_up():
    a, b = Tensor(np.ones(2), requires_grad=True), Tensor(np.ones(2), requires_grad=True)
    gradient = np.array([1.0, 2.0])
    (a + b).backward(gradient)
    assert a.grad is not b.grad
    a.grad *= 10
    (a + b).backward(gradient)
    np.testing.assert_array_equal(a.grad, [11, 22])
    np.testing.assert_array_equal(b.grad, [2, 4])
    np.testing.assert_array_equal(gradient, [1, 2])


def test_only_what_needs_a_gradient_is_recorded():
    w = Parameter(np.ones((2, 2)), name="w")
    frozen = Parameter(np.ones((2, 2)), requires_grad=False, name="frozen")
    assert (Tensor(np.ones((1, 2))) @ frozen).node is None
    with no_grad():
        assert (Tensor(np.ones((1, 2))) @ w).node is None
        with set_grad_enabled(True):
            assert (Tensor(np.ones((1, 2))) @ w).requires_grad
    y = Tensor(np.ones((1, 2))) @ w @ frozen
    y.sum().backward()
    assert frozen.grad is None
    np.testing.assert_array_equal(w.grad, [[2, 2], [2, 2]])
    assert not y.detach().requires_grad


def test_second_backward_is_one_clear_error():
    x = Tensor(draws(2), requires_grad=True)
    y = x.exp()
    y.sum().backward()
    with pytest.raises(AutogradError, match=r"second backward through 'exp'"):
        (y * 2.0).sum().backward()


def test_backward_says_what_is_wrong():
    with pytest.raises(AutogradError, match=r"shape \(2,\) needs gradient="):
        Tensor(draws(2), requires_grad=True).exp().backward()
    with pytest.raises(ShapeError, match=r"gradient of shape \(3,\) for a tensor of shape \(2,\)"):
        Tensor(draws(2), requires_grad=True).exp().backward(np.ones(3))
    with pytest.raises(AutogradError, match="needs no gradient"):
        Tensor(1.0).backward()
    with pytest.raises(AutogradError, match="'now' or 'deferred'"):
        Tensor(1.0, requires_grad=True).backward(weight_gradients="later")


def test_backward_from_a_leaf_and_from_a_parameter():
    leaf, parameter = Tensor(np.array(3.0), requires_grad=True), Parameter(np.array(3.0))
    leaf.backward()
    parameter.backward()
    assert leaf.grad == 1
    assert parameter.grad == 1


def test_a_stashed_version_bound_again_serves_its_backward():
    w = Parameter(draws(3, 3), name="w")
    flat = FlatParameters([w])
    x = Tensor(draws(2, 3, seed=1), requires_grad=True)
    old, version = flat.data, flat.version
    loss = (x @ w).sum()
    flat.bind(old * 5)
    flat.updated()
    new, new_version = flat.data, flat.version
    flat.bind(old, version)
    loss.backward()
    np.testing.assert_allclose(x.grad, np.ones((2, 3)) @ old.reshape(3, 3).T)
    flat.bind(new, new_version)
    assert flat.version == 1


def test_nodes_hold_the_parameter_and_never_its_array():
    """Museum 19: weights that FSDP "frees" live on in the tape."""
    model = MLP([4, 5, 3], "gelu")
    flat = FlatParameters(model.parameters())
    extra = Parameter(np.ones(3, np.float32), name="extra")
    flat_extra = FlatParameters([extra])
    loss = ag.layer_norm(model(Tensor(draws(2, 4).astype(np.float32))) * extra, extra, extra).sum()
    copies = [flat.data.copy(), flat_extra.data.copy()]
    dead = weakref.ref(flat.release()), weakref.ref(flat_extra.release())
    assert dead[0]() is None
    assert dead[1]() is None
    with pytest.raises(AutogradError, match=r"'layers\.1\.weight' of shape \(3, 5\) is released|'extra'"):
        loss.backward()
    flat.bind(copies[0])
    flat_extra.bind(copies[1])


def test_an_abandoned_graph_is_freed_by_reference_counting_alone():
    gc.collect()
    gc.disable()
    try:
        with account_memory() as account:
            w = Parameter(draws(8, 8), name="w")
            y = Tensor(draws(4, 8))
            start = account.current
            for _ in range(50):
                y = ag.layer_norm(ag.gelu(y @ w).tanh() * 2.0, w[0], w[1])
            assert account.current > start
            dead = weakref.ref(y.data)
            del y
            assert dead() is None
            assert account.current == start
    finally:
        gc.enable()


def test_backward_frees_what_it_has_passed():
    live = []
    with account_memory() as account:
        x = Tensor(draws(1000), requires_grad=True)
        y = x
        for _ in range(10):
            y = y.tanh()
        peak_forward = account.current
        loss = y.sum()
        del y

        class Watch(BackwardObserver):
            def node_done(self):
                live.append(account.by_purpose["activation"])

        loss.backward(observers=[Watch()])
    assert peak_forward >= 10 * 8000
    assert live == sorted(live, reverse=True)
    assert live[-1] <= 16  # the loss itself


def test_deep_graphs_do_not_recurse():
    x = Tensor(np.ones(1), requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1.0
    y.backward()
    assert x.grad == 1
    y = x
    for _ in range(20_000):
        y = y + 1.0
    del y  # deallocation, too


def test_nodes_are_visited_newest_first():
    order = []
    x = Tensor(np.ones(1), requires_grad=True)
    a = ag.backward_hook(x * 1.0, lambda _: order.append("a"))
    b = ag.backward_hook(x * 1.0, lambda _: order.append("b"))
    c = ag.backward_hook(a * b, lambda _: order.append("c"))
    (c + a).sum().backward()
    assert order == ["c", "b", "a"]


def test_receive_adds_in_place_only_what_it_owns():
    node, shared = Node("x"), np.ones(2)
    node.receive(shared, fresh=False)
    node.receive(np.ones(2), fresh=True)
    node.receive(np.ones(2), fresh=False)
    np.testing.assert_array_equal(node.grad, [3, 3])
    np.testing.assert_array_equal(shared, [1, 1])


def test_observers_are_told_in_order_the_parameters_own_before_those_of_the_pass():
    told = []

    class Noting(BackwardObserver):
        def __init__(self, name):
            self.name = name

        def started(self):
            told.append(f"{self.name} started")

        def parameter_ready(self, parameter):
            told.append(f"{self.name} ready")

        def finished(self):
            told.append(f"{self.name} finished")

    weight = Parameter(draws(3), name="w")
    weight.observers += [Noting("first"), Noting("second")]
    weight.register_post_accumulate_grad_hook(lambda p: told.append("hook"))
    (weight * weight).sum().backward(observers=[Noting("pass")])
    assert told == [
        "pass started",
        *("hook", "first started", "first ready", "second started", "second ready", "pass ready"),
        *("pass finished", "first finished", "second finished"),
    ]
