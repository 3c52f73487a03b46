"""The methods of a tensor that no model of the core uses. Each imports `tensor_methods.py` when it is called first.

The core imports this module after its operators (minidist/core/autograd/operators.py), and names the methods in
`Tensor` for type checkers.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_refusals.py
"""

from collections.abc import Callable
from functools import partial

from minidist.core.autograd.tensor import Tensor
from minidist.core.base import hooks

_later: Callable[[str], Callable[..., Tensor]] = partial(hooks.added, "tensor_methods")

Tensor.__neg__ = _later("neg")
Tensor.__sub__ = _later("sub")
Tensor.__rsub__ = _later("rsub")
Tensor.__rtruediv__ = _later("rtruediv")
Tensor.__pow__ = _later("pow")
Tensor.__bool__ = _later("bool")
Tensor.__iter__ = _later("iter")
Tensor.__array__ = _later("array")
Tensor.__array_function__ = _later("array_function")
Tensor.exp = _later("exp")
Tensor.log = _later("log")
Tensor.max = _later("max")
Tensor.relu = _later("relu")
Tensor.sqrt = _later("sqrt")
Tensor.tanh = _later("tanh")
Tensor.transpose = _later("transpose")
Tensor.detach = _later("detach")
Tensor.astype = _later("astype")
