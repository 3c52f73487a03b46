"""Buffers: arrays of a module that are state and not trained, such as running statistics.

A module that has some defines `own_buffers()`, which returns them by name, and `load_buffers(values)`, which takes over
some or all of them.

Proved by: tests/checkpoint/test_buffers.py, tests/nn/test_module_to.py
"""

from collections.abc import Iterator
from typing import Any

from minidist.core.base import arrays as xp


def own_buffers(module: Any) -> dict[str, xp.Array]:
    """Return the buffers of this module alone, by name. Usually none."""
    return module.own_buffers() if hasattr(module, "own_buffers") else {}


def named_buffers(module: Any) -> Iterator[tuple[str, xp.Array]]:
    """Yield (qualified name, array) of the buffers of this module and all below it."""
    for path, part in module.named_modules():
        for key, value in own_buffers(part).items():
            yield (f"{path}.{key}" if path else key), value
