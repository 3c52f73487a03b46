"""What a module's call refuses: an array where a Tensor needs a gradient, because no gradient gets through an array.

Proved by: tests/nn/test_hooks.py, tests/nn/test_modules.py
"""

from collections.abc import Callable
from typing import Any

from minidist.core.autograd import AutogradError, Tensor, is_grad_enabled
from minidist.core.base import arrays as xp
from minidist.core.nn.module import Module


def refuse_changed(module: Module, kind: str, hook: Callable[..., Any], before: Any, after: Any) -> None:
    """Raise AutogradError when what a hook of `kind` returned is an array where a Tensor needs a gradient."""
    refuse_arrays(module, f"the {kind} {getattr(hook, '__qualname__', type(hook).__name__)}", before, after)


def refuse_output(module: Module, args: tuple[Any, ...], output: xp.Array) -> None:
    """Raise AutogradError when the array that `forward` returned is where a gradient would have to come through.

    It would have to get to the first argument, or, while the module trains, to its parameters.
    """
    if args:
        refuse_arrays(module, "forward", args[0], output)
    if not (module.training and is_grad_enabled()):
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            raise AutogradError(
                f"forward of {type(module).__name__} {module.name!r} returns an array, so its parameter {name!r} gets"
                " no gradient; return the Tensor whose `data` it is, or call the module in no_grad() or after"
                " eval()"
            )


def refuse_arrays(module: Module, what: str, before: Any, after: Any) -> None:
    """Raise AutogradError when `after`, which takes the place of `before`, is an array and no gradient gets there.

    Of tuples, each value takes the place of the one at its position.
    """
    before, after = (value if isinstance(value, tuple) else (value,) for value in (before, after))
    for old, new in zip(before, after, strict=False):
        if isinstance(old, Tensor) and old.requires_grad and xp.is_array(new) and is_grad_enabled():
            raise AutogradError(
                f"{what} of {type(module).__name__} {module.name!r} returns an array where a Tensor needs a gradient,"
                " and no gradient gets through an array; return a Tensor, or call the module in no_grad()"
            )
