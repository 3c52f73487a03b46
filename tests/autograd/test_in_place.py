"""What changes between forward and backward is an error, however it was changed; never a gradient of mixed values."""

import copy
import pickle

import numpy as np
import pytest

from minidist.core.autograd import AutogradError, Parameter, Tensor, VersionError, cross_entropy, gelu, matmul, no_grad
from minidist.core.base.errors import UsageError
from minidist.core.nn import MLP, FlatParameters, Linear
from minidist.nn import checkpoint, detect_in_place_changes, mse_loss
from tests.cases import each


def draws(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def model_and_loss(model=None, x=None):
    model = model or MLP([6, 5, 3])
    x = Tensor(draws(4, 6)) if x is None else x
    return model, cross_entropy(model(x), np.arange(4) % 3)


@each("flat", [False, True])
@each(
    "change",
    [
        lambda p: p.data.__setitem__(..., p.data * 3),
        lambda p: p.data.__imul__(3),
        lambda p: setattr(p, "data", p.data * 3),
        lambda p: p.data.__setitem__(slice(1, 2), 0),
    ],
)
def test_a_parameter_that_changes_between_forward_and_backward_is_an_error(change, flat):
    model = MLP([6, 5, 3])
    if flat:
        FlatParameters(model.parameters())
    _, loss = model_and_loss(model)
    change(model.layers[1].weight)
    between = r"'layers.1.weight' was (changed|written to) between forward and backward.*call backward before"
    with pytest.raises(VersionError, match=between):
        loss.backward()


def test_the_sample_of_a_large_weight_has_elements_in_every_column_block_and_notices_a_row():
    weight = Parameter(draws(300, 200), name="w")
    x = Tensor(draws(3, 300), requires_grad=True)
    for rows in (slice(0, 6), slice(120, 126)):
        y = matmul(x, weight).sum()
        weight.data[rows] += 1
        with pytest.raises(VersionError):
            y.backward()


def test_the_sample_has_elements_of_many_columns():
    weight = Parameter(draws(610, 40), name="w")  # every 400th element would be of the first column
    y = matmul(Tensor(draws(3, 610), requires_grad=True), weight).sum()
    weight.data[:, 1:] += 1
    with pytest.raises(VersionError):
        y.backward()


@pytest.mark.parametrize("flat", [False, True])
def test_setting_the_data_counts_a_version(flat):
    weight = Parameter(draws(3, 2), name="w")
    if flat:
        FlatParameters([weight])
    before = weight.version
    weight.data = draws(3, 2) + 1
    assert weight.version == before + 1


def test_a_single_element_is_found_with_detect_in_place_changes():
    weight, x = Parameter(draws(300, 200), name="w"), Tensor(draws(3, 300), requires_grad=True)
    with detect_in_place_changes():
        y = matmul(x, weight).sum()
    weight.data[17, 3] += 1
    with pytest.raises(VersionError, match="'w' was written to"):
        y.backward()


def test_a_reused_input_buffer_is_an_error_and_a_new_array_is_not():
    rows = draws(4, 6)
    model, loss = model_and_loss(x=Tensor(rows))
    rows[...] = 0
    with pytest.raises(VersionError, match=r"an input of shape \(4, 6\) was written to"):
        loss.backward()
    x = Tensor(draws(4, 6))
    _, loss = model_and_loss(model, x)
    loss.backward()


def test_a_recomputed_segment_notices_a_change():
    model = MLP([6, 5, 3])
    x = Tensor(draws(4, 6), requires_grad=True)
    loss = checkpoint(lambda x: model(x).sum(), x)
    x.data[...] = 1
    with pytest.raises(VersionError):
        loss.backward()


def test_changes_before_forward_and_after_backward_are_free():
    model = MLP([6, 5, 3])
    for _ in range(3):
        model.zero_grad()
        model.layers[0].weight.data[...] *= 0.9
        with no_grad():
            model(Tensor(draws(4, 6)))
        model.layers[1].weight.data *= 0.9
        _, loss = model_and_loss(model)
        loss.backward()
    # What backward does not read again may change: a bias, and the weight of the first layer.
    _, loss = model_and_loss(model)
    model.layers[0].weight.data[...] = 0
    model.layers[1].bias.data[...] = 0
    loss.backward()


# --- copies ---


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("flat", [False, True])
def test_a_copied_model_is_the_same_function_of_its_own_parameters(copied, flat):
    model = MLP([6, 5, 3])
    model.layers[0].bias.requires_grad = False
    if flat:
        FlatParameters(model.parameters())
    _, loss = model_and_loss(model)
    loss.backward()
    other = copied(model)
    assert [(n, p.name, p.requires_grad, p.grad is None) for n, p in other.named_parameters()] == [
        (n, p.name, p.requires_grad, True) for n, p in model.named_parameters()
    ]
    _, again = model_and_loss(other)
    assert again.item() == loss.item()
    again.backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None and theirs.grad is None) or np.array_equal(mine.grad, theirs.grad)
    other.layers[0].weight.data[...] = 0
    assert model.layers[0].weight.data.any()


def test_a_tensor_of_a_graph_cannot_be_copied_and_a_leaf_can():
    x = Tensor(draws(2, 2), requires_grad=True)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(AutogradError, match=r"that 'gelu' computed cannot be copied or pickled.*x.detach\(\)"):
            copied(gelu(x))
    y = pickle.loads(pickle.dumps(x))
    assert y.requires_grad
    assert np.array_equal(y.data, x.data)
    flat = FlatParameters(Linear(2, 2).parameters())
    with pytest.raises(AutogradError, match=r"cannot be copied or pickled; copy the model"):
        copy.deepcopy(flat)


# --- divisors ---


@each("divisor", [0, -1.0, float("nan"), np.float64(0)])
@each("name", ["cross_entropy", "mse_loss"])
def test_a_divisor_that_is_not_above_zero_is_refused(name, divisor):
    x = Tensor(draws(2, 3), requires_grad=True)
    loss = {"cross_entropy": lambda: cross_entropy(x, np.zeros(2, int), divisor)}.get(
        name, lambda: mse_loss(x, draws(2, 3), divisor)
    )
    with pytest.raises(UsageError, match=rf"{name}: divisor=.* above 0"):
        loss()
