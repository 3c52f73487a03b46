"""Quantisation-aware training: torch.ao's formulas from an oracle of plain Python, and integer layers that agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.core.autograd import ShapeError, Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, MLP, Conv1D, Embedding, GPTConfig, Linear, Module
from minidist.nn import checkpoint
from minidist.techniques.quantization.fake_quantize import (
    SMALLEST_SCALE,
    Grid,
    affine_grid,
    fake_quantize,
    symmetric_grid,
)
from minidist.techniques.quantization.layers import (
    MOST_INPUTS,
    Int8Linear,
    MinMaxObserver,
    MovingAverageObserver,
    QATLinear,
    convert,
    converted,
    int8_bytes,
    int8_matmul,
    observers_of,
    prepare_qat,
)
from minidist.techniques.quantization.ranges import update_ranges


def of_one(x, scale, zero_point, low, high):
    """(value, derivative) of fake quantisation of one number, with Python's round, which rounds halves to even."""
    q = round(x / scale) + zero_point
    return (min(max(q, low), high) - zero_point) * scale, float(low <= q <= high)


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# --- the operation ----------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-40, 40, allow_subnormal=False)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.floats(0.01, 2), st.integers(0, 255), st.booleans())
def test_values_and_gradient_are_those_of_the_formula(values, scale, zero_point, signed):
    low, high, zero_point = (-127, 127, 0) if signed else (0, 255, zero_point)
    x = Tensor(np.array(values), requires_grad=True)
    y = fake_quantize(x, Grid(np.array(scale), np.array(float(zero_point)), low, high))
    g = normal(len(values))
    y.backward(g)
    wanted = [of_one(value, scale, zero_point, low, high) for value in values]
    assert y.data.tolist() == [value for value, _ in wanted]
    assert x.grad.tolist() == [inside * number for (_, inside), number in zip(wanted, g, strict=True)]


def test_halves_are_rounded_to_even():
    grid = symmetric_grid(127.0, np.float64)
    x = Tensor(np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5]))
    assert fake_quantize(x, grid).data.tolist() == [0, 2, 2, 0, -2, 126]


@given(st.lists(NUMBERS, min_size=1, max_size=8), st.sampled_from([np.float32, np.float64]))
def test_the_grids_have_the_range_of_the_values_and_a_point_at_zero(values, dtype):
    x = np.array(values, dtype)
    low, high = min(x.min(), 0), max(x.max(), 0)
    grid = affine_grid(x.min(), x.max(), dtype)
    assert grid.scale == max(dtype((high - low) / dtype(255)), SMALLEST_SCALE)
    assert grid.zero_point == min(max(-np.rint(low / grid.scale), 0), 255)
    assert grid.dequantize(grid.quantize(np.zeros(1, dtype))) == 0
    assert np.abs(grid.dequantize(grid.quantize(x)) - x).max() <= 0.51 * grid.scale + np.spacing(dtype(40)) * 300
    grid = symmetric_grid(np.abs(x).max(), dtype)
    assert grid.scale == max(np.abs(x).max() / dtype(127), SMALLEST_SCALE)
    assert np.abs(grid.dequantize(grid.quantize(x)) - x).max() <= 0.51 * grid.scale


def test_a_scale_for_each_channel():
    x = np.array([[0.8, -2.0], [100.0, 51.0]])
    grid = symmetric_grid(np.abs(x).max(axis=1, keepdims=True), np.float64)
    rounded = fake_quantize(Tensor(x), grid).data
    assert [row.tolist() for row in grid.quantize(x)] == [[51, -127], [127, 65]]
    assert (rounded - x).max(axis=1).tolist() == pytest.approx([51 * 2 / 127 - 0.8, 65 * 100 / 127 - 51])
    with pytest.raises(ShapeError, match=r"scales of shape \(2, 1\) for a tensor of shape \(3, 2\)"):
        fake_quantize(Tensor(np.ones((3, 2))), grid)


def test_no_weight_is_clamped_so_that_each_gets_its_gradient():
    """With torch.ao's range from -128 the largest positive weight is clamped."""
    weight = np.array([0.3, -0.2, 0.9])
    for low, inside in ((-127, [1, 1, 1]), (-128, [1, 1, 0])):
        x = Tensor(weight, requires_grad=True)
        fake_quantize(x, symmetric_grid(0.9, np.float64, low)).backward(np.ones(3))
        assert x.grad.tolist() == inside


def test_half_precision_stays_half():
    x = Tensor(normal(5).astype(np.float16), requires_grad=True)
    y = fake_quantize(x, symmetric_grid(3.0, np.float32))
    y.backward(np.ones(5, np.float16))
    assert y.dtype == x.grad.dtype == np.float16


# --- the layers -------------------------------------------------------------------------------------------------------


def trained(layer, *inputs, observer="min-max", per_channel=True):
    """The layer, prepared, after one step with each of `inputs`."""
    layer = prepare_qat(layer, observer, per_channel)
    for x in inputs:
        layer(Tensor(x))
        update_ranges(observers_of(layer))
    return layer


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", [Linear, Conv1D])
def test_a_layer_is_a_product_of_rounded_operands(kind, per_channel):
    layer, x = kind(6, 3, dtype=np.float64, seed=1), normal(5, 6)
    layer.weight.data[...] *= np.linspace(1, 9, 3) if kind is Conv1D else np.linspace(1, 9, 3)[:, None]
    weight = layer.weight.data if kind is Conv1D else layer.weight.data.T  # (in, out)
    layer = trained(layer, x, per_channel=per_channel)
    s, z = (x.max() - x.min()) / 255, -round(x.min() / ((x.max() - x.min()) / 255))
    rounded = np.vectorize(lambda v: of_one(v, s, z, 0, 255)[0])(x)
    total = np.zeros((5, 3))
    for j in range(3):
        largest = np.abs(weight[:, j] if per_channel else weight).max()
        total[:, j] = rounded @ [of_one(v, largest / 127, 0, -127, 127)[0] for v in weight[:, j]]
    np.testing.assert_allclose(layer(Tensor(x)).data, total + layer.bias.data, rtol=0, atol=1e-12)


def test_the_gradient_of_a_weight_ignores_the_rounding():
    layer, x, g = Linear(4, 2, dtype=np.float64), normal(3, 4), normal(3, 2, seed=1)
    layer = trained(layer, x)
    layer(Tensor(x)).backward(g)
    grid = layer.input_grid()
    np.testing.assert_allclose(layer.weight.grad, g.T @ grid.dequantize(grid.quantize(x)), atol=1e-14)


def test_the_inputs_of_the_first_step_are_not_rounded():
    layer, x = Linear(4, 2, dtype=np.float64), normal(3, 4)
    weight = layer.weight.data.copy()
    grid = symmetric_grid(np.abs(weight).max(axis=1, keepdims=True), np.float64)
    wanted = x @ grid.dequantize(grid.quantize(weight)).T + layer.bias.data
    layer = prepare_qat(layer)
    assert np.array_equal(layer(Tensor(x)).data, wanted)


def test_observers():
    both = MinMaxObserver(np.float32), MovingAverageObserver(np.float32)
    for observer in both:
        for x in ([1.0, 5.0], [-2.0, 3.0]):  # of two micro-batches of one step
            observer.observe(np.array(x, np.float32))
        observer.observe(np.zeros((0, 3), np.float32))
        assert observer.seen == (-2, 5)
        observer.update(*observer.seen)
        observer.update(-4.0, 1.0)
        assert all(type(number) is np.float32 for number in observer.range)
    assert both[0].range == (-4, 5)
    assert both[1].range == (np.float32(-2) + np.float32(0.01) * np.float32(-2), np.float32(5) - np.float32(0.04))


def test_evaluation_and_what_is_recomputed_are_observed_once_or_not():
    layer, x = prepare_qat(Linear(4, 4, dtype=np.float64)), Tensor(normal(3, 4), requires_grad=True)
    layer.eval()
    layer(x)
    assert layer.observer.seen is None
    layer.train()
    y = checkpoint(layer, x)
    assert layer.observer.seen is None
    y.backward(np.ones((3, 4)))
    assert layer.observer.seen == (x.data.min(), x.data.max())


# --- models, and INT8 -------------------------------------------------------------------------------------------------


def test_parameters_keep_their_names_and_places():
    model = GPT(GPTConfig(17, 8, 8, 2, 2))
    names = [name for name, _ in model.named_parameters()]
    prepared = prepare_qat(model)
    assert prepared is model
    assert [name for name, _ in model.named_parameters()] == names
    assert list(observers_of(model)) == [
        f"transformer.h.{i}.{layer}"
        for i in (0, 1)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_integer_model_computes_what_the_rounded_one_does(activation, per_channel):
    model, x = MLP([6, 8, 3], activation, dtype=np.float64), normal(40, 6)
    model = trained(model, x, x + 0.5, per_channel=per_channel).eval()
    wanted = model(Tensor(x)).data
    assert isinstance(convert(model).layers[0], Int8Linear)
    assert model.layers[0].weight.dtype == np.int8
    np.testing.assert_allclose(model(Tensor(x)).data, wanted, rtol=0, atol=1e-12)
    assert model.layers[0].weight.nbytes == 6 * 8


def test_a_converted_gpt_and_back_again():
    model, tokens = GPT(GPTConfig(17, 6, 8, 1, 2), dtype=np.float64), np.arange(12).reshape(2, 6)
    layers = [layer for layer in trained(model, *[]).modules() if isinstance(layer, QATLinear)]
    model(tokens, (tokens + 1) % 17).backward()
    update_ranges(observers_of(model))
    model.eval()
    wanted = model(tokens).data
    with converted(model):
        assert not observers_of(model)
        np.testing.assert_allclose(model(tokens).data, wanted, rtol=0, atol=1e-12)
    assert [layer for layer in model.modules() if isinstance(layer, QATLinear)] == layers


@given(st.integers(1, 300), st.integers(0, 9))
def test_integer_products_are_exact(inputs, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.integers(0, 256, (3, inputs), np.uint8), rng.integers(-127, 128, (inputs, 2), np.int8)
    assert int8_matmul(x, w).dtype == np.int32
    assert int8_matmul(x, w).tolist() == (x.astype(object) @ w.astype(object)).tolist()


def test_the_largest_sum_fits_into_int32():
    x, w = np.full((1, MOST_INPUTS), 255, np.uint8), np.full((MOST_INPUTS, 1), -127, np.int8)
    assert int8_matmul(x, w)[0, 0] == -255 * 127 * MOST_INPUTS >= -(2**31)
    wide = trained(Linear(MOST_INPUTS + 1, 1, dtype=np.float32, seed=None), np.ones((1, MOST_INPUTS + 1), np.float32))
    with pytest.raises(UsageError, match=r"sums 66,312 products of 8-bit numbers, .* leave this layer in floats"):
        convert(wide)


def test_one_layer_in_two_places_stays_one_layer():
    class Twice(Module):
        def __init__(self):
            self.first = Linear(3, 3)
            self.parts = {"again": [self.first]}

    model = prepare_qat(Twice())
    assert model.first is model.parts["again"][0]
    assert isinstance(model.first, QATLinear)


def test_what_cannot_be_quantised_is_a_sentence():
    with pytest.raises(UsageError, match="Embedding has no Linear or Conv1D layer to quantise; use these"):
        prepare_qat(Embedding(3, 4))

    class Pair(Module):
        def __init__(self):
            self.both = (Linear(2, 2), Linear(2, 2))

    with pytest.raises(UsageError, match=r"layer 'both.0' is in a tuple, .* use a list"):
        prepare_qat(Pair())
    with pytest.raises(UsageError, match=r"layer 'layers.0' has no range of inputs, .* call update_ranges"):
        convert(prepare_qat(MLP([2, 2, 2])))


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("per_channel", [False, True])
def test_fake_quantisation_is_torchs(per_channel):
    torch = pytest.importorskip("torch")
    from torch.ao.quantization import MinMaxObserver as Theirs
    from torch.ao.quantization import PerChannelMinMaxObserver

    x, g = normal(7, 40, dtype=np.float32), normal(7, 40, seed=1, dtype=np.float32)
    if per_channel:
        observer = PerChannelMinMaxObserver(
            ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
        )
        grid = symmetric_grid(np.abs(x).max(axis=1, keepdims=True), np.float32)
    else:
        observer = Theirs(dtype=torch.quint8, qscheme=torch.per_tensor_affine)
        grid = affine_grid(x.min(), x.max(), np.float32)
    observer(torch.from_numpy(x))
    scale, zero_point = observer.calculate_qparams()
    assert np.array_equal(scale.numpy().reshape(-1), grid.scale.reshape(-1))
    assert np.array_equal(zero_point.numpy().reshape(-1), grid.zero_point.reshape(-1))

    mine, theirs = Tensor(x * 1.1, requires_grad=True), torch.from_numpy(x * 1.1).requires_grad_()  # some are clamped
    if per_channel:
        wanted = torch.fake_quantize_per_channel_affine(theirs, scale, zero_point.to(torch.int32), 0, -127, 127)
    else:
        wanted = torch.fake_quantize_per_tensor_affine(theirs, scale.item(), int(zero_point), 0, 255)
    wanted.backward(torch.from_numpy(g))
    rounded = fake_quantize(mine, grid)
    rounded.backward(g)
    assert np.array_equal(rounded.data, wanted.detach().numpy())
    assert np.array_equal(mine.grad, theirs.grad.numpy())
    assert (mine.grad == 0).any()


@pytest.mark.peers
@pytest.mark.parametrize("name", ["MinMaxObserver", "MovingAverageMinMaxObserver"])
def test_observers_are_torchs(name):
    torch = pytest.importorskip("torch")
    import torch.ao.quantization as ao

    theirs = getattr(ao, name)()
    mine = {"MinMaxObserver": MinMaxObserver, "MovingAverageMinMaxObserver": MovingAverageObserver}[name](np.float32)
    for step in range(5):
        x = normal(9, seed=step, dtype=np.float32)
        theirs(torch.from_numpy(x))
        mine.update(x.min(), x.max())
    assert mine.range == (theirs.min_val.numpy(), theirs.max_val.numpy())


@pytest.mark.peers
def test_a_step_of_a_layer_is_that_of_torchs_qat_linear():
    torch = pytest.importorskip("torch")
    import torch.ao.quantization as ao

    layer, x, g = Linear(6, 4), normal(10, 6, dtype=np.float32), normal(10, 4, seed=2, dtype=np.float32)
    weight_fake_quant = ao.FakeQuantize.with_args(
        observer=ao.PerChannelMinMaxObserver,
        ch_axis=0,
        quant_min=-127,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    )
    qconfig = ao.QConfig(activation=ao.FakeQuantize.with_args(observer=ao.MinMaxObserver), weight=weight_fake_quant)
    twin = torch.ao.nn.qat.Linear(6, 4, qconfig=qconfig)
    with torch.no_grad():
        twin.weight.copy_(torch.from_numpy(layer.weight.data))
        twin.bias.copy_(torch.from_numpy(layer.bias.data))
    inputs = qconfig.activation()(torch.from_numpy(x))
    wanted = twin(inputs)
    wanted.backward(torch.from_numpy(g))
    layer = trained(layer, x)
    y = layer(Tensor(x))
    y.backward(g)
    np.testing.assert_allclose(y.data, wanted.detach().numpy(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(layer.weight.grad, twin.weight.grad.numpy(), rtol=0, atol=1e-5)


def test_the_bytes_of_int8_weights_count_a_scale_for_each_channel():
    model = prepare_qat(MLP([6, 5, 3]), per_channel=True)
    # 30 + 15 weights of one byte, and 5 + 3 scales of a float32.
    assert int8_bytes(model) == {"weight_bytes": 45 + 4 * 8, "float_bytes": 4 * 45}
