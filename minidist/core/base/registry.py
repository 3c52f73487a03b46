"""Entries that are found by name, so that a new algorithm or schedule is one new file.

A decorator such as `@schedule("1f1b")` adds the entry when its file is imported. A name that no entry has is looked for
in a library's files (`hooks.load_more`, `hooks.other_entry`).

Proved by: tests/base/test_registry.py
"""

from collections.abc import Iterable
from typing import TypeVar

from minidist.core.base import hooks
from minidist.core.base.errors import UsageError

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name. Looking up an unknown name raises a UsageError that lists the names.

    kind: what an entry is, for that sentence: "schedule", "all_reduce algorithm".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.aliases: dict[str, str] = {}  # other spellings, in lower case -> name

    def add(self, name: str, entry: Entry, aliases: Iterable[str] = ()) -> None:
        """Add an entry; a name that is added again replaces it. Aliases are found in upper and in lower case."""
        self[name] = entry
        self.aliases.update({alias.lower(): name for alias in (name, *aliases)})

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (hooks.load_more(self) and name in self)

    def __missing__(self, name: str) -> Entry:
        known = self.aliases.get(str(name).lower())  # a caller may pass None
        if known is not None:
            return self[known]
        found: Entry = self[name] if hooks.load_more(self) else hooks.other_entry(self, str(name))
        if not found:
            raise UsageError(f"unknown {self.kind} {hooks.quoted(str(name))}; there are {', '.join(sorted(self))}")
        return found
