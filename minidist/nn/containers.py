"""A list and a dict of modules as modules, as in PyTorch. A plain list or dict as an attribute does the same.

Proved by: tests/nn/test_modules.py, tests/nn/test_describe.py
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from minidist.core.nn.module import Module


class ModuleList(Module):
    """A list of modules, called by their positions: "blocks.0"."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._modules = list(modules)

    def _members(self) -> Iterator[tuple[str, Any]]:
        return _entries_of(enumerate(self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules)

    def __getitem__(self, index: int) -> Module:
        return self._modules[index]

    def append(self, module: Module) -> Self:
        """Add a module at the end."""
        self._modules.append(module)
        return self


class ModuleDict(Module):
    """Modules by name: "heads.first"."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self._modules = dict(modules or {})

    def _members(self) -> Iterator[tuple[str, Any]]:
        return _entries_of(self._modules.items())

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, key: str) -> bool:
        return key in self._modules

    def __getitem__(self, key: str) -> Module:
        return self._modules[key]

    def __setitem__(self, key: str, module: Module) -> None:
        self._modules[key] = module

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._modules.keys()

    def values(self) -> Iterable[Module]:
        """The modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Module]]:
        """Names and modules."""
        return self._modules.items()


def _entries_of(pairs: Iterable[tuple[Any, Module]]) -> Iterator[tuple[str, Any]]:
    return ((str(key), module) for key, module in pairs)
