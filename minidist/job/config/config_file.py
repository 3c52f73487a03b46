"""A job in a TOML or JSON file, with the names of the flags and the same sentences for wrong values.

    [model]                     [axes]
    layers = 4                  dp = 2
    width = 128                 tp = 2
                                sequence-parallel = true

Tables only arrange a file: their names are free, and a key means the same in any of them. `--set axes.tp=4` overrides
the file by the file's own name of a setting, and a flag on the command line overrides both.

Proved by: tests/config/test_config_file.py
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.read_file import MAX_TOML_LINE, parse_toml, read_json, read_toml
from minidist.job.config.train_config import TrainConfig


def read_config(path: str | Path, what: str = "--config") -> dict[str, Any]:
    """Return {field: value}, as `TrainConfig.make` takes them. what: the beginning of the sentence of an error.

    Raises UsageError for a file that cannot be read, an unknown setting (with the nearest one), or one that appears
    twice.
    """
    path = Path(path)
    return _fields(_leaves(_parse(path, what)), str(path))


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return {field: value} from texts like axes.tp=4: a dotted key of a file and a TOML value, or else a word.

    Raises UsageError for a text without `=`, an unknown setting (with the nearest one), or one that appears twice.
    """
    leaves = []
    for text in texts:
        key, equals, word = text.partition("=")
        if not equals:
            raise UsageError(f"--set {quoted(text)}; it must be KEY=VALUE, such as axes.tp=4")

        # A TOML value where the text reads as one (4, true, [1, 2]); anything else is a word, so quotes are not
        # needed.
        try:
            value = parse_toml(f"value = {word}")["value"]
        except ValueError:
            value = word
            if len(word) > MAX_TOML_LINE:
                raise UsageError(f"--set {quoted(text)} is too long; put the value into a file") from None
        leaves.append((key.strip(), value))
    return _fields(leaves, "--set")


def _fields(leaves: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in leaves:
        # The last part of a dotted key is the setting: axes.sequence-parallel -> sequence_parallel.
        field = key.rpartition(".")[2].replace("-", "_")
        if field not in TrainConfig.model_fields:
            raise UsageError(
                f"{quoted_path(where, marks=False)}: unknown setting"
                f" {quoted(key)}{nearest(field, TrainConfig.model_fields)}; correct its name, or leave it out"
            )
        if field in result:
            raise UsageError(
                f"{quoted_path(where, marks=False)}: {quoted(field)} appears twice, the second time as {quoted(key)};"
                " leave one of them out"
            )
        result[field] = value
    return result


def _parse(path: Path, what: str) -> dict[str, Any]:
    readers: dict[str, Any] = {".toml": read_toml, ".json": read_json}
    if path.suffix not in readers:
        raise UsageError(f"{what} {quoted_path(path)}; it must be a .toml or a .json file")
    content = readers[path.suffix](path, what, "correct the file, or name another one")
    if not isinstance(content, dict):
        raise UsageError(f"{what} {quoted_path(path)} is of type {type(content).__name__}; it must be a table")
    return content


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
