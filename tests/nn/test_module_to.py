"""`Module.to` moves parameters, gradients and buffers, between the host, a device and no device at all."""

import numpy as np
import pytest

from minidist.base import arrays as xp
from minidist.base.coordinates import batch_coordinates
from minidist.base.device import creating_on, device_of
from minidist.base.meta import MetaArray, NoDevice
from minidist.comm import SimWorld
from minidist.core.autograd import AutogradError, Tensor, cross_entropy
from minidist.core.base.errors import UsageError
from minidist.core.nn import GPT, MLP, GPTConfig
from minidist.nn import CNN
from minidist.nn.buffers import named_buffers
from minidist.parallel.data_parallel import DistributedDataParallel
from tests.cupy.stand_in import Device, DeviceArray

ROWS = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
TARGETS = np.arange(6) % 4


def gradients(model, device=None):
    """The loss and the gradients of a step, on the host."""
    model.zero_grad()
    with creating_on(device):
        loss = cross_entropy(model(Tensor(xp.to_device(ROWS))), xp.to_device(TARGETS))
        loss.backward()
    return float(loss.data), {name: xp.to_host(p.grad) for name, p in model.named_parameters()}


def test_a_model_computes_the_same_where_it_is_moved():
    model = MLP([8, 16, 4])
    loss, expected = gradients(model)
    assert model.to(Device()) is model
    assert all(isinstance(p.data, DeviceArray) and isinstance(p.grad, DeviceArray) for p in model.parameters())
    there, moved = gradients(model, Device())
    assert there == loss
    assert model.to("cpu") is model
    back, again = gradients(model)
    assert back == loss
    for name, gradient in expected.items():
        np.testing.assert_array_equal(moved[name], gradient)
        np.testing.assert_array_equal(again[name], gradient)


def test_gradients_and_values_move_and_a_tied_parameter_stays_one():
    model = GPT(GPTConfig(32, 8, 16, 1, 2))
    before = {name: array.copy() for name, array in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = np.full(parameter.shape, 2, parameter.dtype)
    model.to(Device())
    assert {type(p.grad) for p in model.parameters()} == {DeviceArray}
    for name, array in model.to(None).state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert all((p.grad == 2).all() for p in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_running_statistics_move():
    model = CNN((1, 8, 8), 4, 4, 1)
    with batch_coordinates(0, 0):
        model(Tensor(np.random.default_rng(0).standard_normal((4, 1, 8, 8)).astype(np.float32)))
    values = {name: array.copy() for name, array in named_buffers(model)}
    assert values
    model.to(Device())
    for name, array in named_buffers(model):
        assert isinstance(array, DeviceArray)
        np.testing.assert_array_equal(array.get(), values[name])


def test_without_values_there_is_no_way_back():
    model = MLP([8, 16, 4]).to(NoDevice())
    assert all(isinstance(p.data, MetaArray) and p.data.dtype == np.float32 for p in model.parameters())
    with pytest.raises(UsageError, match="has no values to move"):
        model.to("cpu")


def test_what_cannot_be_moved_is_refused():
    with pytest.raises(UsageError, match="--device 'tpu'; it must be cpu or cuda"):
        MLP([8, 4]).to("tpu")
    wrapped = SimWorld(2).run(lambda comm: DistributedDataParallel(MLP([8, 4]), comm))[0]
    with pytest.raises(AutogradError, match="move the model before you wrap it"):
        wrapped.to(Device())


@pytest.mark.cuda
def test_a_model_computes_the_same_on_a_gpu():
    try:
        device = device_of("cuda")
    except UsageError as error:
        pytest.skip(str(error))
    model = MLP([8, 16, 4])
    loss, expected = gradients(model)
    there, moved = gradients(model.to("cuda"), device)
    assert there == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        np.testing.assert_allclose(moved[name], gradient, rtol=1e-4, atol=1e-6)
