"""Every operation against finite differences, on drawn shapes: broadcast, of size 0 and 1, for tensors and
parameters."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.core import autograd as ag
from minidist.core.autograd import DtypeError, Parameter, ShapeError, Tensor
from minidist.nn import gradcheck
from tests.cases import each

modest = settings(max_examples=25, deadline=None)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
pairs = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, min_side=0, max_side=3)


def away_from_zero(shape, seed, positive=False):
    """Values of magnitude 0.3 to 1.5, away from every kink and pole."""
    rng = np.random.default_rng(seed)
    signs = 1 if positive else rng.choice([-1.0, 1.0], shape)
    return rng.uniform(0.3, 1.5, shape) * signs


UNARY = {
    "neg": nn.neg,
    "exp": nn.exp,
    "tanh": nn.tanh,
    "sigmoid": nn.sigmoid,
    "relu": nn.relu,
    "gelu": ag.gelu,
    "gelu_composite": nn.gelu_composite,
    "absolute": nn.absolute,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "add scalar": lambda x: 2.0 + x,
    "sub from scalar": lambda x: 1 - x,
    "scalar over": lambda x: 3.0 / x,
    "times numpy scalar": lambda x: np.float32(0.5) * x,
}
UNARY_POSITIVE = {"log": nn.log, "sqrt": nn.sqrt, "pow 1.5": lambda x: x**1.5, "pow -1": lambda x: x**-1}
BINARY = {"add": ag.add, "sub": nn.sub, "mul": ag.mul, "div": ag.div, "maximum": nn.maximum, "minimum": nn.minimum}


@pytest.mark.parametrize("name", UNARY)
@modest
@given(shape=shapes, seed=st.integers(0, 99), parameters=st.booleans())
def test_unary(name, shape, seed, parameters):
    gradcheck(UNARY[name], away_from_zero(shape, seed), parameters=parameters)


@pytest.mark.parametrize("name", UNARY_POSITIVE)
@modest
@given(shape=shapes, seed=st.integers(0, 99), parameters=st.booleans())
def test_unary_on_positive_numbers(name, shape, seed, parameters):
    gradcheck(UNARY_POSITIVE[name], away_from_zero(shape, seed, positive=True), parameters=parameters)


@pytest.mark.parametrize("name", BINARY)
@modest
@given(shapes=pairs, seed=st.integers(0, 99), parameters=st.booleans())
def test_binary_broadcasts(name, shapes, seed, parameters):
    a, b = shapes.input_shapes
    gradcheck(BINARY[name], away_from_zero(a, seed), away_from_zero(b, seed + 100) * 1.01, parameters=parameters)


@modest
@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=3), parameters=st.booleans()
)
def test_where_broadcasts(shapes, parameters):
    c, a, b = shapes.input_shapes
    condition = np.random.default_rng(1).random(c) < 0.5
    gradcheck(lambda x, y: nn.where(condition, x, y), away_from_zero(a, 1), away_from_zero(b, 2), parameters=parameters)


@settings(max_examples=30, deadline=None)
@given(
    shapes=hnp.mutually_broadcastable_shapes(signature="(m?,k),(k,n?)->(m?,n?)", max_dims=2, min_side=0, max_side=3),
    parameters=st.booleans(),
)
def test_matmul(shapes, parameters):
    a, b = shapes.input_shapes
    gradcheck(ag.matmul, away_from_zero(a, 1), away_from_zero(b, 2), parameters=parameters)


REDUCTIONS = {"sum": ag.sum, "mean": ag.mean, "max": nn.max}


@pytest.mark.parametrize("name", REDUCTIONS)
@modest
@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3), keepdims=st.booleans())
def test_reductions(name, data, shape, keepdims):
    axes = st.lists(st.integers(0, len(shape) - 1), unique=True).map(tuple) if shape else st.just(())
    axis = data.draw(st.one_of(st.none(), axes))
    x = np.random.default_rng(3).permutation(np.arange(np.prod(shape, dtype=int)) * 0.37 + 0.2).reshape(shape)
    gradcheck(lambda t: REDUCTIONS[name](t, axis, keepdims), x, parameters=data.draw(st.booleans()))


def test_sum_of_nothing_is_zero_and_max_of_nothing_an_error():
    gradcheck(ag.sum, np.zeros((2, 0)))
    gradcheck(lambda x: ag.sum(x, 0), np.zeros((0, 2)))
    with pytest.raises(ShapeError, match=r"max: no elements .* \(2, 0\)"):
        nn.max(Tensor(np.zeros((2, 0))))


def test_max_shares_between_ties():
    x = Tensor([1.0, 3.0, 3.0], requires_grad=True)
    x.max().backward()
    np.testing.assert_array_equal(x.grad, [0, 0.5, 0.5])


@pytest.mark.parametrize("operation", [ag.softmax, nn.log_softmax])
@modest
@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
def test_softmaxes(operation, data, shape):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    gradcheck(lambda t: operation(t, axis), away_from_zero(shape, 5), parameters=data.draw(st.booleans()))


def test_softmaxes_do_not_overflow():
    x = np.array([[1e4, 0.0, -1e4]])
    np.testing.assert_array_equal(ag.softmax(Tensor(x)).data, [[1, 0, 0]])
    np.testing.assert_array_equal(nn.log_softmax(Tensor(x)).data, [[0, -1e4, -2e4]])


@modest
@given(shape=shapes, parameters=st.booleans(), data=st.data())
def test_reshape_transpose_swapaxes(shape, parameters, data):
    x = away_from_zero(shape, 7)
    gradcheck(lambda t: t.reshape(-1) if t.size else t.reshape(t.shape), x, parameters=parameters)
    axes = data.draw(st.permutations(range(len(shape))))
    gradcheck(lambda t: nn.transpose(t, axes) * np.arange(1.0, 1 + t.size).reshape([shape[a] for a in axes]), x)
    if shape:
        gradcheck(lambda t: nn.swapaxes(t, 0, -1), x, parameters=parameters)
    assert Tensor(x).T.shape == shape[::-1]


@modest
@given(shapes=hnp.mutually_broadcastable_shapes(num_shapes=1, base_shape=(2, 3), max_dims=2))
def test_broadcast_to(shapes):
    gradcheck(lambda t: nn.broadcast_to(t, (2, 3)), away_from_zero(shapes.input_shapes[0], 8))


@modest
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3), data=st.data(), parameters=st.booleans())
def test_join_and_cut(shape, data, parameters):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    other = list(shape)
    other[axis] = data.draw(st.integers(0, 3))
    a, b = away_from_zero(shape, 9), away_from_zero(other, 10)
    gradcheck(lambda x, y: nn.concatenate([x, y, x], axis), a, b, parameters=parameters)
    gradcheck(lambda x, y: nn.stack([x, y, x], axis), a, a * 2, parameters=parameters)
    size = data.draw(st.integers(1, 3))
    gradcheck(lambda x: nn.concatenate(nn.split(x, size, axis)[::-1], axis), a, parameters=parameters)
    sizes = [1, shape[axis] - 1] if shape[axis] else [0, 0]
    gradcheck(lambda x: nn.concatenate(nn.split(x, sizes, axis)[::-1], axis), a, parameters=parameters)


@settings(max_examples=40, deadline=None)
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=3), data=st.data(), parameters=st.booleans())
def test_basic_indexing(shape, data, parameters):
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True))
    gradcheck(lambda x: x[index], away_from_zero(shape, 11), parameters=parameters)


@settings(max_examples=20, deadline=None)
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=3), data=st.data(), parameters=st.booleans())
def test_indexing_by_arrays_adds_repeats(shape, data, parameters):
    index = data.draw(hnp.integer_array_indices(shape, result_shape=hnp.array_shapes(max_dims=2, max_side=4)))
    gradcheck(lambda x: x[index], away_from_zero(shape, 12), parameters=parameters)


@modest
@given(
    indices=hnp.arrays(
        np.int64, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4), elements=st.integers(0, 2)
    ),
    width=st.integers(0, 3),
    parameters=st.booleans(),
)
def test_embedding(indices, width, parameters):
    gradcheck(lambda w: ag.embedding(indices, w), away_from_zero((3, width), 13), parameters=parameters)


# --- errors, dtypes ---


@each("name", BINARY)
def test_errors_name_the_operation_and_both_shapes(name):
    if name == "minimum":
        name = "maximum"
    with pytest.raises(ShapeError, match=rf"{name}.*\(2, 3\).*\(4,\)"):
        BINARY[name](Tensor(np.ones((2, 3))), Tensor(np.ones(4)))


@each(
    ("call", "message"),
    [
        (lambda: ag.matmul(Tensor(np.ones((2, 3))), Tensor(np.ones((4, 5)))), r"matmul.*\(2, 3\).*\(4, 5\)"),
        (lambda: ag.matmul(Tensor(np.ones(3)), Tensor(np.ones((4, 5)))), r"matmul.*\(3,\).*\(4, 5\)"),
        (lambda: ag.linear(Tensor(np.ones((2, 3))), Tensor(np.ones((5, 4)))), r"linear.*\(2, 3\).*\(5, 4\)"),
        (
            lambda: nn.concatenate([Tensor(np.ones((2, 3))), Tensor(np.ones((2, 4)))]),
            r"concatenate.*\(2, 3\).*\(2, 4\)",
        ),
        (lambda: nn.stack([Tensor(np.ones(3)), Tensor(np.ones(4))]), r"stack.*\(3,\).*\(4,\)"),
        (lambda: ag.reshape(Tensor(np.ones((2, 3))), (4, 2)), r"reshape.*\(2, 3\).*\(4, 2\)"),
        (lambda: nn.transpose(Tensor(np.ones((2, 3))), (0, 0)), r"transpose.*\(0, 0\).*\(2, 3\)"),
        (lambda: ag.sum(Tensor(np.ones((2, 3))), 2), r"sum: axis 2 .*\(2, 3\)"),
        (lambda: nn.split(Tensor(np.ones((2, 3))), [1, 1], 1), r"split: sizes \[1, 1\] .*\(2, 3\)"),
        (lambda: Tensor(np.ones((2, 3)))[5], r"getitem: index 5 .*\(2, 3\)"),
        (lambda: nn.where(np.ones(2, bool), Tensor(np.ones(3)), 0.0), r"where: shapes \(3,\) and \(\).*\(2,\)"),
        (lambda: nn.broadcast_to(Tensor(np.ones((2, 3))), (3, 3)), r"broadcast_to.*\(2, 3\).*\(3, 3\)"),
        (
            lambda: ag.layer_norm(Tensor(np.ones((2, 3))), Tensor(np.ones(4)), Tensor(np.ones(4))),
            r"layer_norm.*\(2, 3\).*\(4,\)",
        ),
        (lambda: ag.causal_attention(Tensor(np.ones((2, 3, 5))), 2), r"causal_attention: shape \(2, 3, 5\)"),
        (lambda: ag.cross_entropy(Tensor(np.ones((2, 3))), np.zeros(3, int)), r"cross_entropy.*\(3,\).*\(2, 3\)"),
    ],
)
def test_other_errors_name_operation_and_shapes(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


SCALARS = [2, 2.0, True, np.float64(2.0), np.float32(2.0), np.int64(2), np.array(2.0)]


@each("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}")
@each("name", BINARY)
def test_float32_stays_float32_through_any_scalar(name, scalar):
    """Museum 26: a NumPy scalar promotes float32 weights to float64, and a peer receives them into a float32 buffer."""
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    for y in (BINARY[name](x, scalar), BINARY[name](scalar, x)):
        assert y.dtype == np.float32
        y.backward(np.ones(3))
        assert x.grad.dtype == np.float32


def test_operators_of_numpy_scalars_come_to_the_tensor():
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    for y in (np.float64(3) * x, np.float64(3) + x, np.float64(3) - x, np.float64(3) / x, x ** np.float64(2)):
        assert isinstance(y, Tensor)
        assert y.dtype == np.float32
    for y in (
        x.mean(),
        x.sum(),
        ag.gelu(x),
        ag.softmax(x),
        ag.layer_norm(x, x, x),
        x.exp().log().sqrt().tanh(),
        x**1.5,
    ):
        assert y.dtype == np.float32


def test_two_float_dtypes_are_an_error_not_a_promotion():
    a, b = Tensor(np.ones(2, np.float32)), Tensor(np.ones(3, np.float64))
    with pytest.raises(DtypeError, match=r"mul: dtypes float32 and float64 differ \(shapes \(2,\) and \(3,\)\)"):
        a * b
    with pytest.raises(DtypeError, match="concatenate"):
        nn.concatenate([a, b])


def test_zero_dimensional_results_are_arrays():
    assert isinstance((Tensor(np.float32(1)) + Tensor(np.float32(2))).data, np.ndarray)
    leaf = Tensor(np.array(2.0), requires_grad=True)
    (leaf * leaf).backward()
    assert isinstance(leaf.grad, np.ndarray)
    assert leaf.grad == 4.0
    assert Parameter(np.array(2.0)).shape == ()


def test_a_loop_over_a_tensor_takes_its_rows():
    x = Tensor(np.arange(6.0).reshape(3, 2), requires_grad=True)
    rows = list(x)
    assert [row.data.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    rows[1].sum().backward()
    assert x.grad.tolist() == [[0, 0], [1, 1], [0, 0]]
    with pytest.raises(TypeError, match="unsized"):
        list(x.sum())
