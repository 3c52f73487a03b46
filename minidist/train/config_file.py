"""A job in a file, TOML or JSON: the same names as the flags, and the same sentences for what is wrong.

    [model]                     [axes]
    layers = 4                  dp = 2
    width = 128                 tp = 2
                                sequence-parallel = true
Tables only arrange a file: their names are free, and a key means the same in any of them. A flag on the command line
overrides the file.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest
from minidist.train.config import TrainConfig


def read_config(path: str | Path) -> dict[str, Any]:
    """Field -> value, as `TrainConfig.make` takes them.

    Raises UsageError for a file that cannot be read, a key that is no setting (with the nearest one) or that stands twice.
    """
    path = Path(path)
    result: dict[str, Any] = {}
    for key, value in _leaves(_parse(path)):
        field = key.rpartition(".")[2].replace("-", "_")
        if field not in TrainConfig.model_fields:
            raise UsageError(f"{path}: unknown setting {key!r}{nearest(field, TrainConfig.model_fields)}")
        if field in result:
            raise UsageError(f"{path}: {field!r} stands there twice, the second time as {key!r}; leave one of them out")
        result[field] = value
    return result


def _parse(path: Path) -> dict[str, Any]:
    readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}
    if path.suffix not in readers:
        raise UsageError(f"--config {str(path)!r}; it must be a .toml or a .json file")
    try:
        content = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {str(path)!r}: {error.strerror}; give the path of a file") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {str(path)!r} is no {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {str(path)!r} holds a {type(content).__name__}; it must be a table of settings")
    return content


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
