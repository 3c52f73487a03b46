"""A dump of another framework: tensors of every rank, and how they lie on the ranks. Read, and put together.

    DIR/layout.json            which axes the ranks have, and of each tensor what lies where
    DIR/rank-0.safetensors     the tensors of rank 0, or rank-0.npz; the number ends the name
    DIR/rank-1.safetensors     ...

    {"mesh": {"dp": 2, "tp": 2},                                  axes, the slowest first: rank = 2 dp + tp
     "names": "torchtitan",                                       whose names the tensors have, see `dump_names`
     "tensors": {"gradients/*.wq.weight": {"shard": {"tp": 0}},   rows are cut over tp
                 "gradients/*": {"partial": ["dp"]}}}             the ranks of dp have terms of a sum

A tensor is called KIND/NAME; KIND is `weights`, `gradients`, `activations` or `batch` (tokens and targets). It has the
layout of the first pattern (as of a shell) that fits its name; along axes that are not named there it is replicated.

    [1] shards are joined, the innermost axis first    [2] terms are added    [3] replicas must be equal

Replicas whose values differ are themselves a finding: the error names the tensor, the axis and the ranks.

Proved by: tests/equality/test_dump.py
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted, quoted_path, reason
from minidist.base.half import named_dtype
from minidist.base.limits import MAX_RANKS
from minidist.base.read_file import read_json

LAYOUT = "layout.json"
KINDS = ("weights", "activations", "gradients", "batch")
MAX_BYTES = 64 * 10**9  # of all tensors of a dump together
REMEDY = "docs/gradients.md has a program that writes a dump"


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the axes. shard: axis -> dim that is cut. partial: axes whose ranks have terms of a sum."""

    shard: Mapping[str, int] = field(default_factory=dict)
    partial: Sequence[str] = ()


@dataclass(frozen=True)
class Dump:
    """Whole tensors by name. dtypes: as stored. unequal: a sentence for each tensor whose replicas differ."""

    path: str
    names: str
    tensors: dict[str, np.ndarray]
    dtypes: dict[str, str]
    mesh: dict[str, int]
    unequal: dict[str, str]

    def of_kind(self, kind: str) -> dict[str, np.ndarray]:
        """Return the tensors of a kind, without its name."""
        return {name.removeprefix(f"{kind}/"): a for name, a in self.tensors.items() if name.startswith(f"{kind}/")}


def read_dump(path: str | Path, flag: str = "--theirs") -> Dump:
    """Read a dump and put its tensors together, in float64. UsageError names the file, tensor or rank that is wrong."""
    folder, where = Path(path), f"{flag} {quoted_path(path)}"
    if not folder.is_dir():
        raise UsageError(f"{where} is not a folder; {REMEDY}")
    content = read_json(folder / LAYOUT, flag, REMEDY)
    mesh, names, rules = _layout(content, where)

    stored = [_read_file(file, where) for file in _files(folder, mesh, where)]

    # A tensor may lie on some ranks only, such as those of a pipeline stage.
    result, dtypes, unequal = {}, {}, {}
    for name in dict.fromkeys(name for tensors in stored for name in tensors):
        if name.split("/")[0] not in KINDS or "/" not in name:
            raise UsageError(f"{where}: tensor {quoted(name)}; a name is KIND/NAME with a kind of {', '.join(KINDS)}")
        placement = next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), Placement())
        held = {rank: tensors[name] for rank, tensors in enumerate(stored) if name in tensors}
        dtypes[name] = str(next(iter(held.values())).dtype)
        result[name], sentence = _joined(name, held, mesh, placement, where)
        if sentence:
            unequal[name] = sentence
    return Dump(str(path), names, result, dtypes, mesh, unequal)


def write_dump(
    folder: str | Path,
    ranks: Sequence[Mapping[str, np.ndarray]],
    mesh: Mapping[str, int],
    tensors: Mapping[str, Mapping[str, Any]] | None = None,
    names: str = "minidist",
) -> Path:
    """Write what each rank has, by name, in the form that `read_dump` reads."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layout = {"mesh": dict(mesh), "names": names, "tensors": dict(tensors or {})}
    (folder / LAYOUT).write_text(json.dumps(layout, indent=2) + "\n", encoding="utf-8")
    for rank, values in enumerate(ranks):
        arrays = {name: np.ascontiguousarray(value) for name, value in values.items()}
        save_file(arrays, folder / f"rank-{rank}.safetensors")
    return folder


def _shown(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def _layout(content: Any, where: str) -> tuple[dict[str, int], str, dict[str, Placement]]:
    """Return (mesh, names, placement by pattern) of a layout.json."""
    if not isinstance(content, dict):
        raise UsageError(f"{where}: {LAYOUT} is not a JSON object; {REMEDY}")
    unknown = sorted(set(content) - {"mesh", "names", "tensors", "comment"})
    if unknown:
        known = ("mesh", "names", "tensors")
        raise UsageError(f"{where}: {LAYOUT} has the key {quoted(unknown[0])}{nearest(unknown[0], known)}; {REMEDY}")
    mesh, rules = content.get("mesh", {}), content.get("tensors", {})
    is_mesh = isinstance(mesh, dict) and all(type(n) is int and 1 <= n <= MAX_RANKS for n in mesh.values())
    if not is_mesh or prod(mesh.values()) > MAX_RANKS:
        raise UsageError(f"{where}: mesh in {LAYOUT} is {quoted(mesh)}; it gives the size of each axis, at least 1")
    if not isinstance(rules, dict):
        raise UsageError(f"{where}: tensors in {LAYOUT} is {quoted(rules)}; it gives a layout by pattern")
    names = content.get("names", "minidist")
    if not isinstance(names, str):
        raise UsageError(f"{where}: names in {LAYOUT} is {quoted(names)}; it is a text")
    return mesh, names, {pattern: _placement(pattern, rule, mesh, where) for pattern, rule in rules.items()}


def _placement(pattern: str, rule: Any, mesh: Mapping[str, int], where: str) -> Placement:
    """Return the placement that a rule of layout.json describes."""
    at = f"{where}: the layout of {quoted(pattern)}"
    if not isinstance(rule, dict) or set(rule) - {"shard", "partial"}:
        raise UsageError(f"{at} is {quoted(rule)}; it has the keys shard and partial")
    shard, partial = rule.get("shard", {}), rule.get("partial", [])
    if not isinstance(shard, dict) or not all(type(dim) is int and 0 <= dim < 32 for dim in shard.values()):
        raise UsageError(f"{at} has shard {quoted(shard)}; it gives the dim that each axis cuts, from 0")
    if not isinstance(partial, list) or not all(isinstance(axis, str) for axis in partial):
        raise UsageError(f"{at} has partial {quoted(partial)}; it is a list of axes")
    for axis in (*shard, *partial):
        if axis not in mesh:
            raise UsageError(f"{at} names the axis {quoted(axis)}{nearest(axis, mesh)}; the mesh has {_shown(mesh)}")
    if set(shard) & set(partial):
        raise UsageError(f"{at} is cut and a sum over {quoted(min(set(shard) & set(partial)))}; it is one of them")
    return Placement(shard, tuple(partial))


def _read_file(path: Path, where: str) -> dict[str, np.ndarray]:
    """Return the tensors of one rank's file, in the dtypes that it has."""
    from safetensors import SafetensorError, safe_open

    named_dtype("bfloat16")  # which NumPy does not know before
    if path.stat().st_size > MAX_BYTES:
        raise UsageError(f"{where}: file {quoted(path.name)} has {path.stat().st_size:,} B; at most {MAX_BYTES:,}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        else:
            with safe_open(path, framework="numpy") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, EOFError, NotImplementedError) as error:
        raise UsageError(f"{where}: file {quoted(path.name)} is damaged ({reason(error)}); write it again") from None
    except Exception as error:  # zipfile raises several kinds of errors
        raise UsageError(
            f"{where}: file {quoted(path.name)} is no archive of arrays ({reason(error)}); write it again"
        ) from None
    for name, value in found.items():
        if value.dtype.kind not in "fiuV":
            raise UsageError(
                f"{where}: {quoted(name)} in {quoted(path.name)} has dtype {value.dtype}; it holds no numbers"
            )
    return found


def _files(folder: Path, mesh: Mapping[str, int], where: str) -> list[Path]:
    """Return the files of all ranks, before any tensor is read."""
    files = {
        int(match[1]): file
        for file in sorted(folder.iterdir())
        if (match := re.search(r"(\d{1,9})\.(safetensors|npz)$", file.name))
    }
    ranks = prod(mesh.values())
    missing = sorted(set(range(ranks)) - set(files))
    if missing or len(files) != ranks:
        what = f"has no file of rank {missing[0]}" if missing else f"has files of {len(files)} ranks"
        raise UsageError(
            f"{where} {what}, and its mesh {_shown(mesh)} has {ranks} ranks; write a file for each of them"
        )
    return [files[rank] for rank in range(ranks)]


def _joined_along(axis: str, size: int, values: Sequence[np.ndarray], placement: Placement, where: str) -> np.ndarray:
    """Return the shards of one axis joined, its terms added, or its first replica."""
    shapes = [value.shape for value in values]
    text = ", ".join(map(str, shapes))
    if axis in placement.shard:
        dim = placement.shard[axis]
        others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        if len(values) < size or len(others) > 1 or any(len(shape) <= dim for shape in shapes):
            raise UsageError(f"{where} has shards of shapes {text}, which do not join along dim {dim}")
        return np.concatenate(values, axis=dim)
    if len(set(shapes)) > 1:
        raise UsageError(f"{where} has shapes {text}; name the dim that {axis} cuts in {LAYOUT}")
    return np.sum(values, axis=0) if axis in placement.partial else values[0]


def _joined(
    name: str, held: Mapping[int, np.ndarray], mesh: Mapping[str, int], placement: Placement, where: str
) -> tuple[np.ndarray, str]:
    """Return the whole tensor in float64, and a sentence when replicas of it differ."""
    exact = next(iter(held.values())).dtype.kind in "iu"
    parts = {rank: value if exact else value.astype(np.float64) for rank, value in held.items()}
    shape, sentence = list(mesh.values()), ""
    for position in reversed(range(len(shape))):
        axis, size = list(mesh)[position], shape[position]
        stride = prod(shape[position + 1 :])
        joined: dict[int, np.ndarray] = {}
        groups: dict[int, list[int]] = {}
        for rank in parts:
            groups.setdefault(rank - rank // stride % size * stride, []).append(rank)
        for first, ranks in groups.items():
            values = [parts[rank] for rank in sorted(ranks)]
            at = f"{where}: {quoted(name)} over {axis} of ranks {', '.join(map(str, sorted(ranks)))}"
            joined[first] = _joined_along(axis, size, values, placement, at)
            if not sentence and axis not in {*placement.shard, *placement.partial}:
                unlike = [r for r, value in zip(sorted(ranks), values, strict=True) if not _equal(value, values[0])]
                sentence = f"rank {unlike[0]} has other values than rank {min(ranks)} along {axis}" if unlike else ""
        parts = joined
    return next(iter(parts.values())), sentence


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
