"""The list of all exhibits, in the order of their numbers.

Proved by: tests/museum/test_museum.py
"""

from minidist.base.errors import UsageError, nearest, quoted
from minidist.museum.exhibit import Exhibit


def exhibits() -> list[Exhibit]:
    """Return all exhibits, sorted by number."""
    from minidist.museum import gradients, memory, messages, pipelines, split

    everything = [e for module in (gradients, memory, messages, pipelines, split) for e in module.EXHIBITS]
    return sorted(everything, key=lambda e: (_number(e.number), e.number))


def _number(text: str) -> int:
    return int(text.rstrip("abcdefg"))


def find(text: str) -> list[Exhibit]:
    """Return the exhibits of a number: "4" gives 4a, 4b and 4c. Raises UsageError when there is none."""
    found = [e for e in exhibits() if text in (e.number, str(_number(e.number)))]
    if not found:
        numbers = [e.number for e in exhibits()]
        raise UsageError(
            f"the museum has no exhibit {quoted(text)}{nearest(text, numbers)}; it has {', '.join(numbers)}"
        )
    return found
