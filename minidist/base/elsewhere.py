"""What the core calls and does not contain: functions that import their module when they are called.

The core imports only itself. What few programs need is in modules around it: kernels of a GPU, half precision, a second
kind of fibers, what `print(model)` shows. Each has a name here, and `minidist/around_the_core.py`, which is loaded with
the package, sets the function:

    nn/module.py          elsewhere.describe(self)  ──▶  around_the_core.py: imports nn/describe.py, calls it

Proved by: tests/base/test_elsewhere.py
"""

from collections.abc import Callable
from typing import Any


class Elsewhere:
    """The functions, as attributes. They are the same for all ranks and hold no state."""

    # The backend of base/fibers.py where there is no greenlet: a module with its five names.
    fibers: Callable[[], Any]
    # An array that is not one of NumPy's -> the module of whole operations on it, or None.
    kernels_of: Callable[[Any], Any]
    # The module base/half.py: conversions and sums of 16-bit floats.
    half: Callable[[], Any]
    # The module autograd/precision.py: operands in half precision, and in which precision an operation computes.
    precision: Callable[[], Any]
    # (tensor, version, array) -> the `SavedTensor` that a node keeps of a parameter or an input.
    saved_tensor: Callable[[Any, int, Any], Any]
    # The module nn/refusals.py: what a module's call refuses.
    refusals: Callable[[], Any]
    # (module, state, strict) -> (missing, unexpected) names: copies values into a model.
    load_state_dict: Callable[[Any, Any, bool], tuple[list[str], list[str]]]
    # The module optim/checks.py: what an optimizer refuses.
    optimizer_checks: Callable[[], Any]
    # (optimizer, saved) -> None: copies a state into an optimizer.
    load_optimizer: Callable[[Any, Any], None]
    # A module of a model -> the text that `print` shows.
    describe: Callable[[Any], str]
    # (module, device) -> None: moves a model's parameters, gradients and buffers.
    move: Callable[[Any, Any], None]


elsewhere = Elsewhere()
