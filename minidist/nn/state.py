"""Methods of a module that the core does without: its values as a dict, its training mode, and a move to a device.

Proved by: tests/nn/test_modules.py, tests/nn/test_flat.py
"""

from collections.abc import Iterable, Mapping
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, nearest
from minidist.core.autograd import AutogradError, Parameter, ShapeError
from minidist.core.nn.module import Module
from minidist.nn.buffers import named_buffers, own_buffers


def train(module: Module, mode: bool = True) -> Module:
    """Switch training mode, in which dropout drops elements, on or off. Returns the module."""
    for part in module.modules():
        part.training = mode
    return module


def eval(module: Module) -> Module:
    """Switch training mode off. Returns the module."""
    return train(module, False)


def to(module: Module, device: Any) -> Module:
    """Move all parameters, their gradients and the buffers to a device, in place. Returns the module."""
    from minidist.nn.moving import move

    move(module, device)
    return module


def state_dict(module: Module) -> dict[str, xp.Array]:
    """Qualified name to array, of parameters and buffers; a tied parameter under each of its names.

    The arrays of parameters are not copied.
    """
    return {name: parameter.data for name, parameter in module._all_parameters()} | dict(named_buffers(module))


def load_state_dict(module: Module, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
    """Copy values in; returns (missing, unexpected) names. With strict, any of them is an error that names the key.

    A shape that differs is always an error, naming the key and both shapes.
    """
    _check_dict(state)
    # A missing name is not an error when the tied parameter's other name is there.
    own, buffers = dict(module._all_parameters()), dict(named_buffers(module))
    given = {name: parameter for name, parameter in own.items() if name in state}
    loaded = set(given.values())
    missing = [name for name in own if own[name] not in loaded] + [name for name in buffers if name not in state]
    known = {**own, **buffers}
    unexpected = [name for name in state if name not in known]
    if strict:
        _refuse_names(missing, unexpected, own)

    # All shapes are checked before any value is copied, so an error leaves the model as it was.
    _check_shapes(state, given, buffers)
    for name, parameter in given.items():
        xp.store(parameter.data, xp.as_array(state[name], parameter.dtype))
        parameter.updated()
    _load_buffers(module, state, buffers)

    # Replicas on other ranks must have got the same values: whoever wrapped the model compares them.
    for flat in dict.fromkeys(parameter.flat for parameter in given.values()):
        for check in flat.load_checks if flat is not None else ():
            check()
    return missing, unexpected


def _check_dict(state: Any) -> None:
    """Raise UsageError for what is no dict."""
    if not isinstance(state, Mapping):
        raise UsageError(f"load_state_dict got a value of type {type(state).__name__}; pass a dict of state_dict()")


def _load_buffers(model: Module, state: Mapping[str, Any], buffers: Mapping[str, xp.Array]) -> None:
    """Give each module its own buffers, by its own names for them."""
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for path, module in modules:
        names = {key: f"{path}.{key}" if path else key for key in own_buffers(module)}
        values = {
            key: xp.on_device_of(buffers[name], xp.array(state[name], xp.float64))
            for key, name in names.items()
            if name in state
        }
        if values:
            module.load_buffers(values)


def _refuse_names(missing: list[str], unexpected: list[str], own: Mapping[str, Parameter]) -> None:
    """Raise AutogradError for a name of the model that the state has not, or of the state that the model has not."""
    if missing:
        raise AutogradError(
            f"load_state_dict: {missing[0]!r} is missing{nearest(missing[0], unexpected)}; missing: {missing}"
        )
    if unexpected:
        raise AutogradError(
            f"load_state_dict: unknown {unexpected[0]!r}{nearest(unexpected[0], own)}; unknown: {unexpected}"
        )


def _check_shapes(
    state: Mapping[str, Any], parameters: Mapping[str, Parameter], buffers: Mapping[str, xp.Array]
) -> None:
    """Raise AutogradError for a sharded parameter, and ShapeError for a value of another shape than the model's."""
    # Of a sharded parameter there is at most a gathered copy, which the next gather replaces.
    for name, parameter in parameters.items():
        if parameter.flat is not None and getattr(parameter.flat.shard, "own", None) is not None:
            raise AutogradError(
                f"load_state_dict: {name!r} is sharded, and each rank has a part of it; load the state before"
                " fully_shard, or set this rank's part, the `data` of shards_of(model)"
            )
    holders: dict[str, Any] = {**parameters, **buffers}
    for name, holder in holders.items():
        if name in state and (shape := xp.as_array(state[name]).shape) != holder.shape:
            raise ShapeError(f"load_state_dict: {name!r} has shape {shape}; the model's has {holder.shape}")
