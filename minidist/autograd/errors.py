"""What can be wrong with an operation or a backward pass."""

from minidist.base.errors import MinidistError


class AutogradError(MinidistError):
    """An operation or a backward pass that cannot be done as asked."""


class ShapeError(AutogradError, ValueError):
    """Operands whose shapes do not fit; the message names the operation and both shapes."""


class DtypeError(AutogradError, TypeError):
    """Operands of two dtypes: minidist never promotes silently (a float64 would travel into a float32 buffer)."""


class VersionError(AutogradError):
    """A parameter was updated between the forward and the backward that needs the older values."""
