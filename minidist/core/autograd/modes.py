"""Whether operations are recorded, and who receives weight gradients: a rank's state, in ContextVars.

Proved by: tests/autograd/test_backward.py, tests/autograd/test_deferred_and_recorded.py
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

grad_enabled: ContextVar[bool] = ContextVar("minidist_grad_enabled", default=True)
is_grad_enabled = grad_enabled.get


@contextmanager
def set_grad_enabled(enabled: bool) -> Iterator[None]:
    """Record operations in the block, or do not."""
    token = grad_enabled.set(enabled)
    try:
        yield
    finally:
        grad_enabled.reset(token)


def no_grad() -> AbstractContextManager[None]:
    """Operations in the block are not recorded: their results need no gradient and keep nothing alive."""
    return set_grad_enabled(False)


# When set, what a node keeps of an operation's arrays: keeper(array) returns an object with `.data` and `.stored`.
# Parameters, inputs and small statistics are kept as they are. (PyTorch's `saved_tensors_hooks` has two functions.)
saved_tensors: ContextVar[Callable[[Any], Any] | None] = ContextVar("minidist_saved_tensors", default=None)


# When set, weight gradients go to this function, (parameter, array) once per use site, and not into the gradients.
contribution_recorder: ContextVar[Callable[[Any, Any], None] | None] = ContextVar(
    "minidist_contribution_recorder", default=None
)
