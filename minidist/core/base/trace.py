"""What messages are for: a purpose, under which the record of a run counts each of them.

Closed forms are compared with the bytes of each purpose. The record itself, a `Trace` of every rank, is kept by
`minidist/base/traces.py`.

Proved by: tests/comm/test_conformance.py
"""

from contextvars import ContextVar

from minidist.core.base.errors import UsageError, quoted

PURPOSES = [
    "gradient_reduce",
    "parameter_gather",
    "tensor_forward",
    "tensor_backward",
    "regather",
    "pipeline_activation",
    "pipeline_gradient",
    "tied",
    "dispatch",
    "loss_divisor",
    "clip_norm",
    "metrics",
    "evaluation",
    "checkpoint",
    "startup",
    "user",
]

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
            raise UsageError(
                f"unknown message purpose {quoted(name)}; one of {', '.join(PURPOSES)}; new_purpose adds it"
            )
        self.name, self.whole = name, whole

    def __enter__(self) -> None:
        settled = _settled.get()
        self.before = _purpose.set(_purpose.get() if settled else self.name), _settled.set(self.whole or settled)

    def __exit__(self, *exception: object) -> None:
        _purpose.reset(self.before[0])
        _settled.reset(self.before[1])


current_purpose = _purpose.get
