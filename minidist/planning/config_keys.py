"""The keys of a model's `config.json`, read with the defaults and the second names of its kind of model.

A key that is missing has the default of its class in `transformers` 5.24 (class_defaults.json), because that is the
model that `transformers` makes of the file. A key that no part of the model depends on is never
looked at, whatever its value is.

Proved by: tests/planning/test_architecture.py, tests/planning/test_families.py
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MAX_LAYERS
from minidist.base.read_file import read_json
from minidist.planning.architecture import MAX_EXPERTS, MAX_SIZE

REMEDY = "give the config.json of a Hugging Face model"
MAX_HEAD_SIZE = 10**5  # of a head, or of a latent vector
REQUIRED = ("hidden_size", "num_hidden_layers")  # a model without them is not described

# How a key's name says what it counts, and the most that it may be; any other is a size.
LIMITS = (
    (("num_hidden_layers", "depth"), MAX_LAYERS),
    (("head_dim", "lora_rank"), MAX_HEAD_SIZE),
    (("experts", "experts_per_tok"), MAX_EXPERTS),
)


@cache
def class_defaults() -> Mapping[str, Any]:
    """Return {model_type: {"defaults": {key: value}, "names": {second name: key}}}."""
    path = Path(__file__).with_name("class_defaults.json")
    return dict(read_json(path, "minidist's file", "install minidist again"))


def shown(value: Any) -> str:
    """Return a value as JSON writes it where Python writes another word."""
    return str(json.dumps(value)) if value is None or isinstance(value, bool) else quoted(value)


class Keys:
    """The keys of a kind of model; a wrong one is an error that names it."""

    def __init__(self, content: Mapping[str, Any], file: str, kind: str, is_whole: bool = True) -> None:
        known = class_defaults().get(kind, {"defaults": {}, "names": {}})
        self.content, self.file, self.kind = dict(content), file, kind
        self.defaults: Mapping[str, Any] = known["defaults"]
        self.required = REQUIRED if is_whole else ()
        self.written: dict[str, str] = {}  # key -> the second name that the file has for it
        for name, key in known["names"].items():
            if name in content:
                self._take_second_name(name, key)

    def _take_second_name(self, name: str, key: str) -> None:
        """Move the value of a second name to the key."""
        value = self.content.pop(name)
        if self.content.setdefault(key, value) != value:
            raise UsageError(
                f"{name} in {self.file} is {shown(value)}, and {key}, which means the same, is"
                f" {shown(self.content[key])}; leave one of them out"
            )
        self.written[key] = name

    def name(self, key: str) -> str:
        """Return what a sentence calls a key: its name in the file, or that its value is a default."""
        return self.written.get(key, key) if key in self.content else f"the default {key}"

    def wrong(self, key: str, rule: str) -> UsageError:
        """Return the error for a key whose value breaks a rule."""
        return UsageError(f"{self.name(key)} in {self.file} is {shown(self.get(key))}; {rule}")

    def get(self, key: str) -> Any:
        """Return a value as it is in the file, or the default, or None."""
        return self.content.get(key, self.defaults.get(key))

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number, or the one that a list has for all layers.

        default: of a key that the class has no default for, or that is null.
        """
        value = self.get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if key in self.required and key not in self.content:
            raise UsageError(f"{self.file} has no key {self.second_name(key)!r}; add it, or {REMEDY}")
        if value is None and default is not None:
            return default
        most = next((most for ends, most in LIMITS if key.endswith(ends)), MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"it must be a whole number from {least:,} to {most:,}")
        return value

    def second_name(self, key: str) -> str:
        """Return the name by which files of this kind write a key: gpt2's n_embd, not hidden_size."""
        names = class_defaults().get(self.kind, {}).get("names", {})
        return next((name for name, meant in names.items() if meant == key), key)

    def maybe(self, key: str, least: int = 1) -> int | None:
        """Return a whole number, or None for null."""
        return None if self.get(key) is None else self.size(key, least=least)

    def flag(self, key: str) -> bool:
        """Return true or false; a key that is missing without a default is false."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def number(self, key: str, least: float = 0.0, most: float = 1e6) -> float:
        """Return a number, such as a factor."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(key, f"it must be a number from {least:g} to {most:g}")
        return value

    def items(self, key: str, kinds: type | tuple[type, ...] = str) -> list[Any] | None:
        """Return a list of `kinds`, or None for null."""
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, kinds) for item in value)):
            raise self.wrong(key, "it must be a list with an entry for each layer")
        return value

    def letters(self, key: str, separator: str = "") -> list[str] | None:
        """Return the items of a text or of a list, as texts without spaces, or None for null."""
        value = self.get(key)
        if isinstance(value, str):
            return [item.strip() for item in value.split(separator)] if separator else list(value)
        items = self.items(key, (str, int))
        return None if items is None else [str(item) for item in items]

    def inside(self, key: str, kind: str | None = None, is_whole: bool = False) -> "Keys":
        """Return the keys of an object in the file; null and a missing one is an empty object."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "it must be an object")
        return Keys(value or {}, f"{key} of {self.file}", kind or f"{self.kind}.{key}", is_whole)
