"""Methods of a tensor and of a module that no program of the core needs. Each imports its code when it is called first.

The core calls these functions where it defines the classes, and names the methods there for type checkers.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_refusals.py, tests/nn/test_modules.py
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def _later(module: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of a module, which is imported when the function is called."""

    def method(*arguments: Any, **keywords: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **keywords)

    method.__name__, method.__doc__ = name, f"`{name}` of {module}."
    return method


def add_tensor_methods(tensor: Any) -> None:
    """Add the methods in ops/tensor_methods.py to the class `Tensor`."""
    method = partial(_later, "minidist.nn.ops.tensor_methods")
    tensor.__neg__ = method("neg")
    tensor.__sub__ = method("sub")
    tensor.__rsub__ = method("rsub")
    tensor.__rtruediv__ = method("rtruediv")
    tensor.__pow__ = method("pow")
    tensor.__bool__ = method("bool")
    tensor.__iter__ = method("iter")
    tensor.__array__ = method("array")
    tensor.__array_function__ = method("array_function")
    tensor.exp = method("exp")
    tensor.log = method("log")
    tensor.max = method("max")
    tensor.relu = method("relu")
    tensor.sqrt = method("sqrt")
    tensor.tanh = method("tanh")
    tensor.transpose = method("transpose")
    tensor.detach = method("detach")
    tensor.astype = method("astype")
    tensor.__reduce_ex__ = method("reduce_ex")


def add_module_methods(module: Any) -> None:
    """Add the methods in state.py to the class `Module`."""
    method = partial(_later, "minidist.nn.state")
    module.train = method("train")
    module.eval = method("eval")
    module.to = method("to")
    module.state_dict = method("state_dict")
    module.load_state_dict = method("load_state_dict")
