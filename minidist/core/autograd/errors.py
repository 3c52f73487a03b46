"""Errors of operations and of backward passes.

Proved by: tests/autograd/test_refusals.py
"""

from minidist.core.base.errors import MinidistError


class AutogradError(MinidistError):
    """An operation or a backward pass cannot be done as asked."""


class ShapeError(AutogradError, ValueError):
    """The shapes of operands do not fit; the message names the operation and both shapes."""


class DtypeError(AutogradError, TypeError):
    """Operands have two dtypes; minidist never promotes silently, because a float64 would get into float32 buffers."""


class VersionError(AutogradError):
    """A parameter or an input was changed between the forward and the backward that needs the older values."""
