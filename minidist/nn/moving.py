"""Move a model to a device, or back to the host: what `model.to(device)` does.

What a forward pass makes in addition to its inputs (positions, masks of dropout) is made inside `creating_on(device)`:

    device = device_of("cuda")
    model = GPT(...).to(device)
    with creating_on(device):
        loss = cross_entropy(model(xp.to_device(tokens)), xp.to_device(targets))

As in PyTorch, move a model before an optimizer or a strategy is made of it: an optimizer's states stay where they are.

Proved by: tests/nn/test_module_to.py, tests/cupy/test_device.py
"""

from typing import Any

from minidist.base import arrays as xp
from minidist.base.device import device_of, moved
from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import AutogradError, Parameter
from minidist.core.base.trace import track
from minidist.nn.buffers import own_buffers


def move(module: Any, device: "str | xp.Device | None") -> None:
    """Move the parameters, gradients and buffers of `module`. device: a name, or None for the host."""
    target = device_of(device) if isinstance(device, str) else device
    if target is not None and not hasattr(target, "asarray"):
        raise UsageError(f"to({quoted(device)}): no device; pass 'cpu', 'cuda' or a Device")
    for parameter in module.parameters():
        _move_parameter(parameter, target)
    for part in module.modules():
        buffers = own_buffers(part)
        if buffers:
            part.load_buffers({name: moved(array, target) for name, array in buffers.items()})


def _move_parameter(parameter: Parameter, device: xp.Device | None) -> None:
    """Move the values and the gradient of a parameter. An error when a flat array owns them."""
    if parameter.flat is not None:
        raise AutogradError(
            f"parameter {parameter.name!r} lies in the flat array of a wrapped model; move the model before you wrap it"
        )
    grad = parameter.grad
    parameter.gradient.release()
    parameter.bind(track(moved(parameter.data, device), "parameter"))
    parameter.updated()
    if grad is not None:
        parameter.grad = moved(grad, device)
