"""Why a call failed: the core calls most of these functions after an error, so that a correct call costs nothing.

Proved by: tests/misuse/test_arguments.py
"""

import math
from collections.abc import Iterable
from typing import Any, NoReturn

from minidist.core.autograd.parameter import Parameter
from minidist.core.autograd.tensor import Tensor
from minidist.core.base.errors import UsageError, quoted


def refuse_operand(value: Any) -> None:
    """Raise UsageError for an operand that is not a Tensor and cannot be converted to one."""
    if not isinstance(value, Tensor):
        what = quoted(value) if isinstance(value, str | bytes) else f"a value of type {type(value).__name__}"
        raise UsageError(f"an operation got {what}, and needs a Tensor; pass Tensor(array)")


def refuse_values(value: Any) -> None:
    """Raise UsageError: a Tensor of this value would not hold numbers."""
    raise UsageError(f"Tensor({quoted(value)}); pass an array, or numbers in lists of equal lengths")


def check_parameters(wrapper: str, parameters: Any) -> None:
    """Raise UsageError where a wrapper got something other than parameters, such as their model."""
    values = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    for value in values:
        if not isinstance(value, Parameter):
            raise UsageError(
                f"{wrapper} got a value of type {type(value).__name__} among its parameters; pass model.parameters()"
            )


def refuse_parts(function: str, flat: Any) -> NoReturn:
    """Raise UsageError: a function that needs a FlatParameters got something else, such as a model."""
    raise UsageError(
        f"{function} got a value of type {type(flat).__name__}; pass a FlatParameters, such as"
        " FlatParameters(model.parameters())"
    )


def refuse_function(comm: Any, function: object) -> NoReturn:
    """Raise UsageError: a stream cannot call this."""
    raise UsageError(
        f"rank {comm.rank}: run_async({quoted(function)}); pass a function without arguments, which the communicator's"
        " stream calls"
    )


def check_operations(comm: Any, operations: Any, seconds: Any) -> list[tuple[float, float]]:
    """Return the operations, which may be a generator, as numbers; UsageError for those or seconds that are none."""
    try:
        listed = [(float(flops + 0.0), float(nbytes + 0.0)) for flops, nbytes in operations]  # "1" is no number
        if not 0.0 <= seconds + 0.0 < math.inf:
            raise UsageError(f"rank {comm.rank}: compute of {seconds:g} s; it must be a finite number of at least 0")
        return listed
    except UsageError:  # which is a ValueError, too
        raise
    except (TypeError, ValueError):
        raise UsageError(
            f"rank {comm.rank}: compute({quoted(operations)}, seconds={quoted(seconds)}); pass (FLOPs, bytes) of each"
            " operation, such as [(2e9, 1e6)], or a number of seconds"
        ) from None
