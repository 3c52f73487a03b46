"""The list of all exhibits, in the order of their numbers.

Proved by: tests/museum/test_museum.py
"""

from minidist.core.base.errors import UsageError, nearest, quoted
from minidist.course.museum.exhibit import Exhibit


def exhibits() -> list[Exhibit]:
    """Return all exhibits, sorted by number."""
    from minidist.course.museum import (
        gradients,
        memory,
        messages,
        pipelines,
        recent_data,
        recent_loss_scales,
        recent_losses,
        recent_optimizer,
        recent_parallel,
        split,
    )

    modules = (
        *(gradients, memory, messages, pipelines, split),
        *(recent_data, recent_losses, recent_parallel, recent_optimizer, recent_loss_scales),
    )
    everything = [e for module in modules for e in module.EXHIBITS]
    return sorted(everything, key=lambda e: (_number(e.number), e.number))


def _number(text: str) -> int:
    return int(text.rstrip("abcdefg"))


def find(text: str) -> list[Exhibit]:
    """Return the exhibits of a number, or of a range: "1" gives 1a and 1b, "27-29" all from 27a to 29.

    Raises UsageError when there is none.
    """
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal():
        found = [e for e in exhibits() if int(first) <= _number(e.number) <= int(last)]
    else:
        found = [e for e in exhibits() if text in (e.number, str(_number(e.number)))]
    if not found:
        numbers = [e.number for e in exhibits()]
        raise UsageError(
            f"the museum has no exhibit {quoted(text)}{nearest(text, numbers)}; it has {', '.join(numbers)}"
        )
    return found
