"""What an optimizer refuses before it changes anything, and what ranks compare of its steps.

run: neighbouring slices, see core/optim/optimizer.py.

Proved by: tests/optim/test_optimizers.py, tests/parallel/test_zero.py
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any
from zlib import crc32

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import check_flag, check_number
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import is_half
from minidist.core.optim.optimizer import Group, Optimizer


def check_betas(name: str, betas: Any) -> tuple[float, float]:
    """Return (beta1, beta2) as floats; raise UsageError unless they are two numbers of at least 0 and below 1."""
    pair = tuple(betas) if isinstance(betas, Iterable) else ()
    if len(pair) != 2:
        raise UsageError(f"{name}={quoted(betas)}; give two numbers, (beta1, beta2)")
    return check_number(f"{name}[0]", pair[0], below=1), check_number(f"{name}[1]", pair[1], below=1)


# The settings of the core's optimizers.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "lr": check_number,
    "lr_factor": check_number,
    "weight_decay": check_number,
    "betas": check_betas,
    "eps": partial(check_number, above=0),
    "momentum": partial(check_number, below=1),
    "dampening": partial(check_number, least=-math.inf),
    "nesterov": check_flag,
}


def checked_setting(name: str, value: Any) -> Any:
    """Return the value of an optimizer's setting as it is kept; UsageError for one that is out of its range."""
    return CHECKS[name](name, value)


def check_nesterov(nesterov: bool, momentum: float, dampening: float) -> None:
    """Raise UsageError for Nesterov's method without momentum, or with dampening."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise UsageError(f"Nesterov needs momentum > 0 and no dampening, not {momentum:g} and {dampening:g}")


def check_group(group: Group) -> None:
    """Raise UsageError for a group that no name can match, or whose numbers are wrong."""
    if not callable(group.matches):
        raise UsageError(f"matches={quoted(group.matches)}; it must be a function of a parameter's name")
    check_number("lr_scale", group.lr_scale)
    if group.weight_decay is not None:
        check_number("weight_decay", group.weight_decay)


def check_reduced(runs: Iterable[Any]) -> None:
    """Raise UsageError when a slice's gradients are this rank's alone, or live in a shard that it does not know."""
    for run in runs:
        source = getattr(run.slice, "source", run.slice)
        unit = getattr(source, "flat", source)
        if getattr(unit, "unsynchronized", False):
            raise UsageError(
                f"the gradient of {run.pieces[0][0]!r} has parts that no other rank has seen, of backward passes under"
                " no_sync; run the forward of a step's last micro-batch outside no_sync, so that its backward sums all"
            )
        shard = getattr(unit, "shard", None)
        if shard is not None and shard is not source:
            raise UsageError(
                f"{run.pieces[0][0]!r} was sharded after this optimizer was made, so the optimizer would never see its"
                " gradient; shard first, then make the optimizer of sharded_parameters(model) (ZeRO 1 and 2: use"
                " ZeroOptimizer alone)"
            )


def check_run(run: Any, data: xp.Array, grad: xp.Array, names: Iterable[str]) -> None:
    """Raise UsageError unless data and gradient are contiguous, of the run's size and of one dtype.

    Also for a state of `names` that the run has not; before the first step it has none, and all are made.
    """
    size = run.pieces[-1][2]
    # Half-precision parameters may have gradients that were reduced in float32.
    same_kind = data.dtype == grad.dtype or (is_half(data.dtype) and grad.dtype == xp.float32)
    if data.size != size or data.shape != grad.shape or not same_kind or not data.flags.c_contiguous:
        raise UsageError(
            f"{run.pieces[0][0]!r}: data {data.shape} {data.dtype} and gradient {grad.shape} {grad.dtype}; the "
            f"optimizer needs {size} contiguous elements of one dtype in both"
        )
    missing = None if run.state is None else next((key for key in names if key not in run.state), None)
    if missing is not None:
        raise UsageError(
            f"{run.pieces[0][0]!r} has no state {missing!r}, which this step needs; settings that need more"
            " state, such as momentum, are set before the first step"
        )


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError for an optimizer without parameters, or with two parameters of one name."""
    if not names:
        raise UsageError("the optimizer got no trainable parameter; it needs at least one")
    for name, count in Counter(names).items():
        if count > 1:
            raise UsageError(
                f"two parameters are called {name!r}, and the optimizer keeps its state by name; call"
                " initialize(seed) at the end of the model's __init__, which names every parameter by its path and"
                " draws its values"
            )


def refuse_parameters(parameters: Any) -> None:
    """Raise UsageError: this value is neither a parameter nor an iterable of parameters."""
    raise UsageError(
        f"an optimizer got a value of type {type(parameters).__name__} among its parameters; pass"
        " model.parameters(), a FlatParameters, or slices with .data, .grad and .name"
    )


def check_optimizer_class(wrapper: str, given: Any, arguments: str) -> None:
    """Raise UsageError when `wrapper`, which makes an optimizer itself, is `given` one instead of a class.

    arguments: of the wrapper around the class and its settings, for the remedy: "model, {}, comm=comm".
    """
    if not callable(given):
        name = type(given).__name__ if isinstance(given, Optimizer) else "SGD"
        raise UsageError(
            f"{wrapper} got a value of type {type(given).__name__} where it needs an optimizer's class: it makes the"
            " optimizer itself, for slices of the parameters; pass the class and its settings:"
            f" {wrapper}({arguments.format(name)}, lr=...)"
        )


class StepDescription:
    """The number of steps, the learning rate, and a checksum of all settings, in one line: see `str`.

    It is written when it is asked for, because most steps are compared with none.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._count, self._lr = optimizer.step_count, (optimizer.lr, optimizer.lr_factor)
        settings = [getattr(optimizer, name) for name in optimizer.settings]
        self._values = [type(optimizer).__name__, *settings, float(optimizer.grad_scale)]
        self._groups = tuple(optimizer.groups)

    @cached_property
    def _text(self) -> str:
        groups = [(float(g.lr_scale), None if (w := g.weight_decay) is None else float(w)) for g in self._groups]
        checksum, count = crc32(repr((self._values, groups)).encode()), self._count
        lr = self._lr[0] * self._lr[1]
        return f"{count} update{'s' * (count != 1)} with lr {lr:.6g}, checksum of the settings {checksum:08x}"

    def __str__(self) -> str:
        return self._text
