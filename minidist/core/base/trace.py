"""What messages are for, and the watchers of operations: what a record of a run is made of.

A message is sent for a *purpose*. Closed forms are compared with the bytes of each purpose, which the `Trace` of a rank
counts (minidist/base/traces.py). *Watchers* are told of recorded operations (`record`), other new arrays (`track`),
reads of a parameter's array and products of backward, so that the tape itself only records. The class `Watcher` in
minidist/base/watchers.py describes their methods.

Proved by: tests/comm/test_conformance.py, tests/base/test_memory.py, tests/autograd/test_extending.py,
tests/autograd/test_deferred_and_recorded.py
"""

from contextvars import ContextVar
from typing import Any, TypeVar

from minidist.core.base import hooks

_PURPOSES = """
gradient_reduce parameter_gather
tensor_forward tensor_backward regather
pipeline_activation pipeline_gradient tied dispatch
loss_divisor clip_norm metrics evaluation checkpoint startup user
"""
PURPOSES = _PURPOSES.split()

_purpose: ContextVar[str] = ContextVar("minidist_message_purpose", default="user")
_settled: ContextVar[bool] = ContextVar("minidist_message_purpose_settled", default=False)


def new_purpose(name: str) -> str:
    """Make a name one of `PURPOSES`, and return it: what a module outside the core sends has a name of that module."""
    if name not in PURPOSES:
        PURPOSES.append(name)
    return name


class purpose:
    """Messages posted inside the block are recorded under `name`, one of `PURPOSES`.

    whole: also those of blocks inside that name another purpose: what a layer sends for an evaluation is evaluation's.
    """

    __slots__ = ("before", "name", "whole")

    def __init__(self, name: str, whole: bool = False) -> None:
        if name not in PURPOSES:
            hooks.limits().refuse_purpose(name, PURPOSES)
        self.name, self.whole = name, whole

    def __enter__(self) -> None:
        settled = _settled.get()
        self.before = _purpose.set(_purpose.get() if settled else self.name), _settled.set(self.whole or settled)

    def __exit__(self, *exception: object) -> None:
        _purpose.reset(self.before[0])
        _settled.reset(self.before[1])


current_purpose = _purpose.get

# The watchers of a rank; without any, which is the default, nothing is called.
watchers: ContextVar[tuple[Any, ...]] = ContextVar("minidist_watchers", default=())

T = TypeVar("T")


def track(array: T, purpose: str) -> T:
    """Tell the watchers of a new array; a `MemoryAccount` counts it under `purpose`. Returns `array`."""
    for watcher in watchers.get():
        watcher.allocated(array, purpose)
    return array
