"""Why a call failed: the core calls most of these functions after an error, so that a correct call costs nothing.

Proved by: tests/misuse/test_arguments.py
"""

import math
from collections.abc import Iterable
from typing import Any, NoReturn

from minidist.base.errors import DtypeError, UsageError, quoted
from minidist.core.autograd.parameter import Parameter
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import arrays as xp


def refuse_operand(value: Any) -> None:
    """Raise UsageError for an operand that is not a Tensor and cannot be converted to one."""
    if not isinstance(value, Tensor):
        what = quoted(value) if isinstance(value, str | bytes) else f"a value of type {type(value).__name__}"
        raise UsageError(f"an operation got {what}, and needs a Tensor; pass Tensor(array)")


def check_operand(value: Any, like: Any) -> None:
    """Raise an error unless `value` becomes a tensor of the dtype of `like`, or is an array of floats."""
    if not isinstance(like, Tensor):
        raise UsageError(
            f"an operation got values of type {type(value).__name__} and {type(like).__name__}, and needs a Tensor;"
            " pass Tensor(array)"
        )
    if like.dtype.kind in "biu" and getattr(value, "ndim", 0) == 0 and hasattr(value, "__mod__") and value % 1 != 0:
        raise DtypeError(
            f"the scalar {quoted(value)} does not fit a tensor of {like.dtype}; cast the tensor to a float dtype first"
        )
    if value is None:  # which NumPy takes for NaN
        refuse_operand(value)
    if not xp.is_array(value):
        try:
            xp.as_array(value, like.dtype)
        except (TypeError, ValueError):
            refuse_operand(value)


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


def refuse_layer(layer: object, linear: Any, context: Any) -> NoReturn:
    """Raise UsageError: a tensor-parallel layer is made without a context, perhaps without a layer that it splits."""
    name = type(layer).__name__
    if not hasattr(linear, "weight"):
        raise UsageError(f"{name} splits a Linear, and got a value of type {type(linear).__name__}; pass the layer")
    raise UsageError(
        f"{name} needs a ShardContext, and got a value of type {type(context).__name__}; let parallelize_module make"
        f" the layer: parallelize_module(model, comm, {{'*.c_fc': {name}}})"
    )


def refuse_parallelize(task: object, layout: object) -> NoReturn:
    """Raise UsageError: `parallelize` got something else than a task and a layout."""
    value, kind = (task, "Task") if hasattr(layout, "axes") else (layout, "ParallelLayout")
    raise UsageError(
        f"parallelize got a value of type {type(value).__name__} in place of a {kind}; write parallelize(task, comm,"
        " layout)"
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
