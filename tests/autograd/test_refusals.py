"""What would silently give a wrong value or gradient is refused in one sentence."""

import numpy as np
import pytest

from minidist.core.autograd import AutogradError, DtypeError, Parameter, ShapeError, Tensor
from minidist.core.nn.flat import FlatParameters
from minidist.nn import checkpoint


@pytest.mark.parametrize("scalar", [0.5, np.float64(1.5), float("nan"), np.float32(0.5), np.array(0.5)])
def test_a_fraction_times_integers(scalar):
    with pytest.raises(DtypeError, match="cast the tensor"):
        Tensor([1, 2, 3]) * scalar


def test_whole_scalars_and_floats_are_as_before():
    assert (Tensor([1, 2, 3]) * 2).data.tolist() == [2, 4, 6]
    assert (Tensor([1, 2, 3]) + 2.0).data.tolist() == [3, 4, 5]
    assert (Tensor(np.array([1, 2], np.float32)) * 0.5).data.tolist() == [0.5, 1.0]


def test_the_mean_of_integers():
    with pytest.raises(DtypeError, match="mean"):
        Tensor([1, 2, 4]).mean()


def test_integers_have_no_gradient():
    with pytest.raises(DtypeError, match="only floats"):
        Tensor([1, 2], requires_grad=True)


def test_assigned_data_stays_in_the_flat_array():
    parameter = Parameter(np.zeros((2, 2)), name="w")
    flat = FlatParameters([parameter])
    parameter.data = np.arange(4.0).reshape(2, 2)
    assert flat.data.tolist() == [0.0, 1.0, 2.0, 3.0]
    flat.data[0] = 9.0
    assert parameter.data[0, 0] == 9.0
    with pytest.raises(DtypeError, match="'w'"):
        parameter.data = np.zeros((2, 2), np.float32)
    with pytest.raises(ShapeError, match="'w'"):
        parameter.data = np.zeros(4)
    flat.release()
    with pytest.raises(AutogradError, match="released"):
        parameter.data = np.zeros((2, 2))


def test_a_recomputed_function_may_not_close_over_what_needs_a_gradient():
    x = Tensor(np.array([2.0]), requires_grad=True)
    y = x * 1.0
    for outside in (x, y):
        for argument in (Tensor(np.array([3.0])), x):
            with pytest.raises(AutogradError, match="pass it as an argument"):
                checkpoint(lambda a, outside=outside: a * outside, argument)
    checkpoint(lambda a: a * y.detach(), x).backward()
    assert x.grad.tolist() == [2.0]
    x.grad = None
    checkpoint(lambda a, b: a * b, x, y).backward()
    assert x.grad.tolist() == [4.0]


def test_an_integer_parameter_has_no_gradient():
    with pytest.raises(DtypeError, match="'steps' is int64: only floats have gradients"):
        Parameter(np.arange(3), name="steps")
    counter = Parameter(np.arange(3), requires_grad=False, name="steps")
    with pytest.raises(DtypeError, match="use requires_grad=False, or cast it"):
        counter.requires_grad = True
    assert not counter.requires_grad


def test_an_array_of_tensors():
    x = Tensor(np.ones((4, 3)), requires_grad=True)
    for convert in (lambda: np.asarray(x), lambda: Tensor([x, x]), lambda: np.stack([x, x])):
        with pytest.raises(AutogradError, match=r"an array of a Tensor of shape \(4, 3\) .*x\.data, or .*stack\(\)"):
            convert()


def test_a_function_of_numpy_names_the_method_that_keeps_the_gradient():
    x = Tensor(np.ones((4, 3)), requires_grad=True)
    for call, words in (
        (np.sum, r"np.sum takes no Tensor \(.*\); x.sum\(\) keeps its gradient, and x.data is its array"),
        (np.mean, r"np.mean takes no Tensor .*; x.mean\(\) keeps"),
        (np.max, r"np.max takes no Tensor .*; x.max\(\) keeps"),
    ):
        with pytest.raises(AutogradError, match=words):
            call(x)
    assert (np.shape(x), np.ndim(x), np.size(x)) == ((4, 3), 2, 12)


def test_a_tensor_is_true_when_its_only_element_is_not_zero():
    assert Tensor(np.ones(1))
    assert not Tensor(np.zeros((1, 1)))
    assert not Tensor(np.zeros(()))
    for shape in ((2,), (0,)):
        with pytest.raises(AutogradError, match=rf"Tensor of shape \({shape[0]},\) is asked for, which has {shape[0]}"):
            bool(Tensor(np.zeros(shape)))
