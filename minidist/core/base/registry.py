"""Entries that are found by name, so that a new algorithm or schedule is one new file and nothing else.

A decorator such as `@schedule("1f1b")` adds the entry when its file is imported. A name that no entry has imports
further files, once (`more`).

Proved by: tests/base/test_registry.py
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from minidist.core.base import hooks
from minidist.core.base.errors import UsageError, nearest, quoted

Entry = TypeVar("Entry")


class Registry(dict[str, Entry]):
    """Entries by name. Looking up an unknown name raises a UsageError that lists the names and says the nearest one.

    kind: what an entry is, for that sentence: "schedule", "all_reduce algorithm". more: returns what adds further
    entries, which is called once, when a name is none of those that are there.
    """

    def __init__(self, kind: str, more: Callable[[], list[Callable[[], None]]] = list) -> None:
        super().__init__()
        self.kind, self.more = kind, more
        self.aliases: dict[str, str] = {}  # other spellings, in lower case -> name

    def add(self, name: str, entry: Entry, aliases: Iterable[str] = ()) -> None:
        """Add an entry; a name that is added again replaces it. Aliases are found in upper and in lower case."""
        self[name] = entry
        self.aliases.update({alias.lower(): name for alias in (name, *aliases)})

    def load_more(self) -> bool:
        """Load what adds further entries; return whether some were not there yet."""
        # Cleared first: what they load looks at this table, too.
        later = list(self.more())
        self.more().clear()
        for load in later:
            load()
        return bool(later)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.load_more() and name in self)

    def __missing__(self, name: str) -> Entry:
        name = str(name)  # a caller may pass None
        known = self.aliases.get(name.lower())
        if known is None and self.load_more():
            return self[name]
        if known is None:
            hooks.check_name(name)
            hint = nearest(name.lower(), self.aliases)
            raise UsageError(f"unknown {self.kind} {quoted(name)}{hint}; there are {', '.join(sorted(self))}")
        return self[known]
