"""Where a library adds to what the core does: the core calls `hooks.NAME(...)`, and runs where nobody has set the name.

    calls.py    algorithm="auto"  ──▶  choosers["auto"](comm, "all_reduce", 4096)  ──▶  "recursive_doubling"
    module.py   print(model)      ──▶  describe(model)  ──▶  the text

A name that is not below is `NOTHING` until it is set: a module of checks that checks nothing (`refusals`), a check of
one call (`check_layout`), a record that records nothing (`trace`), an addition that there is not (`split_attention`).
`minidist/additions.py` says which function or module this package sets; its docstring says what it gets and returns.

Proved by: tests/base/test_hooks.py
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

from minidist.core.base.errors import UsageError


class _Nothing:
    """It is false, and so is what a call of it returns, and of each of its attributes."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self


class _NoGuard(_Nothing):
    """The guard of a wrapper of a model: it checks nothing. op: "sum" or "avg", of the gradients."""

    def __init__(self, op: str, *comms: Any) -> None:
        self.op = op


NOTHING = _Nothing()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return NOTHING


def _as_given(name: str, value: Any, *_: Any, **__: Any) -> Any:
    return value


def _unchanged(value: Any, _: Any) -> Any:
    return value


def _any_place(*_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def not_in_the_core(*_: Any, **__: Any) -> Any:
    raise UsageError(
        "minidist/core has no half precision, dropout, devices, loading of weights, receives from any rank, further"
        " methods of tensors and plans, or further options of its wrappers; import all of minidist"
    )


def added(library: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of the module that the hook `library` gives, which is imported when it is called."""

    def method(*arguments: Any, **keywords: Any) -> Any:
        return getattr(globals()[library](), name)(*arguments, **keywords)

    method.__name__, method.__doc__ = name, f"`{name}` of the module that minidist/additions.py names for {library}."
    return method


# Modules, functions and classes without which the core refuses what needs them.
fibers = half = precision = module_methods = one_event = plan_methods = tensor_methods = not_in_the_core
dropped_weights = cut_run = shard_with_options = replica_reducers = not_in_the_core

# Names that stand for a choice among algorithms: (comm, operation, bytes of the whole array) -> the algorithm's name.
choosers: dict[str, Callable[[Any, str, int], str]] = {}
# Each looks at a graph before backward visits it: (pass, root node, gradient of its output).
backward_checks: list[Callable[[Any, Any, Any], None]] = []
# Bytes: the sum of a longer array is left to `special_sum`. Where each rank is a process, another core reads a message
# from the array itself, which makes the next write into it slow.
read_by_others = inf

# What returns a value without a library, too.
batch_coordinates: Callable[..., AbstractContextManager[Any]] = _any_place
check_number = check_whole = checked_setting = _as_given
describe: Callable[[Any], str] = object.__repr__
named_dtype: Callable[[str], Any] = str  # NumPy takes the names of its dtypes
guard: Callable[..., Any] = _NoGuard
map_object: Callable[[Any, Callable[[Any], Any]], Any] = _unchanged
named_mean: Callable[[Any, str], Any] = _unchanged
optimizer_attribute: Callable[[Any, str], Any] = object.__getattribute__
quoted: Callable[[object], str] = repr  # a value of the user in the sentence of an error
