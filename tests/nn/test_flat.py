"""The flat storage: views, versions, release, and gradients that read as zeros when nothing arrived."""

import numpy as np
import pytest

from minidist.base.memory import account_memory
from minidist.core.autograd import AutogradError, DtypeError, Parameter, ShapeError, Tensor
from minidist.core.base import arrays as xp
from minidist.core.nn import MLP, FlatParameters


def three():
    return [Parameter(np.full(shape, i + 1.0), name=f"p{i}") for i, shape in enumerate([(2, 3), (0,), (4,)])]


def test_parameters_become_views_in_registration_order():
    a, b, c = three()
    flat = FlatParameters([a, b, a, c], pad_to=8)  # a tied parameter counts once
    assert (flat.numel, flat.padded_numel, flat.offsets, flat.names) == (10, 16, [0, 6, 6, 10], ["p0", "p1", "p2"])
    np.testing.assert_array_equal(flat.data, [1] * 6 + [3] * 4 + [0] * 6)
    flat.data[flat.slice_of(c)] = 7
    np.testing.assert_array_equal(c.data, [7] * 4)
    assert a.data.base is not None
    c.data[0] = 5
    assert flat.data[6] == 5


def test_gradients_are_views_and_missing_ones_read_as_zeros():
    a, b, c = three()
    flat = FlatParameters([a, b, c], pad_to=4)
    (a * 2.0).sum().backward()
    flat.grad_buffer[6:] = 99  # what an earlier step left behind
    np.testing.assert_array_equal(flat.grad[:10], [2] * 6 + [0] * 4)
    flat.zero_grad()
    assert a.grad is None
    (c * 3.0).sum().backward()
    assert c.grad.base is not None
    np.testing.assert_array_equal(flat.grad[:10], [0] * 6 + [3] * 4)
    (c * 3.0).sum().backward()
    np.testing.assert_array_equal(flat.grad[:10], [0] * 6 + [6] * 4)
    assert a.grad is not None  # zeros, since someone read the whole


def test_padding_of_the_gradient_is_zero(monkeypatch):
    monkeypatch.setattr(xp, "empty", lambda shape, dtype, like=None: np.full(shape, 7, dtype))
    flat = FlatParameters(three(), pad_to=16)
    np.testing.assert_array_equal(flat.grad, np.zeros(16))


def test_gradients_from_before_move_into_the_flat_buffer():
    a, _, c = three()
    (a * 2.0).sum().backward()
    flat = FlatParameters([a, c])
    np.testing.assert_array_equal(flat.grad, [2] * 6 + [0] * 4)


def test_release_bind_and_version():
    a, b, c = three()
    flat = FlatParameters([a, b, c])
    data = flat.release()
    assert flat.released
    assert a.shape == (2, 3)
    assert a.dtype == np.float64
    with pytest.raises(AutogradError, match=r"parameter 'p0' of shape \(2, 3\) is released"):
        a.data  # noqa: B018
    with pytest.raises(AutogradError, match=r"\['p0' .. 'p2'\] are released"):
        flat.data  # noqa: B018
    flat.bind(data)
    flat.updated()
    assert flat.version == a.version == c.version == 1
    flat.bind(data.copy(), version=0)
    assert a.version == 0
    with pytest.raises(ShapeError, match=r"bind: array of shape \(9,\).*expected \(10,\)"):
        flat.bind(np.zeros(9))


def test_release_grad_makes_room_and_the_next_contribution_makes_a_new_buffer():
    with account_memory() as account:
        model = MLP([10, 20, 5])
        flat = FlatParameters(model.parameters())
        assert account.by_purpose["parameter"] == 4 * flat.numel  # the parameters' own arrays are gone
        x = Tensor(np.ones((2, 10), np.float32))
        model(x).sum().backward()
        assert account.by_purpose["gradient"] == 4 * flat.numel
        flat.release_grad()
        assert account.by_purpose["gradient"] == 0
        model(x).sum().backward()
        assert account.by_purpose["gradient"] == 4 * flat.numel


def test_frozen_parameters_have_a_place_and_no_gradient():
    a, b, c = three()
    b = Parameter(np.ones(5), requires_grad=False, name="frozen")
    d = Parameter(np.ones(2), name="d")
    flat = FlatParameters([a, d, b, c])
    ((a.sum() + c.sum()) * b).sum().backward()
    np.testing.assert_array_equal(flat.grad, [5] * 6 + [0] * 2 + [0] * 5 + [5] * 4)
    assert b.grad is None


def test_one_owner_one_dtype():
    a, _, c = three()
    FlatParameters([a])
    with pytest.raises(AutogradError, match="'p0' belongs to another"):
        FlatParameters([a])
    with pytest.raises(DtypeError, match="'p2' is float64, 'x' is float32"):
        FlatParameters([c, Parameter(np.ones(1, np.float32), name="x")])


def test_an_empty_unit():
    flat = FlatParameters([])
    assert flat.numel == flat.data.size == flat.grad.size == 0


def test_steady_training_allocates_no_gradient_memory():
    model = MLP([3, 3])
    flat = FlatParameters(model.parameters())
    buffers = []
    for _ in range(2):
        flat.zero_grad()
        model(Tensor(np.ones((1, 3), np.float32))).sum().backward()
        buffers.append(flat.grad)
    assert buffers[0] is buffers[1]
