"""Watchers are told of every recorded operation, so that the tape itself only records.

    record(...)                ──▶  recorded                            an operation has been made
    track(array, purpose)      ──▶  allocated                           an array that no operation returned
    Parameter.data             ──▶  parameter_read                      a parameter's array is read
    a backward pass, per node  ──▶  input_gradient, weight_gradient     a product of backward is computed

The watchers of a rank are a tuple in a ContextVar; without any, which is the default, nothing is called. The class
`Watcher` in minidist/base/watchers.py describes these methods.

Proved by: tests/base/test_memory.py, tests/autograd/test_extending.py, tests/autograd/test_deferred_and_recorded.py
"""

from contextvars import ContextVar
from typing import Any, TypeVar

watchers: ContextVar[tuple[Any, ...]] = ContextVar("minidist_watchers", default=())

T = TypeVar("T")


def track(array: T, purpose: str) -> T:
    """Tell the watchers of a new array; a `MemoryAccount` counts it under `purpose`. Returns `array`."""
    for watcher in watchers.get():
        watcher.allocated(array, purpose)
    return array
